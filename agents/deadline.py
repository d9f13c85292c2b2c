"""A limit on the time of a block of code."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN = 3.0  # seconds after which it is raised once more, should something have caught it


class TimeUp(BaseException):
    """The time of a block is over. No ``except Exception`` catches it."""


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raises TimeUp in the block when the time is over, or that of a block around it; None: only then.

    A call of a library that does not come back to Python is not broken off, nor is an import; TimeUp then comes after
    it. Outside the main thread, where Python hears no signals, nothing happens.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_: int, frame: FrameType | None) -> None:
        while frame:
            name = frame.f_code.co_filename
            if frame.f_code.co_name == "__del__" or name == weakref.__file__ or name.startswith("<frozen importlib"):
                # Python swallows what is raised there; what is half imported cannot be imported any more.
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
