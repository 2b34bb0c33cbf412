#include "coll/plan.h"

#include "base/knob.h"
#include "base/log.h"
#include "coll/net_run.h"
#include "coll/shm_team_impl.h"

#include <ctype.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>

#define KIB ((size_t)1024)
#define ANY SIZE_MAX
#define SHM CD_NEEDS_SHM
#define ARENA (CD_NEEDS_SHM | CD_NEEDS_ARENA)
#define MESH CD_NEEDS_MESH

/* In order of preference for each kind: shared memory first, in the order of cd_kind, then what runs over messages alone. */
static const cd_plan_row table[] = {
    {CD_BARRIER, ANY, INT_MAX, SHM, "shm_small", cd_shm_small_run},
    /* Measured with bench_coll_shm on a 2-core EPYC (1 MiB of L2), small / stage in µs. 2 ranks: 64 B 0.15 / 0.24, 1 KiB
     * 0.37 / 0.30, 16 KiB 2.5 / 2.5, 64 KiB 9.4 / 7.8. 4 ranks: 16 KiB 11.0 / 13.4, 32 KiB 17.6 / 17.0, 64 KiB 28 / 25.6. One
     * phase reads the bytes of all ranks, so its share shrinks with more of them. On a host of 32 cores (2 MiB of L2 each), 8
     * ranks: 1 KiB 2.4 / 1.8, 4 KiB 5.9 / 3.4; 16 ranks: 1 KiB 4.3 / 3.4, 4 KiB 11.4 / 5.5; 32 ranks: 1 KiB 7.2 / 4.6. */
    {CD_ALL_REDUCE, 768, 3, SHM, "shm_small", cd_shm_small_run},
    {CD_ALL_REDUCE, ANY, 3, ARENA, "shm_arena", cd_shm_arena_run},
    {CD_ALL_REDUCE, ANY, 3, SHM, "shm_stage", cd_shm_stage_run},
    {CD_ALL_REDUCE, 32 * KIB + 1, 5, SHM, "shm_small", cd_shm_small_run},
    {CD_ALL_REDUCE, 1 * KIB, INT_MAX, SHM, "shm_small", cd_shm_small_run},
    {CD_ALL_REDUCE, ANY, INT_MAX, ARENA, "shm_arena", cd_shm_arena_run},
    {CD_ALL_REDUCE, ANY, INT_MAX, SHM, "shm_stage", cd_shm_stage_run},
    {CD_REDUCE, 64 * KIB + 1, INT_MAX, SHM, "shm_small", cd_shm_small_run},
    {CD_REDUCE, ANY, INT_MAX, ARENA, "shm_arena", cd_shm_arena_run},
    {CD_REDUCE, ANY, INT_MAX, SHM, "shm_stage", cd_shm_stage_run},
    /* From 32 KiB on what is moved may be read in place (shm_ways.c), and by rings it takes no longer than by slots. Measured
     * with bench_coll_shm on 2 cores (Intel, 2 MiB of L2 each) without a common cache, small / move by rings in µs. 2 ranks:
     * broadcast of 64 KiB 5.3 / 6.5, all_gather 10.3 / 6.3, all_to_all 8.6 / 8.2; 4 ranks: 15.1 / 13.2, 18.4 / 13.0, 19.7 / 24.7.
     * */
    {CD_BROADCAST, 32 * KIB, 5, SHM, "shm_small", cd_shm_small_run},
    {CD_BROADCAST, ANY, 5, SHM, "shm_move", cd_shm_move_run},
    {CD_BROADCAST, 64 * KIB + 1, INT_MAX, SHM, "shm_small", cd_shm_small_run},
    {CD_BROADCAST, ANY, INT_MAX, SHM, "shm_move", cd_shm_move_run},
    {CD_ALL_GATHER, 32 * KIB, 5, SHM, "shm_small", cd_shm_small_run},
    {CD_ALL_GATHER, ANY, 5, SHM, "shm_move", cd_shm_move_run},
    {CD_ALL_GATHER, 64 * KIB + 1, INT_MAX, SHM, "shm_small", cd_shm_small_run},
    {CD_ALL_GATHER, ANY, INT_MAX, SHM, "shm_move", cd_shm_move_run},
    {CD_GATHER, 32 * KIB, 5, SHM, "shm_small", cd_shm_small_run},
    {CD_GATHER, ANY, 5, SHM, "shm_move", cd_shm_move_run},
    {CD_GATHER, 64 * KIB + 1, INT_MAX, SHM, "shm_small", cd_shm_small_run},
    {CD_GATHER, ANY, INT_MAX, SHM, "shm_move", cd_shm_move_run},
    {CD_SCATTER, 32 * KIB, 5, SHM, "shm_small", cd_shm_small_run},
    {CD_SCATTER, ANY, 5, SHM, "shm_move", cd_shm_move_run},
    {CD_SCATTER, 64 * KIB + 1, INT_MAX, SHM, "shm_small", cd_shm_small_run},
    {CD_SCATTER, ANY, INT_MAX, SHM, "shm_move", cd_shm_move_run},
    {CD_REDUCE_SCATTER, 64 * KIB + 1, INT_MAX, SHM, "shm_small", cd_shm_small_run},
    {CD_REDUCE_SCATTER, ANY, INT_MAX, SHM, "shm_stage", cd_shm_stage_run},
    {CD_ALL_TO_ALL, 32 * KIB, 5, SHM, "shm_small", cd_shm_small_run},
    {CD_ALL_TO_ALL, ANY, 5, SHM, "shm_move", cd_shm_move_run},
    {CD_ALL_TO_ALL, 64 * KIB + 1, INT_MAX, SHM, "shm_small", cd_shm_small_run},
    {CD_ALL_TO_ALL, ANY, INT_MAX, SHM, "shm_move", cd_shm_move_run},
    {CD_BARRIER, ANY, INT_MAX, MESH, "net_barrier", cd_net_barrier_run},
    {CD_ALL_REDUCE, CD_NET_CARRY + 1, INT_MAX, MESH, "net_small", cd_net_small_run},
    {CD_ALL_REDUCE, ANY, INT_MAX, MESH, "net_slice", cd_net_slice_run},
    {CD_REDUCE, CD_NET_CARRY + 1, INT_MAX, MESH, "net_small", cd_net_small_run},
    {CD_REDUCE, ANY, INT_MAX, MESH, "net_slice", cd_net_slice_run},
    {CD_BROADCAST, 256 * KIB + 1, INT_MAX, MESH, "net_tree", cd_net_tree_run},
    {CD_BROADCAST, ANY, INT_MAX, MESH, "net_chain", cd_net_chain_run},
    {CD_ALL_GATHER, ANY, INT_MAX, MESH, "net_move", cd_net_move_run},
    {CD_GATHER, ANY, INT_MAX, MESH, "net_move", cd_net_move_run},
    {CD_SCATTER, ANY, INT_MAX, MESH, "net_move", cd_net_move_run},
    {CD_REDUCE_SCATTER, CD_NET_CARRY + 1, INT_MAX, MESH, "net_small", cd_net_small_run},
    {CD_REDUCE_SCATTER, ANY, INT_MAX, MESH, "net_slice", cd_net_slice_run},
    {CD_ALL_TO_ALL, ANY, INT_MAX, MESH, "net_move", cd_net_move_run},
};
#define ROWS (sizeof table / sizeof *table)

