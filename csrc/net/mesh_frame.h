/* The frames of the mesh: a fixed header of one cache line, then the body, then filler up to the next multiple of 64 bytes so
 * that headers and bodies in shared memory start on lines. Private to net/mesh*. */
#ifndef CD_NET_MESH_FRAME_H
#define CD_NET_MESH_FRAME_H

#include "net/mesh.h"

#include <endian.h>

_Static_assert(__BYTE_ORDER == __LITTLE_ENDIAN, "frames cross hosts in memory order, which is little endian");

#define CD_FRAME_MAGIC 0x6d644331u /* "1Cdm" */
#define CD_FRAME_INLINE 24
/* A large body travels in segments, so that small frames and other messages pass between them. */
#define CD_FRAME_SEGMENT (UINT64_C(256) << 10)
#define CD_FRAME_LARGEST (UINT64_C(1) << 48)

typedef enum {
    CD_FRAME_EAGER = 1, /* a whole message: header and body */
    CD_FRAME_ASK,       /* a large message waits at the sender under `ticket` */
    CD_FRAME_READY,  /* the receive for it is posted; answer to ASK: `ticket` of the sender, `offset` = ticket
                        of the receiver */
    CD_FRAME_BODY,   /* a segment: `ticket` of the receiver, `offset` in the message */
    CD_FRAME_DROP,   /* the sender cancelled what it had announced under `ticket` */
    CD_FRAME_REFUSE, /* the receiver will not take the message; `ticket` of the sender, `offset` = cd_status;
                        CD_MISMATCH: `bytes` and `signature` of the receive; CD_PEER_LOST: it left the group */
    CD_FRAME_SLOW,   /* announce everything from now on */
    CD_FRAME_FAST,   /* send small messages eagerly again */
    CD_FRAME_TOOK,   /* the receiver has read the body in the sender's memory and taken the offer; `ticket` of the sender */
    CD_FRAME_KINDS
} cd_frame_kind;

typedef struct {
    uint32_t magic;
    uint8_t kind;
    uint8_t zero[3];
    uint64_t context;
    union {
        int64_t tag;     /* EAGER, ASK */
        uint64_t offset; /* READY, BODY, REFUSE */
    };
    uint64_t bytes;      /* EAGER, ASK: of the message; BODY: of the segment; REFUSE: of the receive */
    uint32_t signature;
    uint32_t ticket;
    union {
        char inline_body[CD_FRAME_INLINE]; /* of an EAGER message that fits here: nothing follows the header then */
        cd_offer offer;                    /* ASK */
    };
} cd_frame;
_Static_assert(sizeof(cd_frame) == 64 && offsetof(cd_frame, inline_body) == 40, "crosses processes and hosts");

/* Bytes that follow the header, without filler. */
static inline size_t cd_frame_body_bytes(const cd_frame *frame)
{
    if (frame->kind == CD_FRAME_EAGER)
        return frame->bytes > CD_FRAME_INLINE ? (size_t)frame->bytes : 0;
    return frame->kind == CD_FRAME_BODY ? (size_t)frame->bytes : 0;
}

static inline size_t cd_frame_filler_bytes(size_t body_bytes)
{
    return (size_t)(0 - body_bytes) & 63;
}

/* May this header be acted on? Everything that later code takes for granted is checked here. */
static inline bool cd_frame_is_legal(const cd_frame *frame)
{
    if (frame->magic != CD_FRAME_MAGIC || frame->kind == 0 || frame->kind >= CD_FRAME_KINDS)
        return false;
    if (frame->zero[0] | frame->zero[1] | frame->zero[2])
        return false;
    switch ((cd_frame_kind)frame->kind) {
    case CD_FRAME_EAGER: return frame->bytes <= CD_MESH_EAGER;
    case CD_FRAME_REFUSE:
    case CD_FRAME_ASK: return frame->bytes <= CD_FRAME_LARGEST;
    case CD_FRAME_BODY: return frame->bytes <= CD_FRAME_SEGMENT;
    default: return frame->bytes == 0;
    }
}

#endif
