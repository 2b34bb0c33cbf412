/* The wire codec: a reader never leaves its buffer, and once broken stays so. */
#include "base/wire.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    size_t half = bytes / 2;
    cd_reader reader = cd_reader_of(data + half, bytes - half);
    bool was_broken = false;
    for (size_t i = 0; i < half; i++) {
        size_t got = 0;
        const uint8_t *before = reader.next;
        const void *at = NULL;
        switch (data[i] % 5) {
        case 0: cd_take_u8(&reader); break;
        case 1: cd_take_u32(&reader); break;
        case 2: cd_take_u64(&reader); break;
        case 3: at = cd_take_string(&reader, data[i], &got); break;
        default: at = cd_take_raw(&reader, (uint64_t)data[i] << (data[i] % 57)); break;
        }
        FUZZ_CHECK(reader.next <= reader.end && reader.next >= before);
        FUZZ_CHECK(!was_broken || (reader.broken && !at && reader.next == before));
        FUZZ_CHECK(got <= data[i]);
        was_broken = reader.broken;
    }
    return 0;
}
