"""SIGUSR2 asks a rank for its dump.

Of its own, so that set-up does not import what only a dump needs; and over ``_signal``, for ``signal`` makes
an enumeration of every signal name first. The two together are half of the time that set-up takes.
"""

import _signal
import contextlib
import os
import sys

_installed = False


def _handle(number, frame):
    from cdist.recorder import dump

    try:
        path = dump(reason="SIGUSR2")
        if not os.path.exists(_note("asked")):
            sys.stderr.write(f"cdist: wrote {path}\n")
    except Exception as error:
        sys.stderr.write(f"cdist: no dump: {type(error).__name__}: {error}\n")


def _note(what):
    """Name the file that says that SIGUSR2 is safe to send ("listens"), or who sent it ("asked")."""
    return os.path.join(os.environ.get("CDIST_DUMP_DIR") or "/nonexistent", f"{os.getpid()}.{what}")


def install():
    """Take SIGUSR2, where the program has no handler of its own and this is its main thread."""
    global _installed
    if not _installed and _signal.getsignal(_signal.SIGUSR2) == _signal.SIG_DFL:
        with contextlib.suppress(ValueError):  # another thread than the main one
            _signal.signal(_signal.SIGUSR2, _handle)
            _installed = True
            if "TORCHELASTIC_RUN_ID" in os.environ:
                with contextlib.suppress(OSError):
                    os.close(os.open(_note("listens"), os.O_WRONLY | os.O_CREAT, 0o600))


def remove():
    """Give SIGUSR2 back, unless the program has put its own handler there since."""
    global _installed
    if _installed and _signal.getsignal(_signal.SIGUSR2) is _handle:
        with contextlib.suppress(ValueError):
            with contextlib.suppress(OSError):
                os.unlink(_note("listens"))
            _signal.signal(_signal.SIGUSR2, _signal.SIG_DFL)
    _installed = False
