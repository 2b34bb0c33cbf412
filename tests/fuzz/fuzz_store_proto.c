/* The scanner of the store's requests: any bytes in any pieces, the same verdict as in one piece. */
#include "fuzz.h"
#include "store/proto.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes < 1)
        return 0;
    size_t step = data[0] % 17u + 1;
    data++;
    bytes--;
    cd_scan whole = {0}, parts = {0};
    cd_scan_result at_once = cd_proto_scan(&whole, data, bytes), in_parts = CD_SCAN_MORE;
    for (size_t have = 0; have <= bytes && in_parts == CD_SCAN_MORE; have += step)
        in_parts = cd_proto_scan(&parts, data, have);
    if (in_parts == CD_SCAN_MORE)
        in_parts = cd_proto_scan(&parts, data, bytes);
    FUZZ_CHECK(at_once == in_parts);
    FUZZ_CHECK(at_once != CD_SCAN_DONE || (whole.at == parts.at && whole.at <= bytes));
    return 0;
}
