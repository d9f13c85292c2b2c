"""The ledger and the log of the compiled simulator of several jobs."""

from __future__ import annotations

from simulator.compiled.jit import stage
from simulator.jobs.tables import N_LOG, PEAK, USED


@stage
def charge(w, nbytes):  # type: ignore[no-untyped-def]
    """So many bytes more, or less, are in use."""
    w.now[USED] += nbytes
    w.now[PEAK] = max(w.now[PEAK], w.now[USED])


@stage
def note(w, start, end, what, job, index, more):  # type: ignore[no-untyped-def]
    """Writes an entry of the log, or the last one where there is no room; returns which it would be."""
    entry = w.now[N_LOG]
    if w.log.shape[0]:
        i = min(entry, w.log.shape[0] - 1)
        w.log[i, 0], w.log[i, 1], w.log[i, 2], w.log[i, 3], w.log[i, 4], w.log[i, 5] = start, end, what, job, index, more
        w.now[N_LOG] += 1
    return entry
