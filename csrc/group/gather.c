/* What the ranks of a group tell each other, by an operation of the group itself. */
#include "group/group.h"

cd_status cd_group_gather_bytes(cd_group *group, const void *mine, size_t bytes, void *all, cd_patience *patience)
{
    cd_span in = {.data = (void *)(uintptr_t)mine, .count = bytes, .item_bytes = 1};
    cd_span out = {.data = all, .count = bytes * (size_t)cd_group_size(group), .item_bytes = 1};
    cd_op op = {.kind = CD_ALL_GATHER, .dtype = CD_BYTES, .device = CD_CPU, .root = -1, .peer = -1,
                .in = {.list = &in, .spans = 1}, .out = {.list = &out, .spans = 1},
                .count = bytes, .item_bytes = 1, .ndim = 1, .shape = {(int64_t)bytes}};
    return cd_group_run(group, &op, patience);
}
