"""Error handling of the commands: one sentence on stderr and an exit status for each kind of failure."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from experiments import Terminated
from simulator.files import FormatError
from simulator.plan import PlanError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EPIPE)  # a full disk or quota; a pipe without a reader


class UsageError(ValueError):
    """Raised if a command line cannot be executed; the message is one sentence."""


def expected_errors() -> tuple[type[Exception], ...]:
    """Returns the exception types that external input can cause, from the modules that are loaded."""
    kinds: list[type[Exception]] = [UsageError, FormatError, PlanError]
    for module, name in (
        ("omegaconf.errors", "OmegaConfBaseException"),
        ("agents.planner", "Infeasible"),
        ("agents.learned.checkpoint", "TrainingStateError"),
        ("executor.capture.capture", "CaptureError"),
        ("experiments.workloads", "WorkloadError"),
    ):
        if module in sys.modules:
            kinds.append(getattr(sys.modules[module], name))
    return tuple(kinds)


def one_line(error: object) -> str:
    """Returns an error's message on one line, without the hints that Hydra and OmegaConf append."""
    text = str(error)
    for end in ("See https://", "full_key:", "Config search path:"):
        text = text.partition(end)[0]
    return " ".join(text.split())


def write_error_message(error: OSError) -> str:
    """Returns the message for output that cannot be written; redirects stdout to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno == errno.EPIPE:
        return "the reader of the output closed the pipe; files written so far are complete"
    target = error.filename or "the output"
    return f"{target} cannot be written ({error.strerror}); files written so far are complete"


def flush_stdout() -> None:
    """Flushes stdout when a command exits; reports an error if the flush fails."""
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"error: {write_error_message(error)}", file=sys.stderr, flush=True)
        os._exit(2)


def exit_with_error(error: object) -> NoReturn:
    """Prints one sentence on stderr and exits with status 2."""
    print(f"error: {one_line(error)}", file=sys.stderr)
    sys.exit(2)


def resumable(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command that resumes when repeated, as its interruption message states."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> None:
        try:
            function(*args)
        except KeyboardInterrupt as stop:
            raise type(stop)("run the same command to continue") from None

    return wrapper


def exit_interrupted(stop: KeyboardInterrupt) -> NoReturn:
    """Prints one sentence on stderr, with the hint of ``resumable``; exits with status 130, or 143 after SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # already stopping
    cause, status = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
    print(f"{cause}; {stop}" if str(stop) else cause, file=sys.stderr)
    sys.exit(status)
