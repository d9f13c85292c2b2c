"""One run at a time in a directory of results."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.common.endings import UsageError

LOCK = ".lock"  # of a directory, while a run is at work in it


class Busy(UsageError):
    """Another run has the directory."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A folder that one run at a time writes results to; free again when the process dies. Where the file system has no
    locks, nothing is held.

    Raises:
        Busy: another run has it.
    """
    lock = (folder / LOCK).open("ab")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"out: another run is at work in {folder}; name another directory, or wait") from None
        except OSError:
            pass
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)
