/* Fuzz targets: libFuzzer drives them with clang (make fuzz), replay.c with the kept corpus in every C test run. */
#ifndef CD_FUZZ_H
#define CD_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#define FUZZ_CHECK(condition)  \
    do {                       \
        if (!(condition))      \
            __builtin_trap();  \
    } while (0)

#endif
