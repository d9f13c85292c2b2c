"""Lock of a results directory: one run at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.common.errors import UsageError

LOCK = ".lock"  # exists in a directory while a run writes to it


class Busy(UsageError):
    """Raised if another run holds the lock of the directory."""


@contextmanager
def lock_directory(folder: Path) -> Iterator[None]:
    """Holds the lock of a results directory; the OS releases it when the process dies.

    File systems without locks are not protected.

    Raises:
        Busy: another run holds the lock.
    """
    lock = (folder / LOCK).open("ab")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"out: another run is writing to {folder}; choose another directory, or wait") from None
        except OSError:
            pass
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)