/* One part of CDIST_PLAN: bytes from `least` on, below row.bytes_below. */
typedef struct {
    cd_plan_row row;
    size_t least;
} override;

/* What CDIST_PLAN says, a fact of the process's environment: read once. */
static struct {
    override *list;
    size_t count;
    cd_error error; /* code CD_OK when the text is good */
    _Atomic uint32_t shown[ROWS]; /* bit per kind of first choice that CDIST_LOG=plan has printed */
    bool talks;
} choice;
static pthread_once_t choice_once = PTHREAD_ONCE_INIT;

const cd_plan_row *cd_plan_rows(size_t *count_p)
{
    *count_p = ROWS;
    return table;
}

static size_t blocks_bytes(const cd_blocks *blocks, int world)
{
    size_t bytes = 0;
    int spans = blocks->spans > 1 ? world : blocks->spans;
    for (int i = 0; i < spans; i++)
        bytes += blocks->list[i].count * blocks->list[i].item_bytes;
    return bytes;
}

size_t cd_plan_bytes(const cd_team *team, const cd_op *op)
{
    if (op->flags & CD_OP_UNEVEN)
        return ANY; /* sizes differ between ranks: none of them can be compared */
    const cd_span *in = op->in.spans ? &op->in.list[0] : NULL, *out = op->out.spans ? &op->out.list[0] : NULL;
    size_t world = (size_t)team->world;
    switch (op->kind) {
    case CD_ALL_REDUCE:
    case CD_REDUCE:
    case CD_SEND: return in->count * in->item_bytes;
    case CD_BROADCAST:
    case CD_RECV:
        in = in ? in : out;
        return in->count * in->item_bytes;
    case CD_ALL_GATHER:
    case CD_GATHER: return in->count * in->item_bytes * world;
    case CD_SCATTER:
    case CD_REDUCE_SCATTER: return out->count * out->item_bytes * world;
    case CD_ALL_TO_ALL: return blocks_bytes(&op->in, team->world);
    case CD_BARRIER:
    case CD_KINDS: break;
    }
    return 0;
}

static bool fits(const cd_plan_row *row, const cd_team *team, size_t bytes)
{
    if (row->bytes_below != ANY && bytes >= row->bytes_below)
        return false;
    if (team->world >= row->ranks_below)
        return false;
    if ((row->needs & CD_NEEDS_MESH) && !team->mesh)
        return false;
    if (!(row->needs & CD_NEEDS_SHM))
        return true;
    if (!team->shm || ((row->needs & CD_NEEDS_ARENA) && !team->shm->arena))
        return false;
    return row->run != cd_shm_small_run || bytes <= cd_shm_small_limit(team->world);
}

