/* The handle of an asynchronous operation. Completed exactly once, by whoever runs the operation; holds its arguments (and, by
 * `owner`, the caller's arrays) until then. */
#ifndef CD_GROUP_WORK_H
#define CD_GROUP_WORK_H

#include "backend/backend.h"
#include "base/op.h"
#include "base/wait.h"
#include "net/mesh.h"

typedef struct cd_work cd_work;

/* References are counted atomically; each holder releases its own. Takes NULL. Releasing does not cancel the operation. */
cd_work *cd_work_retain(cd_work *work);
void cd_work_release(cd_work *work);
/* `release(owner)` is called once, when the operation is complete *and* nobody will touch its buffers any more, by the thread
 * that frees the last reference or by cd_work_release_owner. Lets py/ keep arrays alive. */
void cd_work_set_owner(cd_work *work, void *owner, void (*release)(void *owner));

/* Blocks until complete. Returns the operation's own status (its error becomes the thread's). When `patience` ends first:
 * CD_WAIT_EXPIRED, and the operation goes on. GPU: waits on the host. Any thread, any number of times. */
cd_status cd_work_wait(cd_work *work, const cd_patience *patience);
/* GPU: makes `stream` wait, not the host; CPU: as cd_work_wait. */
cd_status cd_work_join_stream(cd_work *work, void *stream, const cd_patience *patience);
bool cd_work_is_done(cd_work *work);
/* CD_OK while running or fine; otherwise the error as the thread's. */
cd_status cd_work_status(cd_work *work);
const cd_op *cd_work_op(const cd_work *work);
/* RECV: world rank that sent; −1 before completion. */
int cd_work_source(const cd_work *work);
uint64_t cd_work_duration_ns(const cd_work *work);

#endif
