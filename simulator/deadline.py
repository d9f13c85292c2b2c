"""Time limit for a block of code."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REPEAT = 3.0  # seconds until TimeUp is raised again, in case some code caught it
CONTEXT = ("__enter__", "__exit__")


class TimeUp(BaseException):
    """Raised when the time limit of a block expires; a BaseException, which ``except Exception`` does not catch."""


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raises TimeUp in the block when ``seconds`` or the limit of an enclosing block expires (None: only the latter).

    Calls into native code, imports, and context managers that enter or exit are not interrupted; TimeUp is raised when
    they return. Outside the main thread, where Python delivers no signals, the limit has no effect.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(_: int, frame: FrameType | None) -> None:
        while frame:
            code = frame.f_code
            # Python prints and drops exceptions that leave a finalizer or a weak reference's callback.
            is_dropped = code.co_name == "__del__" or code.co_filename == weakref.__file__
            # Compiled code that restores its constants reports every exception as a SystemError.
            is_restoring = code.co_name == "_numba_unpickle"
            # An interrupted import cannot be repeated: extension modules refuse to be initialized twice.
            is_import = code.co_filename.startswith("<frozen importlib")
            # A context manager that is interrupted as it enters or exits leaves its state behind (torch.no_grad).
            is_context = code.co_name in CONTEXT and frame.f_globals["__name__"].startswith(("torch.", "contextlib"))
            if is_dropped or is_restoring or is_import or is_context:  # tries again in 10 ms
                signal.setitimer(signal.ITIMER_REAL, 0.01, REPEAT)
                return
            frame = frame.f_back
        raise TimeUp

    begin = time.monotonic()
    outer_seconds = signal.getitimer(signal.ITIMER_REAL)[0]
    old_handler = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(min(seconds, outer_seconds or seconds), 1e-3), REPEAT)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
        if outer_seconds:
            signal.setitimer(signal.ITIMER_REAL, max(outer_seconds - (time.monotonic() - begin), 1e-3), REPEAT)
