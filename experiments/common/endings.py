"""How a command ends that does not end well: in one sentence on stderr, and the status that says what it was."""

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
    """The command line asks for something that cannot be done; the message is one sentence."""


def expected_errors() -> tuple[type[Exception], ...]:
    """The errors that input from outside can cause. Only the modules that were loaded can have raised."""
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


def sentence(error: object) -> str:
    """An error's message on one line, without what Hydra and OmegaConf add for their own users."""
    text = str(error)
    for end in ("See https://", "full_key:", "Config search path:"):
        text = text.partition(end)[0]
    return " ".join(text.split())


def unwritten(error: OSError) -> str:
    """Says what could not be written. The standard output is not written to any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno == errno.EPIPE:
        return "nobody reads the output any more; what files were written are whole"
    where = error.filename or "the output"
    return f"{where} cannot be written ({error.strerror}); what files were written are whole"


def last_words() -> None:
    """At the end of a command: what is left of the output, which may fail as well."""
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"error: {unwritten(error)}", file=sys.stderr, flush=True)
        os._exit(2)


def refuse(error: object) -> NoReturn:
    """Prints one sentence on stderr and exits with status 2."""
    print(f"error: {sentence(error)}", file=sys.stderr)
    sys.exit(2)


def goes_on(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates what the same command takes up again: an interruption says so."""

    @functools.wraps(function)
    def told(*args: Any) -> None:
        try:
            function(*args)
        except KeyboardInterrupt as stop:
            raise type(stop)("the same command goes on from what is done") from None

    return told


def stopped(stop: KeyboardInterrupt) -> NoReturn:
    """Prints one sentence on stderr, with how the command goes on where it says that, and exits with status 130; 143
    after SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # nothing is left to stop
    what, status = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
    print(f"{what}; {stop}" if str(stop) else what, file=sys.stderr)
    sys.exit(status)
