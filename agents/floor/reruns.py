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

MANY = 1900  # versions above which the number of cells is reduced
FINE = 2000  # kernels x versions up to which each kernel has its own window


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


def versions_of(program: Program, least: int) -> list[Version]:
    """Returns the versions of non-persistent tensors of at least ``least`` bytes."""
    found = []
    for x, tensor in enumerate(program.tensors):
        if not tensor.persistent and tensor.nbytes >= least:
            for w, after in pairwise([*program.writes[x], len(program.kernels)]):
                found.append(Version(x, w, after, [k for k in program.accesses[x] if w < k <= after]))
    return found


class Past:
    """Until which kernel each kernel can be recomputed.

    Attributes:
        until: per kernel, the last kernel before which it can be recomputed; the kernel itself if it cannot. Limits
            are kernels that must not be repeated, earlier writers of an output that cannot be recomputed, and
            persistent inputs that changed and cannot be restored.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.until: list[int] = []
        for k, kernel in enumerate(program.kernels):
            end = len(program.kernels) - 1 if kernel.recomputable else k
            for x in kernel.inputs:
                changed = [w for w in program.writes[x] if w >= k] if program.tensors[x].persistent else []
                if changed:
                    writer = program.version(x, k)
                    end = min(end, max(changed[0], self.until[writer] if writer >= 0 else k))
            self.until.append(max(k, min([end, *(self.until[w] for w in self.earlier(k))])))

    def earlier(self, kernel: int) -> list[int]:
        """Returns the earlier writer of the same tensor that must be recomputed with ``kernel``, if any.

        With several such writers the list is empty: an output that is not needed requires no earlier writer, and the
        program does not model which outputs are needed.
        """
        outputs = {x for x in self.program.kernels[kernel].outputs if not self.program.tensors[x].persistent}
        writers = {self.program.version(x, kernel) for x in outputs}
        return sorted(writers) if len(writers) == 1 and -1 not in writers else []

    def away(self, gap: Gap) -> range:
        """Returns the kernels at which recomputation can have a gap's tensor evicted."""
        if self.program.tensors[gap.tensor].persistent or gap.after >= gap.before:
            return range(0)
        return range(gap.after + 1, min(gap.before, self.until[self.program.version(gap.tensor, gap.after + 1)]))


