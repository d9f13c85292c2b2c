"""A limit on the time of a block of code."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN = 3.0  # seconds after which it is raised once more, should something have caught it


class TimeUp(BaseException):
    """The time of a block is over. No ``except Exception`` catches it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TimeUp in the block when the time is over.

    A call of a library that does not come back to Python is not broken off; TimeUp then comes after it. Blocks must not
    be nested. Outside the main thread, where Python hears no signals, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_: int, frame: FrameType | None) -> None:
        while frame:
            if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
                signal.setitimer(signal.ITIMER_REAL, 0.01, AGAIN)  # Python swallows what is raised there
                return
            frame = frame.f_back
        raise TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), AGAIN)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
