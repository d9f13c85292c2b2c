"""Replays plans on a device with spin kernels instead of real ones, but real memory and real copies."""

from executor.replay.backend import Backend, BackendError
from simulator.machine import Machine


def open_backend(name: str, machine: Machine) -> Backend:
    """Opens a backend with the copy engines of ``machine``.

    Args:
        name: "cuda": the first GPU; "host": a simulated GPU in virtual time with the figures of ``machine``.
        machine: machine whose copy engines are used.

    Returns:
        The opened backend.

    Raises:
        BackendError: if the name is unknown, no GPU is found, or CuPy is not installed.
    """
    if name == "cuda":
        from executor.replay.cupy_backend import CupyBackend

        return CupyBackend(machine.copy_engines)
    if name == "host":
        from executor.replay.host_backend import HostBackend

        return HostBackend(machine)
    raise BackendError(f"backend: unknown name {name!r}; expected cuda or host")
