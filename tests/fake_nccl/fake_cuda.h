/* What the fake NCCL and the tests use of the fake driver. Test-only. */
#ifndef CD_FAKE_CUDA_H
#define CD_FAKE_CUDA_H

/* Runs fn(arg) in the stream's own thread, behind what was pushed before. */
void fake_stream_push(void *stream, void (*fn)(void *), void *arg);
/* Graph capture as far as the backend can tell: between begin and end the stream says that it captures. */
void fake_capture_begin(void *stream);
void fake_capture_end(void *stream);
/* Calls that would have spoiled a capture (queries of captured events). */
int fake_capture_violations(void);
/* Blocks until the stream has run dry. */
void fake_stream_drain(void *stream);
/* The stream stands still, as behind a kernel that does not end, until all are let go. */
void fake_stream_hold(void *stream);
void fake_streams_let_go(void);
/* Allocations, streams and events not given back. */
long fake_cuda_left(void);

#endif
