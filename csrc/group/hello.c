/* What a rank says of itself, proofs of the job secret in hellos, and what may be believed of the tables that follow. */
#include "base/hmac.h"
#include "base/host.h"
#include "group/control.h"
#include "net/addr.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void cd_hello_sign(cd_hello *hello, const uint8_t *secret)
{
    memset(hello->proof, 0, sizeof hello->proof);
    if (secret)
        cd_hmac_sha256(secret, 32, hello, offsetof(cd_hello, proof), hello->proof);
}

bool cd_proof_equal(const uint8_t a[CD_MEMBER_PROOF_BYTES], const uint8_t b[CD_MEMBER_PROOF_BYTES])
{
    uint8_t difference = 0;
    for (int i = 0; i < CD_MEMBER_PROOF_BYTES; i++)
        difference = (uint8_t)(difference | (a[i] ^ b[i]));
    return difference == 0;
}

bool cd_hello_is_genuine(const cd_hello *hello, const uint8_t *secret)
{
    if (!secret)
        return true;
    cd_hello expected = *hello;
    cd_hello_sign(&expected, secret);
    return cd_proof_equal(expected.proof, hello->proof);
}

void cd_answer_proof(const cd_hello *hello, const uint8_t *secret, uint8_t out[CD_MEMBER_PROOF_BYTES])
{
    memset(out, 0, CD_MEMBER_PROOF_BYTES);
    if (!secret)
        return;
    /* Another label than a hello's first bytes (a rank is never negative), so that no hello is a valid answer. */
    struct {
        int32_t label[2];
        uint8_t nonces[2][CD_MEMBER_NONCE_BYTES];
    } text = {.label = {-1, -1}};
    memcpy(text.nonces[0], hello->me.nonce, CD_MEMBER_NONCE_BYTES);
    memcpy(text.nonces[1], hello->target, CD_MEMBER_NONCE_BYTES);
    cd_hmac_sha256(secret, 32, &text, sizeof text, out);
}

static uint64_t namespace_inode(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 ? (uint64_t)info.st_ino : 0;
}

cd_status cd_member_fill(cd_member *me, int rank, int world, bool shares_memory, const char *address)
{
    *me = (cd_member){.rank = rank,
                      .world = world,
                      .user = (uint32_t)geteuid(),
                      .process = (uint32_t)getpid(),
                      .pid_namespace = namespace_inode("/proc/self/ns/pid")};
    me->net_namespace = shares_memory ? namespace_inode("/proc/self/ns/net") : 0;
    cd_host_boot_id(me->boot_id);
    cd_host_name(me->host_name, sizeof me->host_name);
    if (address)
        snprintf(me->address, sizeof me->address, "%s", address);
    else
        CD_TRY(cd_addr_setting(me->address, sizeof me->address));
    return cd_host_random(me->nonce, sizeof me->nonce);
}

cd_status cd_members_take(cd_member *members, const void *table, int world)
{
    for (int r = 0; r < world; r++) {
        cd_member told;
        memcpy(&told, (const char *)table + (size_t)r * sizeof told, sizeof told);
        if (told.rank != r || told.world != world)
            return cd_fail_rank(CD_PROTOCOL, 0, "rank 0 sent a table of members whose row %d is of rank %d of %d", r, told.rank,
                                told.world);
    }
    memcpy(members, table, (size_t)world * sizeof *members);
    for (int r = 0; r < world; r++) {
        members[r].boot_id[sizeof members[r].boot_id - 1] = 0;
        members[r].address[sizeof members[r].address - 1] = 0;
        members[r].host_name[sizeof members[r].host_name - 1] = 0;
    }
    return CD_OK;
}

cd_status cd_hosts_take(int32_t *host_of, const int32_t *told, int world)
{
    for (int r = 0; r < world; r++)
        if (told[r] != host_of[r] && told[r] != r)
            return cd_fail_rank(CD_PROTOCOL, 0, "rank 0 says that rank %d is on the host of rank %d, which it is not", r,
                                told[r]);
    memcpy(host_of, told, (size_t)world * sizeof *host_of);
    return CD_OK;
}

bool cd_member_shares_host(const cd_member *a, const cd_member *b)
{
    return a->net_namespace && a->net_namespace == b->net_namespace && a->boot_id[0] && a->user == b->user &&
           memcmp(a->boot_id, b->boot_id, sizeof a->boot_id) == 0;
}

bool cd_member_is_same_process(const cd_member *a, const cd_member *b)
{
    return a->process == b->process && a->pid_namespace && a->pid_namespace == b->pid_namespace &&
           memcmp(a->boot_id, b->boot_id, sizeof a->boot_id) == 0;
}