class Reruns:
    """Columns and rows of a program's recomputations.

    Columns range from 0 to 1; window j covers kernels ``windows[j][0]`` to before ``windows[j][1]``:

        again[j, w]   kernel w is recomputed before a kernel of window j, which costs its duration
        kept[j, v]    version v is held throughout window j, from before it or since it was written in it
        back[j, v]    it is recomputed in window j and held at its end
        between[v, k] it is evicted just before kernel k, which uses it, and recomputed in the window of k

    Rows: kept[j, v] <= kept[j-1, v] + back[j-1, v];  back[j, v] <= again[j, writer];  kept + back <= 1;
    each use in window j, and each kernel that reads v and is recomputed in it, needs v held at its start or recomputed
    in it;  a kernel is recomputed only with the earlier writers of its outputs. ``load`` is the memory.

    Args:
        least: bytes; smaller tensors are always available and take no memory in their gaps.
        live_bytes: int64[n], load per kernel with the gaps of smaller tensors emptied.
        parts: approximate number of windows, by used bytes relative to the peak load; reduced until there are at most
            ``cells`` pairs of a window and a version.
        byte: the unit of the linear program, in bytes.
        families: constraint families, as in ``floor``.
    """

    def __init__(
        self, lp: Linear, program: Program, limit: int, live_bytes: NDArray[np.int64], least: int, parts: int,
        cells: int, byte: float, families: Collection[str],
    ) -> None:  # fmt: skip
        self.lp, self.program, self.limit = lp, program, limit
        self.byte, self.past, self.n, self.live_bytes = byte, Past(program), len(program.kernels), live_bytes
        self.versions = versions_of(program, least)
        self.size = [program.tensors[v.tensor].nbytes / byte for v in self.versions]
        self.at = {(v.tensor, v.writer): i for i, v in enumerate(self.versions)}
        for count in range(parts, 0, -1):
            self.windows = self._windows(count)
            self.window_of = [-1] * self.windows[0][0]
            for j, (begin, end) in enumerate(self.windows):
                self.window_of += [j] * (end - begin)
            if self._cells() <= cells * min(1.0, MANY / max(len(self.versions), 1)):
                break
        self.again: dict[tuple[int, int], int] = {}
        self.kept: dict[tuple[int, int], int] = {}
        self.back: dict[tuple[int, int], int] = {}
        self.between: dict[tuple[int, int], int] = {}
        self.totals: dict[int, Terms] = {}  # column: the sum that bounds it from below
        self._pending: list[tuple[int, int]] = []
        for i in range(len(self.versions)):
            self._version(i)
        while self._pending:
            j, w = self._pending.pop()
            self._inputs(j, w, self.again[j, w], partial(self._again, j))
        for j in range(1, len(self.windows)) if "futures" in families else ():
            self._futures(j)

    def _windows(self, parts: int) -> list[tuple[int, int]]:
        over = np.flatnonzero(self.live_bytes > self.limit)
        first, last = int(over[0]), int(over[-1])
        used: dict[int, set[int]] = defaultdict(set)
        for v in self.versions:
            for k in (v.writer, *v.uses):
                used[k].add(v.tensor)
        fine = (last - first) * len(self.versions) <= FINE
        room = 0.0 if fine else self.program.peak_bytes / parts
        found, begin, end, inside, total = [], first, first, set[int](), 0
        for k in sorted(k for k in used if first <= k <= last):
            more = sum(self.program.tensors[x].nbytes for x in used[k] - inside)
            if inside and total + more > room:
                found.append((begin, end))
                begin, inside, total = end, set(), 0
                more = sum(self.program.tensors[x].nbytes for x in used[k])
            inside |= used[k]
            total, end = total + more, k + 1
        found.append((begin, last + 1))
        return [*found, (last + 1, self.n)] if last + 1 < self.n else found

    def _cells(self) -> int:
        """Returns the number of pairs of a window and a version that the program needs in it."""
        spans = [(max(self.window_of[v.writer], 0), self.window_of[v.ends]) for v in self.versions]
        return sum(end - begin for begin, end in spans if end > begin)

    def can(self, j: int, w: int) -> bool:
        """Returns whether kernel w can be recomputed before a kernel of window j."""
        begin, end = self.windows[j]
        return w < end - 1 and self.past.until[w] >= max(begin, w + 1)

    @cached_property
    def wanted(self) -> list[int]:
        """Last kernel that may use each kernel's outputs, directly or through recomputed kernels."""
        until = list(range(self.n))
        for k in reversed(range(self.n)):
            for x in self.program.kernels[k].outputs:
                if (x, k) in self.at:
                    until[k] = max(until[k], self._until(self.at[x, k], until))
                else:
                    uses = (u for u in self.program.accesses[x] if u > k)
                    until[k] = max([until[k], *(until[u] for u in uses if self.past.until[u] > u)])
        return until

    def _until(self, i: int, until: list[int]) -> int:
        v = self.versions[i]
        return max([v.ends, *(until[u] for u in v.uses if self.past.until[u] > u)])

    def _version(self, i: int) -> None:
        """Adds the columns kept[j, v] and back[j, v] of version i."""
        v, lp = self.versions[i], self.lp
        begin, ends = max(self.window_of[v.writer], 0), self.window_of[v.ends]
        fixed = not self.droppable[i]
        over = self.window_of[v.overwritten] if v.overwritten < self.n else -1
        for j in range(begin, self.window_of[self._until(i, self.wanted)]):
            if fixed and j < ends:
                continue
            if j != over:  # an overwritten version cannot be held
                self.kept[j, i] = lp.new()
            if self.can(j, v.writer):
                self.back[j, i] = lp.new()
                lp.row([(self.back[j, i], 1), (self.runs(j, v.writer), -1)], 0)
                if j != over:
                    lp.row([(self.back[j, i], 1), (self.kept[j, i], 1)], 1)
            if j > begin and j != over:
                terms, constant = self.held(j, i)
                lp.row([(self.kept[j, i], 1), *((c, -x) for c, x in terms)], constant)
        if not fixed:
            for j in sorted({self.window_of[k] for k in v.uses}):
                if j > begin:
                    self._need(j, i, [], -1.0, partial(self._again, j))
            for a, b in v.spans:
                j = self.window_of[b]
                if j >= 0 and max(a + 1, self.windows[j][0]) < b and self.can(j, v.writer):
                    self.between[i, b] = lp.new()
                    lp.row([(self.between[i, b], 1), (self.runs(j, v.writer), -1)], 0)

    @cached_property
    def droppable(self) -> list[bool]:
        """Whether each version can be evicted between two of its uses and recomputed in a window."""
        return [
            any(b - a > 1 and self.past.until[v.writer] > a + 1 and self.window_of[b] >= 0 for a, b in v.spans)
            for v in self.versions
        ]

    def held(self, j: int, i: int) -> tuple[Terms, float]:
        """Returns whether version i is held at the start of window j, as terms and a constant."""
        v = self.versions[i]
        if j == 0 or self.window_of[v.writer] >= j:
            return [], 1.0
        found = [columns[j - 1, i] for columns in (self.kept, self.back) if (j - 1, i) in columns]
        if found:
            return [(c, 1.0) for c in found], 0.0
        return [], float(not self.droppable[i] and j <= self.window_of[v.ends])

    def runs(self, j: int, w: int) -> int:
        """Returns the column again[j, w], created on first use."""
        if (j, w) not in self.again:
            self.again[j, w] = self.lp.new()
            self._pending.append((j, w))
        return self.again[j, w]

    def _again(self, j: int, w: int) -> Terms:
        """Returns the recomputation of kernel w in window j as a term to subtract; empty if impossible."""
        return [(self.runs(j, w), -1.0)] if self.can(j, w) else []

    def _need(self, j: int, i: int, whole: Terms, right: float, again: Callable[[int], Terms]) -> None:
        """Adds the row whole <= right + (version i held at the start of window j) + (its writer recomputed)."""
        terms, constant = self.held(j, i)
        if constant < 1:
            self.lp.row([*whole, *((c, -f) for c, f in terms), *again(self.versions[i].writer)], right + constant)

    def _inputs(self, j: int, w: int, one: int, again: Callable[[int], Terms]) -> None:
        """Requires inputs of a recomputed kernel w (``one``) to be held at the start of window j or recomputed."""
        program = self.program
        for x in dict.fromkeys(program.kernels[w].inputs):
            writer = program.version(x, w)
            if program.tensors[x].persistent:
                if any(w <= k < self.windows[j][0] for k in program.writes[x]):
                    self.lp.row([(one, 1), *again(writer)], 0)
            elif (x, writer) in self.at:
                self._need(j, self.at[x, writer], [(one, 1)], 0, again)
        for writer in self.past.earlier(w):
            self.lp.row([(one, 1), *again(writer)], 0)

    def _futures(self, j: int) -> None:
        """Requires one full recomputation, in window j or later, of versions not held at its start and used later.

        The same holds for the missing inputs of that recomputation. Without this constraint, a hundredth of a held
        input could serve a hundred windows that recompute a hundredth each.
        """
        later: dict[int, int] = {}  # kernel: column of its recomputation in window j or later
        pending: list[int] = []

        def again(w: int) -> Terms:
            if w not in later:
                columns = [(self.again[k, w], -1.0) for k in range(j, len(self.windows)) if (k, w) in self.again]
                if not columns:
                    return []
                later[w] = self.lp.new()
                self.lp.row([(later[w], 1.0), *columns], 0)
                pending.append(w)
            return [(later[w], -1.0)]

        for i, v in enumerate(self.versions):
            if self.droppable[i] and self.window_of[v.writer] < j <= self.window_of[v.ends]:
                self._need(j, i, [], -1.0, again)
        while pending:
            w = pending.pop()
            self._inputs(j, w, later[w], again)

    def load(self, kernels: Collection[int]) -> dict[int, tuple[Terms, float]]:
        """Returns the minimum memory at each kernel, as terms and a constant in the program's units.

        A version that kernel k does not use occupies memory if it is kept throughout the window, and between its uses
        in the window unless it is evicted (``between``). At the last kernel of a window, recomputed versions count
        too.
        """
        found: dict[int, tuple[Terms, float]] = {}
        size, free = self.size, self._droppable_bytes()
        of_window: list[list[int]] = [[] for _ in self.windows]  # versions that are kept or recomputed in each window
        for j, i in sorted({*self.kept, *self.back}):
            of_window[j].append(i)
        for j, (begin, end) in enumerate(self.windows):
            over = [k for k in range(begin, end) if k in kernels]
            if not over:
                continue
            total = self.lp.new(sum(size))
            whole = [(self.kept[j, i], size[i]) for i in of_window[j] if (j, i) in self.kept]
            self.lp.row([*whole, (total, -1.0)], 0)
            self.totals[total] = whole
            inside = [i for i, v in enumerate(self.versions) if any(begin <= k < end for k in (v.writer, *v.uses))]
            for k in over:
                terms: dict[int, float] = {total: 1.0}
                constant = float(self.live_bytes[k] - free[k]) / self.byte
                for i in inside:
                    v = self.versions[i]
                    used, droppable = k == v.writer or k in v.uses, self.droppable[i]
                    later = next((u for u in v.uses if k < u < end), -1) if not used and v.writer < k else -1
                    in_life = used or later >= 0 or k < v.writer or (not droppable and k <= v.ends)
                    if (j, i) in self.kept and in_life:
                        terms[self.kept[j, i]] = -size[i]
                    if later >= 0 and droppable:
                        constant += size[i]
                        if (i, later) in self.between:
                            terms[self.between[i, later]] = -size[i]
                for i in of_window[j] if k == end - 1 else ():
                    if (j, i) in self.back and k != self.versions[i].writer and k not in self.versions[i].uses:
                        terms[self.back[j, i]] = size[i]
                found[k] = (list(terms.items()), constant)
        return found

    def expanded(self, terms: Terms) -> Terms:
        """Rewrites the memory at a kernel in 0/1 columns of held versions."""
        sums: dict[int, float] = defaultdict(float)
        for c, f in terms:
            for d, g in self.totals.get(c, [(c, 1.0)]):
                sums[d] += f * g
        return [(c, f) for c, f in sums.items() if abs(f) > 1e-12]

    def whole(self, tick: float) -> list[tuple[Terms, float]]:
        """Returns sums that are integers in every plan, weighted: recomputations per kernel, and each held version."""
        runs: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for (_, w), column in self.again.items():
            runs[w].append((column, 1.0))
        found: list[tuple[Terms, float]] = []
        found += [(terms, 1e3 * self.program.kernels[w].duration_ns / tick) for w, terms in runs.items()]
        for (_, i), c in (*self.kept.items(), *self.back.items()):
            found.append(([(c, 1.0)], self.size[i]))
        return found

    def absent(self, gap: Gap) -> list[tuple[int, int, int]]:
        """Returns the columns that describe whether recomputation has a gap's tensor evicted, per window.

        Returns:
            (window, column, sign): sign 1 if the column means "evicted", -1 if it means "held".
        """
        i = self.at.get((gap.tensor, self.program.version(gap.tensor, gap.after + 1)), -1)
        if i < 0 or not self.droppable[i]:
            return []
        first, last, between = self.window_of[gap.after + 1], self.window_of[gap.before], (i, gap.before)
        found = [(j, self.kept[j, i], -1) for j in range(max(first, 0), last) if (j, i) in self.kept]
        if between in self.between:
            found.append((last, self.between[between], 1))
        return found

    def _droppable_bytes(self) -> NDArray[np.int64]:
        """Returns int64[n]: bytes of droppable versions that a kernel does not use, within their lifetimes."""
        some = [v for v, droppable in zip(self.versions, self.droppable, strict=True) if droppable]
        idle = [(v, pair) for v in some for pair in v.spans]
        nbytes = np.array([self.program.tensors[v.tensor].nbytes for v, _ in idle], np.int64)
        where = np.array([pair for _, pair in idle], np.int64).reshape(-1, 2)
        return -residency(np.zeros(self.n, np.int64), where, nbytes)
