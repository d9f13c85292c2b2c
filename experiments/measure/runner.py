"""Runs parts of a measuring command in processes of their own, so that a crash or a timeout ends only one part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

from executor import CaptureError
from executor.fit import FitError
from executor.replay.backend import BackendError
from experiments.common.errors import UsageError
from experiments.measure.record import Broken
from simulator.deadline import TimeUp
from simulator.files import FormatError


class Status(IntEnum):
    """Exit statuses of a part that did not end normally; a negative status is the signal that ended the process."""

    FAILED = 2
    BROKEN = 3  # CUDA no longer works in the process; another one can continue
    STOPPED = 130


def run_process(
    module: str, words: Sequence[str], seconds: float | None = None, environment: Mapping[str, str] | None = None
) -> int:
    """Runs ``python -m module words`` and returns its exit status, or STOPPED after Ctrl-C.

    Args:
        module: module to run.
        words: its arguments.
        seconds: time limit. With it, the process gets a session of its own, so that its child processes die with it.
        environment: variables added to this process's environment.

    Returns:
        The exit status, or STOPPED after Ctrl-C.

    Raises:
        TimeoutExpired: if the process exceeded its time and was killed.
    """
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(
        command, start_new_session=seconds is not None, env={**os.environ, **(environment or {})}
    ) as process:
        try:
            return process.wait(seconds)
        except KeyboardInterrupt:
            # Let the process write what it measured. The terminal's signal does not reach another session.
            if seconds is not None:
                os.killpg(process.pid, signal.SIGINT)
            process.wait()
            return Status.STOPPED
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def run_part(part: Callable[[], object]) -> int:
    """Runs one part of a command in this process and returns its exit status; prints expected errors on stderr."""
    try:
        part()
    except TimeUp:
        pass  # the interrupted measurement has its row already
    except (BackendError, CaptureError, FitError, FormatError, UsageError) as error:
        print(error, file=sys.stderr)
        return Status.FAILED
    except Broken as error:
        print(error, file=sys.stderr)
        return Status.BROKEN
    except KeyboardInterrupt:
        print("stopped; completed measurements are kept", file=sys.stderr)
        return Status.STOPPED
    return 0
