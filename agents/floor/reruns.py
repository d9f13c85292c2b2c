"""Recomputation in the floor: Checkmate's integer program, relaxed to a linear one.

Columns state which kernels are recomputed for which kernel (R), which tensors are held from one kernel to the next (S),
and the memory of both. Every plan of Recompute and Rerun decisions is a point of the program. Kernels are merged into
windows, optimistically: within a window, everything happens in the best order. Windows cover only kernels above the
limit and later ones; before them, every tensor is held. Entry point: ``Reruns``. A version of a tensor is the data that
one kernel wrote to it. Kernels that read it, its next writer, and recomputed kernels can use it, even after the
tensor's last use in the program.

Source: "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (MLSys 2020), section 4.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.floor.lp import Linear, Terms
from simulator.program import Gap, Program
from simulator.residency import residency

EXACT = 2_000  # kernels times versions, up to which every kernel that uses a version begins a window


class Version(NamedTuple):
    """Data that kernel ``writer`` wrote to tensor ``tensor``."""

    tensor: int
    writer: int
    overwritten: int  # the next writer; the number of kernels if none
    uses: list[int]  # kernels of the program that need it, ascending: readers and the next writer

    @property
    def ends(self) -> int:
        """Last kernel that needs it."""
        return self.uses[-1] if self.uses else self.writer

    @property
    def spans(self) -> Iterable[tuple[int, int]]:
        """Pairs of consecutive kernels that write or need it."""
        return pairwise([self.writer, *self.uses])


def versions_of(program: Program, modeled: Collection[int]) -> list[Version]:
    """Returns the versions of the non-persistent tensors among ``modeled``."""
    versions = []
    for x, tensor in enumerate(program.tensors):
        if not tensor.persistent and x in modeled:
            for w, overwritten in pairwise([*program.writes[x], len(program.kernels)]):
                versions.append(Version(x, w, overwritten, [k for k in program.accesses[x] if w < k <= overwritten]))
    return versions


class RerunLimits:
    """Until which kernel each kernel can be recomputed.

    Attributes:
        rerun_until: per kernel, the last kernel before which it can be recomputed; the kernel itself if it cannot.
            Limits are kernels that must not be repeated, earlier writers of an output that cannot be recomputed, and
            persistent inputs that changed and cannot be restored.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rerun_until: list[int] = []
        for k, kernel in enumerate(program.kernels):
            end = len(program.kernels) - 1 if kernel.recomputable else k
            for x in kernel.inputs:
                changed = [w for w in program.writes[x] if w >= k] if program.tensors[x].persistent else []
                if changed:
                    writer = program.version(x, k)
                    end = min(end, max(changed[0], self.rerun_until[writer] if writer >= 0 else k))
            self.rerun_until.append(max(k, min([end, *(self.rerun_until[w] for w in self.earlier(k))])))

    def earlier(self, kernel: int) -> list[int]:
        """Returns the earlier writer of the same tensor that must be recomputed with ``kernel``, if any.

        With several such writers the list is empty: an output that is not needed requires no earlier writer, and the
        program does not model which outputs are needed.
        """
        outputs = {x for x in self.program.kernels[kernel].outputs if not self.program.tensors[x].persistent}
        writers = {self.program.version(x, kernel) for x in outputs}
        return sorted(writers) if len(writers) == 1 and -1 not in writers else []

    def absence(self, gap: Gap) -> range:
        """Returns the kernels at which recomputation can have a gap's tensor evicted."""
        if self.program.tensors[gap.tensor].persistent or gap.after >= gap.before:
            return range(0)
        return range(gap.after + 1, min(gap.before, self.rerun_until[self.program.version(gap.tensor, gap.after + 1)]))


