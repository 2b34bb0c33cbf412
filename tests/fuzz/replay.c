/* Runs a fuzz target over kept inputs, without libFuzzer: replay_<target> FILE… */
#include "fuzz.h"

#include <stdio.h>
#include <stdlib.h>

int main(int count, char **names)
{
    for (int i = 1; i < count; i++) {
        FILE *file = fopen(names[i], "rb");
        if (!file) {
            perror(names[i]);
            return 1;
        }
        static uint8_t input[1 << 20];
        size_t bytes = fread(input, 1, sizeof input, file);
        fclose(file);
        /* An allocation of the exact size: sanitizers see the end. */
        uint8_t *copy = malloc(bytes ? bytes : 1);
        if (!copy)
            return 1;
        for (size_t j = 0; j < bytes; j++)
            copy[j] = input[j];
        LLVMFuzzerTestOneInput(copy, bytes);
        free(copy);
    }
    printf("replay: %d inputs: ok\n", count - 1);
    return 0;
}
