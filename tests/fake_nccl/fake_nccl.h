/* Handles that tests have on the fake NCCL. */
#ifndef CD_FAKE_NCCL_H
#define CD_FAKE_NCCL_H

/* The communicators of this rank of this process report `result` as their asynchronous error from now on; 0 ends it. */
void fake_nccl_fail(int rank, int result);
/* Communicators that are made from others come to nothing from now on; 0 ends it. */
void fake_nccl_break(int on);
/* ncclCommFinalize comes back only when its communicator is aborted, from now on; 0 ends it. */
void fake_nccl_hang_finalize(int on);
/* Communicators that were made and neither destroyed nor aborted. */
int fake_nccl_left(void);
/* Factors and registrations of memory that were made and not destroyed. */
int fake_nccl_factors(void);
int fake_nccl_registered(void);
/* How often ncclCommAbort, ncclCommSplit and ncclCommShrink were called in this process. */
int fake_nccl_aborts(void);
int fake_nccl_splits(void);
int fake_nccl_shrinks(void);
/* Groups (ncclGroupEnd of the outermost level) that launched something. */
int fake_nccl_groups(void);
/* Calls that real NCCL would have refused: made while the communicator was still "in progress". */
int fake_nccl_early_calls(void);
/* Communicators that were freed while a call was inside. */
int fake_nccl_pulled(void);
/* Calls that wait for other ranks to connect, now. */
int fake_nccl_waiting(void);

#endif
