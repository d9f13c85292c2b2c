"""HOME's policy evaluator (IEEE TC 2022, section 3.4, Algorithm 2), vectorized over particles.

The stages of a forward and a backward pass are the program's kernels. A swapped feature map is offloaded
asynchronously after its last forward use. A stage that lacks memory waits for the head of the swap-out list (lines 3
to 10). The feature map is prefetched one stage before its use; a stage waits for the rest of its transfer (Fig. 4).
Choices that the paper leaves open:

1. A recomputation runs the kernels that produce the feature map. Inputs that are not resident and can be recomputed are
   recomputed first. Intermediate tensors are not kept.
2. A particle that lacks memory while the swap-out list is empty is infeasible (line 5). Its cost is the largest deficit
   in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.machine import Machine
from simulator.modes import RECOMPUTED, SWAPPED
from simulator.program import Gap, Program
from simulator.residency import reruns

Placements = NDArray[np.int8]  # (particles, feature maps): 0 retained, else SWAPPED or RECOMPUTED


class StageModel:
    """Algorithm 2 for one program, machine and limit.

    Args:
        gaps: the feature maps' gaps, from last forward use to first backward use.
    """

    def __init__(self, program: Program, machine: Machine, limit: int, gaps: Sequence[Gap]) -> None:
        self.program, self.limit, self.gaps = program, limit, gaps
        self.nbytes = np.array([program.tensors[g.tensor].nbytes for g in gaps], np.int64)
        self.out_ns = np.array([machine.d2h_ns(int(n)) for n in self.nbytes], np.int64)
        self.in_ns = np.array([machine.h2d_ns(int(n)) for n in self.nbytes], np.int64)
        n = len(program.kernels)
        self.opens: list[list[int]] = [[] for _ in range(n)]
        self.closes: list[list[int]] = [[] for _ in range(n)]
        for f, gap in enumerate(gaps):
            self.opens[gap.after].append(f)
            self.closes[gap.before].append(f)
        index = {gap.tensor: f for f, gap in enumerate(gaps)}
        self.chain_ns = np.zeros(len(gaps), np.int64)
        self.chain_reads: list[list[int]] = []  # feature maps that a chain reads and that are absent if recomputed
        for gap in gaps:
            kernels = [program.kernels[k] for k in reruns(program, {gap.tensor}, gap.before)]
            read = {index[t] for kernel in kernels for t in kernel.inputs if t in index and t != gap.tensor}
            self.chain_ns[len(self.chain_reads)] = sum(kernel.duration_ns for kernel in kernels)
            self.chain_reads.append([g for g in sorted(read) if gaps[g].before > gap.before])

    def evaluate(self, x: Placements) -> NDArray[np.int64]:
        """Returns (particles, 2): maximum deficit in bytes, and iteration time in ns."""
        swapped, recomputed = x == SWAPPED, x == RECOMPUTED
        chains = self._chains(recomputed)
        particles = len(x)
        now, d2h_free, h2d_free, previous = (np.zeros(particles, np.int64) for _ in range(4))
        absent = np.zeros(particles, np.int64)  # bytes
        lacks = np.zeros(particles, np.int64)
        ends = np.full(x.shape, np.iinfo(np.int64).max)  # of swap-outs in flight
        for k, (kernel, load) in enumerate(zip(self.program.kernels, self.program.live_bytes, strict=True)):
            for f in self.closes[k]:
                arrives = np.maximum(h2d_free, previous) + self.in_ns[f]
                h2d_free = np.where(swapped[:, f], arrives, h2d_free)
                pending = swapped[:, f] & (ends[:, f] < np.iinfo(np.int64).max)  # its swap-out is still pending
                absent += np.where(pending, self.nbytes[f], 0)
                ends[pending, f] = np.iinfo(np.int64).max
                absent -= np.where(swapped[:, f] | recomputed[:, f], self.nbytes[f], 0)
                now = np.where(swapped[:, f], np.maximum(now, h2d_free), now + chains[:, f])
            if load > self.limit:
                lacking = np.flatnonzero(load - absent > self.limit)
                while len(lacking):  # lines 3 to 10
                    front = ends[lacking].argmin(axis=1)
                    first = ends[lacking, front]
                    empty = first == np.iinfo(np.int64).max
                    lost = lacking[empty]
                    lacks[lost] = np.maximum(lacks[lost], load - absent[lost] - self.limit)
                    lacking, front, first = lacking[~empty], front[~empty], first[~empty]
                    now[lacking] = np.maximum(now[lacking], first)
                    absent[lacking] += self.nbytes[front]
                    ends[lacking, front] = np.iinfo(np.int64).max
                    lacking = lacking[load - absent[lacking] > self.limit]
            previous = now
            now = now + kernel.duration_ns
            for f in self.opens[k]:
                d2h_free = np.where(swapped[:, f], np.maximum(d2h_free, now) + self.out_ns[f], d2h_free)
                ends[swapped[:, f], f] = d2h_free[swapped[:, f]]
                absent += np.where(recomputed[:, f], self.nbytes[f], 0)
        return np.stack([lacks, now], axis=1)

    def _chains(self, recomputed: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns the recomputation time in ns of each feature map, (particles, feature maps)."""
        chains = np.where(recomputed, self.chain_ns, 0)
        for f in sorted(range(len(self.gaps)), key=lambda f: -self.gaps[f].before):
            if self.chain_reads[f]:
                chains[:, f] += recomputed[:, f] * chains[:, self.chain_reads[f]].sum(axis=1)
        return chains
