/* The assert harness of the C tests: a failed check says where and ends the program with 1. */
#ifndef CD_TEST_CHECK_H
#define CD_TEST_CHECK_H

#include "base/status.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Under ThreadSanitizer everything takes 30 times as long: the long tests run a part of their cases there, chosen so that each
 * path still runs; `make SAN=thread LONG=1` runs them all. */
#if defined __SANITIZE_THREAD__ && !defined CHECK_LONG
#define CHECK_BRIEF 1
#else
#define CHECK_BRIEF 0
#endif

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition);     \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

#define CHECK_OK(call)                                                                         \
    do {                                                                                       \
        cd_status check_ = (call);                                                             \
        if (check_ != CD_OK) {                                                                 \
            fprintf(stderr, "%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call, cd_status_name(check_), \
                    cd_last_error()->text);                                                    \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

#define CHECK_FAILS(call, code)                                                                \
    do {                                                                                       \
        cd_status check_ = (call);                                                             \
        if (check_ != (code)) {                                                                \
            fprintf(stderr, "%s:%d: %s: expected '%s', got '%s'\n", __FILE__, __LINE__, #call, \
                    cd_status_name(code), cd_status_name(check_));                             \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

/* Runs body(rank, ctx) on `ranks` threads, one a rank, and waits for all. */
typedef void (*check_rank_func)(int rank, void *ctx);
typedef struct {
    check_rank_func body;
    void *ctx;
    int rank;
} check_rank_args;

static inline void *check_rank_main(void *arg)
{
    check_rank_args *args = arg;
    args->body(args->rank, args->ctx);
    return 0;
}

static inline void check_on_ranks(int ranks, check_rank_func body, void *ctx)
{
    pthread_t *threads = calloc((size_t)ranks, sizeof *threads);
    check_rank_args *args = calloc((size_t)ranks, sizeof *args);
    for (int r = 0; r < ranks; r++) {
        args[r] = (check_rank_args){body, ctx, r};
        CHECK(pthread_create(&threads[r], 0, check_rank_main, &args[r]) == 0);
    }
    for (int r = 0; r < ranks; r++)
        pthread_join(threads[r], 0);
    free(args);
    free(threads);
}

#endif
