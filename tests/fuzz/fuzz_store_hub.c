/* Requests of two clients that send anything, carried out on one table as the server's thread does it: values, queues and who
 * watches what stay consistent, whatever is asked and whoever goes away while it waits. */
#include "fuzz.h"
#include "store/server_impl.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define CLIENTS 2

static int ends[CLIENTS][2];

static void open_ends(void)
{
    for (int i = 0; i < CLIENTS && !ends[i][1]; i++)
        FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends[i]) == 0);
}

static void read_answers(hub *h, conn *clients)
{
    static uint8_t sink[1 << 16];
    for (int i = 0; i < CLIENTS; i++) {
        do
            hub_flush(h, &clients[i]);
        while (recv(ends[i][1], sink, sizeof sink, MSG_DONTWAIT) > 0);
        FUZZ_CHECK(clients[i].doomed || clients[i].out.start == clients[i].out.end);
    }
}

static void leave(hub *h, conn *c)
{
    hub_forget_watches(h, c);
    free(c->out.data);
    int fd = c->fd;
    *c = (conn){.fd = fd, .stage = STAGE_OPEN};
}

static void check_watches(const conn *clients)
{
    for (int i = 0; i < CLIENTS; i++) {
        size_t linked = 0;
        for (size_t j = 0; j < clients[i].watch_count; j++)
            linked += clients[i].watches[j].entry != NULL;
        FUZZ_CHECK(linked == clients[i].missing);
    }
}

/* With nobody left, an entry is in the table only for its value or its queue. */
static void check_table(const cd_table *table)
{
    size_t entries = 0;
    int64_t values = 0;
    for (size_t i = 0; i < table->slot_count; i++)
        for (const cd_entry *e = table->slots[i]; e; e = e->next) {
            FUZZ_CHECK(cd_entry_is_present(e) && !e->watchers[0] && !e->watchers[1]);
            FUZZ_CHECK(!e->first == !e->queued && !e->first == !e->last);
            FUZZ_CHECK(cd_table_find(table, (cd_bytes){e->key, e->key_bytes}) == e);
            entries++;
            values += e->has_value;
        }
    FUZZ_CHECK(entries == table->entries && values == table->values);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    open_ends();
    hub h = {0};
    conn clients[CLIENTS] = {{.fd = ends[0][0], .stage = STAGE_OPEN}, {.fd = ends[1][0], .stage = STAGE_OPEN}};
    FUZZ_CHECK(cd_table_init(&h.table) == CD_OK);
    const uint8_t *end = data + bytes;
    while (data < end) {
        conn *c = &clients[*data & 1];
        bool goes = *data++ & 128;
        cd_scan scan = {0};
        bool whole = data < end && cd_proto_scan(&scan, data, (size_t)(end - data)) == CD_SCAN_DONE;
        if (!whole || goes || !hub_run(&h, c, data, scan.at))
            leave(&h, c);
        if (!whole)
            break;
        data += scan.at;
        read_answers(&h, clients);
        check_watches(clients);
    }
    for (int i = 0; i < CLIENTS; i++)
        leave(&h, &clients[i]);
    check_table(&h.table);
    cd_table_clear(&h.table);
    return 0;
}
