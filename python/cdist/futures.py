"""Results that come later: what Work.get_future() returns, and what comm hooks give back."""

import contextlib
import queue
import sys
import threading
import weakref

__all__ = ["Future"]


class Future:
    """A value that is set once. The interface of torch.futures.Future, for use without torch."""

    def __init__(self):
        self._changed = threading.Condition()
        self._state = None  # (value, error) once done
        self._callbacks = []

    def done(self) -> bool:
        """Return whether the value or an error is there."""
        return self._state is not None

    def wait(self, timeout: float | None = None):
        """Block until the value is there and return it, or raise the error.

        TimeoutError after `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(self.done, timeout):
                raise TimeoutError(f"the future was not done after {timeout} s")
        return self.value()

    def value(self):
        """Return the value or raise the error; RuntimeError if not done yet."""
        if self._state is None:
            raise RuntimeError("the future is not done yet")
        value, error = self._state
        if error is not None:
            raise error
        return value

    def _set(self, value, error):
        with self._changed:
            if self._state is not None:
                raise RuntimeError("the future is done already")
            self._state = (value, error)
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback(self)

    def set_result(self, result) -> None:
        """Give the value and run the callbacks in this thread."""
        self._set(result, None)

    def set_exception(self, error: BaseException) -> None:
        """Give an error instead."""
        self._set(None, error)

    def add_done_callback(self, callback) -> None:
        """Call ``callback(self)`` when done: at once if it is done already."""
        with self._changed:
            if self._state is None:
                self._callbacks.append(callback)
                return
        callback(self)

    def then(self, callback) -> "Future":
        """Return a future of ``callback(self)``, which runs when this one is done."""
        result = Future()

        def run(done):
            try:
                value = callback(done)
            except BaseException as error:  # carried to whoever waits
                result.set_exception(error)
            else:
                result.set_result(value)

        self.add_done_callback(run)
        return result


class _WorkFuture(Future):
    """Of an operation: waiting on it waits for the operation.

    A thread waits only where callbacks were added.
    """

    def __init__(self, work):
        super().__init__()
        self._work = work
        self._finishing = threading.Lock()

    def _finish(self):
        with self._finishing:
            if self._state is not None:
                return
            error = self._work.exception()
            self._set(None if error else self._work.result(), error)

    def done(self):
        if self._state is None and self._work.is_completed():
            self._finish()
        return self._state is not None

    def value(self):
        self.done()
        return super().value()

    def wait(self, timeout=None):
        if self._state is None:
            try:
                self._work.wait(timeout)
            except Exception:
                if not self._work.is_completed():
                    raise
            self._finish()
        return self.value()

    def add_done_callback(self, callback):
        if self.done():
            callback(self)
            return
        super().add_done_callback(callback)
        _complete_later(self._work, self._finish)


_completers: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()
_completers_lock = threading.Lock()


def _complete_in_order(jobs):
    while True:
        work, finish = jobs.get()
        with contextlib.suppress(Exception):  # finish() reads the error from the work
            work.wait()
        finish()
        del work, finish


def _complete_later(work, finish):
    """Run finish() after the work is complete, in one thread per group, in the order of the calls."""
    with _completers_lock:
        jobs = _completers.get(work._group)
        if jobs is None:
            jobs = _completers[work._group] = queue.SimpleQueue()
            threading.Thread(
                target=_complete_in_order, args=(jobs,), name="cdist futures", daemon=True
            ).start()
    jobs.put((work, finish))


def _of_work(work):
    """Make the future of a Work, for Work.get_future()."""
    torch = sys.modules.get("torch")
    outputs = work.result()
    if torch is None or not outputs or not isinstance(outputs[0], torch.Tensor):
        return _WorkFuture(work)
    devices = sorted({t.device for t in outputs if t.is_cuda}, key=str)
    future = torch.futures.Future(devices=devices) if devices else torch.futures.Future()

    def finish():
        error = work.exception()
        if error is None:
            future.set_result(outputs)
        else:
            future.set_exception(error)

    if devices or work.is_completed():
        with contextlib.suppress(Exception):  # finish() reads the error from the work
            work.wait()
        finish()
    else:
        _complete_later(work, finish)
    return future