class Reruns:
    """Columns and rows of a program's recomputations.

    Columns range from 0 to 1; window j covers kernels ``windows[j][0]`` to before ``windows[j][1]``:

        rerun[j, w]    kernel w is recomputed before a kernel of window j, which costs its duration
        resident[j, v] version v is held throughout window j, from before it or since it was written in it
        restored[j, v] it is recomputed in window j and held at its end
        evicted[v, k]  it is evicted just before kernel k, which uses it, and recomputed in the window of k

    Rows: resident[j, v] <= resident[j-1, v] + restored[j-1, v];  restored[j, v] <= rerun[j, writer];
    resident + restored <= 1;  each use in window j, and each kernel that reads v and is recomputed in it, needs v held
    at its start or recomputed in it;  a kernel is recomputed only with the earlier writers of its outputs. ``load`` is
    the memory.

    Args:
        live_bytes: int64[n], load per kernel with the gaps of all tensors but ``modeled`` emptied.
        min_load: int64[n], load per kernel with all gaps emptied.
        modeled: tensors with versions; the others are always available and take no memory in their gaps.
        parts: approximate number of windows, by used bytes relative to the peak load; reduced until there are at most
            ``cells`` pairs of a window and a version.
        byte: the unit of the linear program, in bytes.
        families, deadlines: as in ``floor``.
    """

    def __init__(
        self,
        lp: Linear,
        program: Program,
        limit: int,
        live_bytes: NDArray[np.int64],
        min_load: NDArray[np.int64],
        modeled: Collection[int],
        parts: int,
        cells: int,
        byte: float,
        families: Collection[str],
        deadlines: bool,
    ) -> None:
        self.lp = lp
        self.program = program
        self.limit = limit
        self.byte = byte
        self.limits = RerunLimits(program)
        self.n = len(program.kernels)
        self.live_bytes = live_bytes
        self.peaks = live_bytes + min_load
        self.deadlines = deadlines
        self.versions = versions_of(program, modeled)
        self.size = [program.tensors[v.tensor].nbytes / byte for v in self.versions]
        self.index = {(v.tensor, v.writer): i for i, v in enumerate(self.versions)}
        # Larger windows until the program is small enough. Above 1,900 versions it gets fewer cells, in proportion.
        for count in range(parts, 0, -1):
            self.windows = self._windows(count)
            self.window_of = [-1] * self.windows[0][0]
            for j, (begin, end) in enumerate(self.windows):
                self.window_of += [j] * (end - begin)
            if self._cells() <= cells * min(1.0, 1_900 / max(len(self.versions), 1)):
                break
        self.rerun: dict[tuple[int, int], int] = {}
        self.resident: dict[tuple[int, int], int] = {}
        self.restored: dict[tuple[int, int], int] = {}
        self.evicted: dict[tuple[int, int], int] = {}
        self.totals: dict[int, Terms] = {}  # column: the sum that bounds it from below
        self._pending: list[tuple[int, int]] = []
        for i in range(len(self.versions)):
            self._version(i)
        while self._pending:
            j, w = self._pending.pop()
            self._inputs(j, w, self.rerun[j, w], partial(self._rerun_terms, j))
        for j in range(1, len(self.windows)) if "futures" in families else ():
            self._futures(j)

    def _windows(self, parts: int) -> list[tuple[int, int]]:
        heavy = np.flatnonzero(self.live_bytes > self.limit)
        first = int(heavy[0])
        last = int(heavy[-1])
        users: dict[int, set[int]] = defaultdict(set)
        # Kernels that use no version change nothing, so they join the window before them.
        for v in self.versions:
            for k in (v.writer, *v.uses):
                users[k].add(v.tensor)
        fine = (last - first) * len(self.versions) <= EXACT
        max_bytes = 0.0 if fine else self.program.peak_bytes / parts
        nbytes = [tensor.nbytes for tensor in self.program.tensors]
        kernels = sorted(k for k in users if first <= k <= last)
        windows = []
        begin = first
        start = 0
        while True:
            current = set[int]()
            totals = list[int]()  # bytes used in the window, up to each of its kernels
            for k in kernels[start:]:
                total = (totals[-1] if totals else 0) + sum(nbytes[x] for x in users[k] - current)
                if totals and total > max_bytes:
                    break
                current |= users[k]
                totals.append(total)
            if start + len(totals) == len(kernels):
                break
            end = kernels[start + len(totals) - 1] + 1
            if self.deadlines and not fine:
                # A window ends at a peak: bytes held at its start, and bytes recomputed from them in it, are counted at
                # its ends only, so a peak within the window would see neither.
                middle = kernels[start + bisect_left(totals, totals[-1] / 2)]
                end -= int(self.peaks[middle:end][::-1].argmax())
            windows.append((begin, end))
            begin = end
            start = bisect_left(kernels, end)
        windows.append((begin, last + 1))
        begins = {begin for begin, _ in windows} | {last + 1, self.n}
        if not fine:
            # What is held at a window's start and serves a recomputation in it takes no memory within the window, so
            # one ends at the highest peak.
            begins.add(int(self.live_bytes.argmax()) + 1)
        return list(pairwise(sorted(begins)))

    def _cells(self) -> int:
        """Returns the number of pairs of a window and a version that the program needs in it."""
        spans = [(max(self.window_of[v.writer], 0), self.window_of[v.ends]) for v in self.versions]
        return sum(end - begin for begin, end in spans if end > begin)

    def can_rerun(self, j: int, w: int) -> bool:
        """Returns whether kernel w can be recomputed before a kernel of window j."""
        begin, end = self.windows[j]
        return w < end - 1 and self.limits.rerun_until[w] >= max(begin, w + 1)

    @cached_property
    def useful_until(self) -> list[int]:
        """Last kernel that may use each kernel's outputs, directly or through recomputed kernels."""
        last_uses = list(range(self.n))
        for k in reversed(range(self.n)):
            for x in self.program.kernels[k].outputs:
                if (x, k) in self.index:
                    last_uses[k] = max(last_uses[k], self._last_use(self.index[x, k], last_uses))
                else:
                    uses = (u for u in self.program.accesses[x] if u > k)
                    last_uses[k] = max([last_uses[k], *(last_uses[u] for u in uses if self.limits.rerun_until[u] > u)])
        return last_uses

    def _last_use(self, i: int, last_uses: list[int]) -> int:
        v = self.versions[i]
        return max([v.ends, *(last_uses[u] for u in v.uses if self.limits.rerun_until[u] > u)])

    def _version(self, i: int) -> None:
        """Adds the columns resident[j, v] and restored[j, v] of version i."""
        v = self.versions[i]
        lp = self.lp
        begin = max(self.window_of[v.writer], 0)
        ends = self.window_of[v.ends]
        # A version that cannot be recomputed in time is held until its last use in the program, without a column.
        fixed = not self.droppable[i]
        overwriter = self.window_of[v.overwritten] if v.overwritten < self.n else -1
        for j in range(begin, self.window_of[self._last_use(i, self.useful_until)]):
            if fixed and j < ends:
                continue
            if j != overwriter:  # an overwritten version cannot be held
                self.resident[j, i] = lp.column()
            if self.can_rerun(j, v.writer):
                self.restored[j, i] = lp.column()
                lp.row([(self.restored[j, i], 1), (self.rerun_column(j, v.writer), -1)], 0)
                if j != overwriter:
                    lp.row([(self.restored[j, i], 1), (self.resident[j, i], 1)], 1)
            if j > begin and j != overwriter:
                terms, constant = self.held_at_start(j, i)
                lp.row([(self.resident[j, i], 1), *((c, -x) for c, x in terms)], constant)
        if not fixed:
            # Uses in a version's first window need no row: it is written there, or everything is held at its start.
            for j in sorted({self.window_of[k] for k in v.uses}):
                if j > begin:
                    self._require(j, i, [], -1.0, partial(self._rerun_terms, j))
            for a, b in v.spans:
                j = self.window_of[b]
                # It may be absent just before use b if a kernel of the window lies between, and its writer runs there.
                if j >= 0 and max(a + 1, self.windows[j][0]) < b and self.can_rerun(j, v.writer):
                    self.evicted[i, b] = lp.column()
                    lp.row([(self.evicted[i, b], 1), (self.rerun_column(j, v.writer), -1)], 0)

    @cached_property
    def droppable(self) -> list[bool]:
        """Whether each version can be evicted between two of its uses and recomputed in a window."""
        return [
            any(b - a > 1 and self.limits.rerun_until[v.writer] > a + 1 and self.window_of[b] >= 0 for a, b in v.spans)
            for v in self.versions
        ]

    def held_at_start(self, j: int, i: int) -> tuple[Terms, float]:
        """Returns whether version i is held at the start of window j, as terms and a constant."""
        v = self.versions[i]
        if j == 0 or self.window_of[v.writer] >= j:
            return [], 1.0
        held = [columns[j - 1, i] for columns in (self.resident, self.restored) if (j - 1, i) in columns]
        if held:
            return [(c, 1.0) for c in held], 0.0
        return [], float(not self.droppable[i] and j <= self.window_of[v.ends])

    def rerun_column(self, j: int, w: int) -> int:
        """Returns the column rerun[j, w], created on first use."""
        if (j, w) not in self.rerun:
            self.rerun[j, w] = self.lp.column()
            self._pending.append((j, w))
        return self.rerun[j, w]

    def _rerun_terms(self, j: int, w: int) -> Terms:
        """Returns the recomputation of kernel w in window j as a term to subtract; empty if impossible."""
        return [(self.rerun_column(j, w), -1.0)] if self.can_rerun(j, w) else []

    def _require(self, j: int, i: int, left_side: Terms, right: float, rerun: Callable[[int], Terms]) -> None:
        """Adds the row whole <= right + (version i held at the start of window j) + (its writer recomputed)."""
        terms, constant = self.held_at_start(j, i)
        if constant < 1:
            self.lp.row([*left_side, *((c, -f) for c, f in terms), *rerun(self.versions[i].writer)], right + constant)

    def _inputs(self, j: int, w: int, column: int, rerun: Callable[[int], Terms]) -> None:
        """Requires inputs of a recomputed kernel w (``column``) to be held at the start of window j or recomputed."""
        program = self.program
        for x in dict.fromkeys(program.kernels[w].inputs):
            writer = program.version(x, w)
            if program.tensors[x].persistent:
                # A persistent input that was overwritten before the window can only come from its writer.
                if any(w <= k < self.windows[j][0] for k in program.writes[x]):
                    self.lp.row([(column, 1), *rerun(writer)], 0)
            elif (x, writer) in self.index:
                self._require(j, self.index[x, writer], [(column, 1)], 0, rerun)
        for writer in self.limits.earlier(w):
            self.lp.row([(column, 1), *rerun(writer)], 0)

    def _futures(self, j: int) -> None:
        """Requires one full recomputation, in window j or later, of versions not held at its start and used later.

        With ``deadlines`` it happens until the window of their next use. Missing inputs of that recomputation are fully
        recomputed between the same windows. Without this constraint, a hundredth of a held input could serve a hundred
        windows that recompute a hundredth each.

        A plan is a point of these rows: within[last, w] is 1 if w is recomputed in windows j to ``last``. A version
        that is missing and used in window ``last`` was recomputed there or before, and each input of a recomputation in
        that interval was held at the start of window j or recomputed in the interval.
        """
        within: dict[tuple[int, int], int] = {}  # (last window, kernel): column of its recomputation from window j on
        pending: list[tuple[int, int]] = []

        def rerun(last: int, w: int) -> Terms:
            if (last, w) not in within:
                columns = [(self.rerun[k, w], -1.0) for k in range(j, last + 1) if (k, w) in self.rerun]
                if not columns:
                    return []
                within[last, w] = self.lp.column()
                self.lp.row([(within[last, w], 1.0), *columns], 0)
                pending.append((last, w))
            return [(within[last, w], -1.0)]

        for i, v in enumerate(self.versions):
            if self.droppable[i] and self.window_of[v.writer] < j <= self.window_of[v.ends]:
                next_use = next(self.window_of[k] for k in v.uses if self.window_of[k] >= j)
                last = next_use if self.deadlines else len(self.windows) - 1
                self._require(j, i, [], -1.0, partial(rerun, last))
        while pending:
            last, w = pending.pop()
            self._inputs(j, w, within[last, w], partial(rerun, last))

    def load(self, kernels: Collection[int]) -> dict[int, tuple[Terms, float]]:
        """Returns the minimum memory at each kernel, as terms and a constant in the program's units.

        A version that kernel k does not use occupies memory if it is kept throughout the window, and between its uses
        in the window unless it is evicted (``evicted``). At the last kernel of a window, recomputed versions count
        too.
        """
        loads: dict[int, tuple[Terms, float]] = {}
        size = self.size
        free = self._droppable_bytes()
        of_window: list[list[int]] = [[] for _ in self.windows]  # versions that are kept or recomputed in each window
        for j, i in sorted({*self.resident, *self.restored}):
            of_window[j].append(i)
        for j, (begin, end) in enumerate(self.windows):
            heavy = [k for k in range(begin, end) if k in kernels]
            if not heavy:
                continue
            # One column per window for the sum that all of its kernels share keeps their rows sparse.
            total = self.lp.column(sum(size))
            resident = [(self.resident[j, i], size[i]) for i in of_window[j] if (j, i) in self.resident]
            self.lp.row([*resident, (total, -1.0)], 0)
            self.totals[total] = resident
            used_in = [i for i, v in enumerate(self.versions) if any(begin <= k < end for k in (v.writer, *v.uses))]
            for k in heavy:
                terms: dict[int, float] = {total: 1.0}
                constant = float(self.live_bytes[k] - free[k]) / self.byte
                for i in used_in:
                    v = self.versions[i]
                    used = k == v.writer or k in v.uses
                    droppable = self.droppable[i]
                    # Next use in the window, if kernel k lies between two uses: the version is then needed or evicted.
                    next_use = next((u for u in v.uses if k < u < end), -1) if not used and v.writer < k else -1
                    in_life = used or next_use >= 0 or k < v.writer or (not droppable and k <= v.ends)
                    if (j, i) in self.resident and in_life:  # the constant counts it already
                        terms[self.resident[j, i]] = -size[i]
                    if next_use >= 0 and droppable:
                        constant += size[i]
                        if (i, next_use) in self.evicted:
                            terms[self.evicted[i, next_use]] = -size[i]
                for i in of_window[j] if k == end - 1 else ():
                    if (j, i) in self.restored and k != self.versions[i].writer and k not in self.versions[i].uses:
                        terms[self.restored[j, i]] = size[i]
                loads[k] = (list(terms.items()), constant)
        return loads

    def expanded(self, terms: Terms) -> Terms:
        """Rewrites the memory at a kernel in 0/1 columns of held versions."""
        sums: dict[int, float] = defaultdict(float)
        for c, f in terms:
            for d, g in self.totals.get(c, [(c, 1.0)]):
                sums[d] += f * g
        return [(c, f) for c, f in sums.items() if abs(f) > 1e-12]

    def integer_sums(self, tick: float) -> list[tuple[Terms, float]]:
        """Returns sums that are integers in every plan, weighted: recomputations per kernel, and each held version."""
        runs: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for (_, w), column in self.rerun.items():
            runs[w].append((column, 1.0))
        sums: list[tuple[Terms, float]] = []
        sums += [(terms, 1e3 * self.program.kernels[w].duration_ns / tick) for w, terms in runs.items()]
        for (_, i), c in (*self.resident.items(), *self.restored.items()):
            sums.append(([(c, 1.0)], self.size[i]))
        return sums

    def absent(self, gap: Gap) -> list[tuple[int, int, int]]:
        """Returns the columns that describe whether recomputation has a gap's tensor evicted, per window.

        Returns:
            (window, column, sign): sign 1 if the column means "evicted", -1 if it means "held".
        """
        i = self.index.get((gap.tensor, self.program.version(gap.tensor, gap.after + 1)), -1)
        if i < 0 or not self.droppable[i]:
            return []
        first = self.window_of[gap.after + 1]
        last = self.window_of[gap.before]
        key = (i, gap.before)
        columns = [(j, self.resident[j, i], -1) for j in range(max(first, 0), last) if (j, i) in self.resident]
        if key in self.evicted:
            columns.append((last, self.evicted[key], 1))
        return columns

    def _droppable_bytes(self) -> NDArray[np.int64]:
        """Returns int64[n]: bytes of droppable versions that a kernel does not use, within their lifetimes."""
        versions = [v for v, droppable in zip(self.versions, self.droppable, strict=True) if droppable]
        idle = [(v, pair) for v in versions for pair in v.spans]
        nbytes = np.array([self.program.tensors[v.tensor].nbytes for v, _ in idle], np.int64)
        spans = np.array([pair for _, pair in idle], np.int64).reshape(-1, 2)
        return -residency(np.zeros(self.n, np.int64), spans, nbytes)
