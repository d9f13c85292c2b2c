"""The ledger and the log of the compiled simulator of several jobs."""

from __future__ import annotations

from simulator.compiled.jit import stage
from simulator.jobs.tables import N_LOG, PEAK, USED


@stage
def charge(w, j, nbytes):  # type: ignore[no-untyped-def]
    """So many bytes more, or less, are in use, by job j."""
    w.jobs[j].held += nbytes
    w.now[USED] += nbytes
    w.now[PEAK] = max(w.now[PEAK], w.now[USED])


@stage
def note(w, start, end, what, job, index, more):  # type: ignore[no-untyped-def]
    """Writes an entry of the log, or the last one where there is no room; returns which it would be."""
    entry = w.now[N_LOG]
    if w.log.shape[0]:
        row = w.log[min(entry, w.log.shape[0] - 1)]
        row[0], row[1], row[2], row[3], row[4], row[5] = start, end, what, job, index, more
        w.now[N_LOG] += 1
    return entry
