"""Commands: ``python -m experiments.NAME``, or ``headroom NAME``."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def _stop(_: int, frame: FrameType | None) -> None:
    """Handles Ctrl-C: exits at once inside an import, which may swallow exceptions, else raises KeyboardInterrupt."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, which Slurm and Kubernetes send before killing; handled as Ctrl-C, with exit status 143."""


def _terminate(*_: object) -> None:
    raise Terminated


def install_import_handler() -> None:
    """Installs the Ctrl-C handler for imports: one sentence and status 130 until ``install_handlers`` is called."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def install_handlers() -> None:
    """Restores Ctrl-C as KeyboardInterrupt and makes SIGTERM raise ``Terminated``, so that commands can clean up.

    Closed output streams become /dev/null; characters that a terminal cannot encode are replaced by question marks.
    """
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
def defer_ctrl_c() -> Iterator[Callable[[], None]]:
    """Defers Ctrl-C to the end of the context; a second press interrupts at once.

    Yields a function for places where an interrupt is safe: it raises KeyboardInterrupt if Ctrl-C was pressed.
    """
    presses = 0

    def check() -> None:
        if presses:
            raise KeyboardInterrupt

    def press(*_: object) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, press)
        try:
            yield check
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        check()
    else:
        yield check


if sys.argv[:1] == ["-m"]:  # while `python -m` still looks for the module
    install_import_handler()
