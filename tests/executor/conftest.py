"""What the tests of the executor share."""

import pytest

from executor.replay import open_backend
from executor.replay.backend import Backend, BackendError
from simulator import Machine


def gpu_backend(machine: Machine, pause_ns: int = 0) -> Backend:
    """The CUDA backend; the test that asks is skipped where there is none."""
    pytest.importorskip("cupy")
    try:
        return open_backend("cuda", machine, pause_ns)
    except BackendError as error:
        pytest.skip(str(error))
