/* The recorder: entries, the ring, readers beside writers; and what a wait that is too long says of others. */
#include "check.h"
#include "table_store.h"

#include "group/group.h"
#include "group/recorder.h"
#include "group/world_impl.h"

#include <stdlib.h>
#include <unistd.h>

static cd_record_page *new_page(void)
{
    cd_record_page *page = aligned_alloc(CD_LINE, sizeof *page);
    CHECK(page);
    memset(page, 0, sizeof *page);
    cd_record_page_open(page);
    return page;
}

static cd_op op_of(uint64_t sequence)
{
    return (cd_op){.kind = CD_ALL_REDUCE, .dtype = CD_FLOAT32, .redop = CD_MAX, .root = -1, .count = sequence, .item_bytes = 4,
                   .sequence = sequence};
}

static void test_ring(void)
{
    cd_record_page *page = new_page();
    cd_record_view views[CD_RECORD_RING];
    char text[400], site[8 * CD_RECORD_SITE_WORDS];
    CHECK(cd_record_read(page, views, 10) == 0);
    CHECK(strstr(cd_record_describe(page, text, sizeof text), "nothing"));
    for (uint64_t i = 1; i <= 1000; i++) {
        cd_op op = op_of(i);
        cd_record *record = cd_record_begin(page, &op, 77, -1, CD_RECORD_RUNNING);
        if (i < 1000)
            cd_record_end(record, i, i != 999, false);
    }
    CHECK(cd_record_read(page, views, CD_RECORD_RING) == (int)CD_RECORD_RING);
    CHECK(views[0].sequence == 1000 && views[0].state == CD_RECORD_RUNNING && views[0].bytes == 4000 && views[0].peer == -1);
    CHECK(views[0].kind == CD_ALL_REDUCE && views[0].redop == CD_MAX && views[0].dtype == CD_FLOAT32 && views[0].group == 77);
    CHECK(views[1].state == CD_RECORD_FAILED && views[2].state == CD_RECORD_DONE);
    CHECK(cd_record_find(page, 77, &views[0]) && views[0].sequence == 1000 && !cd_record_find(page, 78, &views[0]));
    CHECK(strstr(cd_record_describe(page, text, sizeof text), "is in all_reduce 1000"));
    CHECK(cd_record_site(page, site)[0] == 0);
    cd_record_set_site(page, "train.py:33");
    CHECK(strcmp(cd_record_site(page, site), "train.py:33") == 0);
    CHECK(strstr(cd_record_describe(page, text, sizeof text), "at train.py:33"));
    /* An entry whose place was taken is left alone. */
    cd_op op = op_of(1);
    cd_record *old = cd_record_begin(page, &op, 1, -1, CD_RECORD_QUEUED);
    for (unsigned i = 0; i < CD_RECORD_RING; i++)
        cd_record_begin(page, &op, 2, -1, CD_RECORD_RUNNING);
    cd_record_start(old, 1001, 5);
    cd_record_end(old, 1001, true, true);
    CHECK(cd_record_read(page, views, 1) == 1 && views[0].group == 2 && views[0].state == CD_RECORD_RUNNING);
    CHECK(cd_record_site(page, site)[0] == 0);
    free(page);
}

static cd_record_page *shared;

/* Every word of an entry tells the same number: a torn one would not. */
static void write_and_read(int rank, void *ctx)
{
    (void)ctx;
    if (rank > 0) {
        for (uint64_t i = 1; i < 50000; i++) {
            cd_op op = op_of(i);
            op.root = (int)i;
            cd_record *record = cd_record_begin(shared, &op, i, op.root, CD_RECORD_RUNNING);
            (void)record;
        }
        return;
    }
    cd_record_view views[CD_RECORD_RING];
    for (int round = 0; round < 2000; round++) {
        int count = cd_record_read(shared, views, CD_RECORD_RING);
        for (int i = 0; i < count; i++)
            CHECK(views[i].sequence == views[i].group && views[i].bytes == 4 * views[i].sequence &&
                  views[i].peer == (int)views[i].sequence);
    }
}

static table_store store = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void one_is_late(int rank, void *ctx)
{
    (void)ctx;
    cd_world_config config = {.rank = rank, .world = 3, .prefix = "late", .timeout_ns = 10 * CD_NS_PER_S};
    cd_patience patience = cd_patience_until(cd_deadline_after_ns(10 * CD_NS_PER_S), 3);
    cd_world *world;
    CHECK_OK(cd_world_open(&config, &store.base, &patience, &world));
    cd_group *group = cd_world_group(world);
    cd_op barrier = {.kind = CD_BARRIER, .root = -1};
    CHECK_OK(cd_group_run(group, &barrier, &patience));
    if (rank != 1) {
        float value = 0;
        cd_span span = {&value, 1, 0, 4};
        cd_op op = {.kind = CD_RECV, .dtype = CD_FLOAT32, .root = -1, .out = {&span, 0, 1}, .peer = 1, .count = 1, .item_bytes = 4};
        cd_patience brief = cd_patience_until(cd_deadline_after_ns(120 * CD_NS_PER_MS), 3);
        CHECK_FAILS(cd_group_run(group, &op, &brief), CD_WAIT_EXPIRED);
        CHECK(strstr(cd_last_error()->text, "rank 1 last finished barrier 1"));
        brief.deadline = cd_deadline_after_ns(400 * CD_NS_PER_MS);
        CHECK_FAILS(cd_group_run(group, &barrier, &brief), CD_TIMED_OUT);
        const char *text = cd_last_error()->text;
        CHECK(strstr(text, "arrived ranks: [0, 2]") && strstr(text, "missing ranks: [1]"));
        CHECK(strstr(text, "rank 1 last finished barrier 1") && strstr(text, "waited 0.") && cd_last_error()->rank == 1);
    } else {
        usleep(900000);
        CHECK_FAILS(cd_group_run(group, &barrier, &patience), CD_TIMED_OUT);
        CHECK(strstr(cd_last_error()->text, "missing ranks: [1]"));
    }
    cd_world_close(world);
    cd_world_release(world);
}

int main(void)
{
    test_ring();
    shared = new_page();
    check_on_ranks(2, write_and_read, 0);
    free(shared);
    cd_store_init(&store.base, &table_ops);
    check_on_ranks(3, one_is_late, 0);
    free(store.value);
    puts("group recorder: ok");
    return 0;
}
