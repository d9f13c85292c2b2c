"""Commands: ``python -m experiments.NAME``, or ``headroom NAME``."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def _stop(_: int, frame: FrameType | None) -> None:
    """Ctrl-C. Within an import an exception might be caught, or come out as another; nothing needs cleaning up yet."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


class Terminated(KeyboardInterrupt):
    """SIGTERM, as Slurm and Kubernetes send it before they kill: all that Ctrl-C does, with status 143."""


def _terminate(*_: object) -> None:
    raise Terminated


def importing() -> None:
    """Until the command has ``begun``, Ctrl-C within an import is one sentence and status 130."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def begun() -> None:
    """Ctrl-C is an exception again, and SIGTERM is one, too: what the command does is to be undone. What a terminal
    cannot show is a question mark there, and what is closed takes everything."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="replace")
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Ctrl-C is heard at the end of this, unless pressed twice."""
    presses = 0

    def press(*_: object) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if presses:
            raise KeyboardInterrupt
    else:
        yield


if sys.argv[:1] == ["-m"]:  # so it reads while `python -m` looks for the module in this package
    importing()
