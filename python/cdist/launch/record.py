"""@record: leaves a worker's exception where its launcher looks for it."""

import functools
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar, overload

    Function = TypeVar("Function", bound=Callable[..., Any])

    @overload
    def record(fn: Function, error_handler: Callable[[BaseException], object] | None = None) -> Function: ...
    @overload
    def record(
        fn: None = None, error_handler: Callable[[BaseException], object] | None = None
    ) -> Callable[[Function], Function]: ...


def record(fn=None, error_handler=None):
    """Wrap a worker's main function: its exception goes to TORCHELASTIC_ERROR_FILE and is raised on.

    Works as torch's ``torch.distributed.elastic.multiprocessing.errors.record`` does; under real torchrun
    the file is in its format. ``error_handler``, if given, is called with the exception instead of writing
    the file.
    """
    if fn is None:
        return functools.partial(record, error_handler=error_handler)

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            (error_handler or write_error)(error)
            raise

    return wrapper


def write_error(error):
    """Write an exception to TORCHELASTIC_ERROR_FILE, if that is set and holds no earlier one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    import json  # here, since the launcher imports this module and is to start quickly
    import traceback

    callstack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time())), "time": time.time()}
    text = json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}})
    try:
        with open(path, "x") as file:
            file.write(text)
    except OSError:
        return  # the exception itself is on its way; a full disk is not to hide it


def read_error(path):
    """Return (time in seconds, traceback) from a file of `record`, cdist's or torch's, or None."""
    import json

    try:
        with open(path) as file:
            message = json.load(file)["message"]
        if isinstance(message, str):
            return None, message
        extra = message["extraInfo"]
        return float(extra.get("time", extra["timestamp"])), extra["py_callstack"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
