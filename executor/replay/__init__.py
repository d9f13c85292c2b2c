"""A plan on a device with its kernels replaced by spins: real memory, real copies, no framework."""

from executor.replay.backend import Backend, BackendError
from simulator.machine import Machine


def open_backend(name: str, machine: Machine) -> Backend:
    """Opens ``cuda``, the first GPU, or ``host``, a GPU played in virtual time by the figures of ``machine``. Both have
    its copy engines.

    Raises:
        BackendError: there is no such backend, no GPU, or CuPy is not installed.
    """
    if name == "cuda":
        from executor.replay.cupy_backend import CupyBackend

        return CupyBackend(machine.copy_engines)
    if name == "host":
        from executor.replay.host_backend import HostBackend

        return HostBackend(machine)
    raise BackendError(f"there is no backend {name!r}; there are cuda, host")
