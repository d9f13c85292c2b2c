"""Time limit for a block of code."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN = 3.0  # seconds until TimeUp is raised again, in case some code caught it


class TimeUp(BaseException):
    """Raised when the time limit of a block expires; a BaseException, which ``except Exception`` does not catch."""


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raises TimeUp in the block when ``seconds`` or the limit of an enclosing block expires (None: only the latter).

    Calls into native code and imports are not interrupted; TimeUp is raised when they return. Outside the main thread,
    where Python delivers no signals, the limit has no effect.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_: int, frame: FrameType | None) -> None:
        while frame:
            name = frame.f_code.co_filename
            if frame.f_code.co_name == "__del__" or name == weakref.__file__ or name.startswith("<frozen importlib"):
                # Python ignores exceptions in finalizers, and an interrupted import cannot be repeated.
                signal.setitimer(signal.ITIMER_REAL, 0.01, AGAIN)
                return
            frame = frame.f_back
        raise TimeUp

    begin, outer = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)[0]
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(min(seconds, outer or seconds), 1e-3), AGAIN)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - begin), 1e-3), AGAIN)
