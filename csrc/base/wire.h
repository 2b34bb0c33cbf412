/* Little-endian integers and byte strings with a u64 length in a bounded buffer. A cursor never goes past its end: the first
 * access that would makes it `broken`, and all later ones give 0 or nothing. */
#ifndef CD_BASE_WIRE_H
#define CD_BASE_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const uint8_t *next, *end;
    bool broken;
} cd_reader;

static inline cd_reader cd_reader_of(const void *data, size_t bytes)
{
    return (cd_reader){data, (const uint8_t *)data + bytes, false};
}

/* `bytes` raw bytes in place, or NULL. */
static inline const void *cd_take_raw(cd_reader *reader, uint64_t bytes)
{
    if (reader->broken || bytes > (uint64_t)(reader->end - reader->next)) {
        reader->broken = true;
        return NULL;
    }
    const void *at = reader->next;
    reader->next += bytes;
    return at;
}

static inline uint64_t cd_take_number(cd_reader *reader, int width)
{
    const uint8_t *at = cd_take_raw(reader, (uint64_t)width);
    uint64_t value = 0;
    for (int i = 0; at && i < width; i++)
        value |= (uint64_t)at[i] << (8 * i);
    return value;
}

static inline uint8_t cd_take_u8(cd_reader *reader) { return (uint8_t)cd_take_number(reader, 1); }
static inline uint32_t cd_take_u32(cd_reader *reader) { return (uint32_t)cd_take_number(reader, 4); }
static inline uint64_t cd_take_u64(cd_reader *reader) { return cd_take_number(reader, 8); }

/* u64 length, then that many bytes, at most `most`. NULL when broken. */
static inline const void *cd_take_string(cd_reader *reader, uint64_t most, size_t *bytes_p)
{
    uint64_t bytes = cd_take_u64(reader);
    if (bytes > most)
        reader->broken = true;
    const void *at = cd_take_raw(reader, bytes);
    *bytes_p = at ? (size_t)bytes : 0;
    return at;
}

typedef struct {
    uint8_t *next, *end;
    bool broken;
} cd_writer;

static inline cd_writer cd_writer_of(void *data, size_t bytes)
{
    return (cd_writer){data, (uint8_t *)data + bytes, false};
}

static inline void cd_put_raw(cd_writer *writer, const void *data, size_t bytes)
{
    if (writer->broken || bytes > (size_t)(writer->end - writer->next)) {
        writer->broken = true;
        return;
    }
    if (bytes)
        memcpy(writer->next, data, bytes);
    writer->next += bytes;
}

static inline void cd_put_number(cd_writer *writer, uint64_t value, int width)
{
    uint8_t raw[8];
    for (int i = 0; i < width; i++)
        raw[i] = (uint8_t)(value >> (8 * i));
    cd_put_raw(writer, raw, (size_t)width);
}

static inline void cd_put_u8(cd_writer *writer, uint8_t value) { cd_put_number(writer, value, 1); }
static inline void cd_put_u32(cd_writer *writer, uint32_t value) { cd_put_number(writer, value, 4); }
static inline void cd_put_u64(cd_writer *writer, uint64_t value) { cd_put_number(writer, value, 8); }

static inline void cd_put_string(cd_writer *writer, const void *data, size_t bytes)
{
    cd_put_u64(writer, bytes);
    cd_put_raw(writer, data, bytes);
}

#endif
