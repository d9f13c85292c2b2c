"""What the tests of the executor share."""

import signal
from collections.abc import Iterator

import pytest

from executor.replay import open_backend
from executor.replay.backend import Backend, BackendError
from simulator import Machine


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt also where the tests were started with SIGINT ignored (in the background)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def gpu_backend(machine: Machine, pause_ns: int = 0) -> Backend:
    """The CUDA backend; the test that asks is skipped where there is none."""
    pytest.importorskip("cupy")
    try:
        return open_backend("cuda", machine, pause_ns)
    except BackendError as error:
        pytest.skip(str(error))