static bool take_number(const char **text, size_t *value_p)
{
    if (!isdigit((unsigned char)**text))
        return false;
    size_t value = 0;
    for (; isdigit((unsigned char)**text); ++*text) {
        size_t digit = (size_t)(**text - '0');
        if (value > (SIZE_MAX - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    int shift = **text == 'K' ? 10 : **text == 'M' ? 20 : **text == 'G' ? 30 : 0;
    if (shift && value > SIZE_MAX >> shift)
        return false;
    *value_p = value << shift;
    *text += shift != 0;
    return true;
}

/* Length of the word if `text` begins with `word` and `end` behind it, otherwise 0. */
static size_t begins(const char *text, const char *word, char end)
{
    size_t length = strlen(word);
    return strncmp(text, word, length) == 0 && text[length] == end ? length : 0;
}

/* "kind:least-below:name" */
static bool parse_part(const char *part, override *out)
{
    size_t length = 0;
    int kind = 0;
    for (; kind < CD_KINDS; kind++)
        if ((length = begins(part, cd_kind_name((cd_kind)kind), ':')) != 0)
            break;
    if (!length)
        return false;
    const char *next = part + length + 1;
    size_t least = 0, below = ANY;
    if (*next != '-' && !take_number(&next, &least))
        return false;
    if (*next++ != '-')
        return false;
    if (*next != ':' && (!take_number(&next, &below) || below <= least))
        return false;
    if (*next++ != ':')
        return false;
    for (size_t i = 0; i < ROWS; i++) {
        if ((int)table[i].kind != kind || strcmp(table[i].name, next) != 0)
            continue;
        *out = (override){.row = table[i], .least = least};
        out->row.bytes_below = below;
        out->row.ranks_below = INT_MAX;
        return true;
    }
    return false;
}

static void remember_error(cd_status code)
{
    choice.error = *cd_last_error();
    choice.error.code = code;
    free(choice.list);
    choice.list = NULL;
    choice.count = 0;
}

static void read_choice(void)
{
    choice.talks = cd_log_topic("plan");
    const char *text = cd_knob("CDIST_PLAN");
    size_t parts = 1;
    for (const char *c = text; *c; c++)
        parts += *c == ';';
    choice.list = calloc(parts, sizeof *choice.list);
    if (!choice.list) {
        remember_error(cd_fail(CD_NO_MEMORY, "CDIST_PLAN: no memory for %zu parts", parts));
        return;
    }
    while (*text) {
        size_t length = strcspn(text, ";");
        char part[128];
        if (length < sizeof part) {
            memcpy(part, text, length);
            part[length] = 0;
        }
        if (length >= sizeof part || !parse_part(part, &choice.list[choice.count])) {
            remember_error(cd_fail(CD_BAD_ARGUMENT,
                                   "CDIST_PLAN: \"%.*s\" is not kind:from-below:algorithm, as in "
                                   "all_reduce:0-64K:shm_small, with an algorithm of that kind",
                                   (int)cd_least(length, 200), text));
            return;
        }
        choice.count++;
        text += length + (text[length] == ';');
    }
}

cd_status cd_plan_check(void)
{
    pthread_once(&choice_once, read_choice);
    return choice.error.code == CD_OK ? CD_OK : cd_fail_with(&choice.error);
}

static CD_COLD void show(const cd_plan_row *row, const cd_team *team, const cd_op *op, size_t bytes, bool forced)
{
    for (size_t i = 0; i < ROWS; i++) {
        if (table[i].kind != row->kind || table[i].run != row->run)
            continue;
        if (atomic_exchange_explicit(&choice.shown[i], 1, memory_order_relaxed))
            return;
        break;
    }
    const char *why = forced ? "CDIST_PLAN" : "table";
    if (bytes == ANY)
        cd_log_about("plan", "%s among %d ranks, uneven: %s (%s)", cd_kind_name(op->kind), team->world, row->name, why);
    else
        cd_log_about("plan", "%s of %zu bytes among %d ranks: %s (%s)", cd_kind_name(op->kind), bytes, team->world,
                     row->name, why);
}

const cd_plan_row *cd_plan_find(const cd_team *team, const cd_op *op)
{
    pthread_once(&choice_once, read_choice);
    size_t bytes = cd_plan_bytes(team, op);
    for (size_t i = 0; i < choice.count; i++) {
        const override *o = &choice.list[i];
        if (o->row.kind == op->kind && bytes >= o->least && fits(&o->row, team, bytes)) {
            if (cd_unlikely(choice.talks))
                show(&o->row, team, op, bytes, true);
            return &o->row;
        }
    }
    const cd_plan_row *row = table;
    while (row < table + ROWS - 1 && !(row->kind == op->kind && fits(row, team, bytes)))
        row++;
    if (cd_unlikely(choice.talks))
        show(row, team, op, bytes, false);
    return row;
}
