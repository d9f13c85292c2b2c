"""A plan on a device with its kernels replaced by spins: real memory, real copies, no framework."""

from executor.replay.backend import Backend, BackendError
from simulator.machine import Machine


def open_backend(name: str, machine: Machine, pause_ns: int = 0) -> Backend:
    """``cuda``: the first GPU; ``host``: this computer in its place. Both have the copy engines of ``machine``.

    ``pause_ns``: of the GPU's kernels (``Backend.spin``); 0: they make up for no pause.

    Raises:
        BackendError: there is no such backend, no GPU, or CuPy is not installed.
    """
    if name == "cuda":
        from executor.replay.cupy_backend import CupyBackend

        return CupyBackend(machine.copy_engines, pause_ns)
    if name == "host":
        from executor.replay.host_backend import HostBackend

        return HostBackend(machine)
    raise BackendError(f"there is no backend {name!r}; there are cuda, host")
