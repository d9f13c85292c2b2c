"""vDNN: "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design" (MICRO 2016).

Offloads the input feature map X of a layer during that layer's forward pass, and does not start the next layer before
the offload completes (section III-B, memory offload). In the backward pass, every layer prefetches for the nearest
preceding layer with offloaded data, up to a CONV layer (III-B, memory prefetch, findPrefetchLayer). The static
policies (III-C) offload for every layer (``vdnn_all``) or for CONV layers (``vdnn_conv``), regardless of the limit;
``vdnn_dyn`` tries configurations and keeps one. Implemented without access to the paper's text. Entry point:
``VDNN.choose``. Numbered choices and deviations: vdnn.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agents.heuristics.layers import feature_maps
from agents.planner import MIB, PlannerInfo, Rows, RowsPlanner, one_of
from simulator.compiled.encoding import SWAP, SYNC_SWAP
from simulator.compiled.engine import Engine
from simulator.program import Gap, Program

CONFIGURATIONS = {"all": ("all",), "conv": ("conv",), "dyn": ("none", "conv", "all")}


@dataclass(eq=False)
class VDNN(RowsPlanner):
    """vDNN with one of its policies.

    Args:
        policy: all, conv or dyn.
        sync: no layer starts before the offload of the previous layer completes.
    """

    facts = tuple(
        PlannerInfo(
            f"vdnn_{key}",
            f"vDNN {key}",
            '"vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design", MICRO 2016',
            "swap: other heuristics",
            i,
            90 + 10 * i,
            "swap",
            {"policy": key},
        )
        for i, key in enumerate(CONFIGURATIONS)
    )

    policy: str = one_of([*CONFIGURATIONS], "dyn")
    sync: bool = True

    def choose(self, engine: Engine) -> Rows:
        """Returns the swaps of the policy, whether or not they fit the limit."""

        def cost(rows: Rows) -> tuple[int, int]:
            score = engine.score(rows)
            return score.iteration_ns, 0 if score.feasible else score.required_bytes

        # Ties go to the plan that moves least; if none fits, to the smallest required memory.
        candidates = [self.rows(engine.program, configuration) for configuration in CONFIGURATIONS[self.policy]]
        return min(candidates, key=cost) if len(candidates) > 1 else candidates[0]

    def rows(self, program: Program, configuration: str) -> Rows:
        """Returns int64[m, 6], the swaps of ``configuration`` (none, conv or all)."""
        gaps = offloads(program, configuration, self.min_bytes)
        kind = SYNC_SWAP if self.sync else SWAP
        pins = prefetches(program, gaps)
        rows = [(kind, *gap, pins[gap], max(gap.after - 1, program.accesses[gap.tensor][0])) for gap in gaps]
        return np.array(rows, dtype=np.int64).reshape(-1, 6)


def offloads(program: Program, configuration: str, min_bytes: int = MIB) -> list[Gap]:
    """Returns the gaps in which an X is offloaded, each opened by its last consumer (section III-C).

    Args:
        program: program with layers.
        configuration: layers that offload: "none", "conv" or "all".
        min_bytes: size in bytes below which tensors stay.
    """
    if configuration == "none":
        return []
    kernels = program.kernels
    return [
        gap
        for tensor, _, gap in feature_maps(program, min_bytes)
        if tensor in kernels[gap.after].inputs
        and tensor not in kernels[gap.after].outputs
        and (configuration == "all" or kernels[gap.after].kind == "conv")
    ]


def prefetches(program: Program, gaps: list[Gap]) -> dict[Gap, int]:
    """Runs findPrefetchLayer for every backward kernel; returns the kernel that triggers each gap's swap-in."""
    kernels = program.kernels
    waiting: dict[int, list[Gap]] = {}  # keyed by the kernel that needs them
    for gap in gaps:
        waiting.setdefault(gap.before, []).append(gap)
    pins = {gap: gap.before - 1 for gap in gaps}
    for current, kernel in enumerate(kernels):
        if kernel.phase != "backward" or not waiting:
            continue
        for layer in range(current + 1, len(kernels)):
            due = waiting.get(layer)
            if due and all(gap.after < current for gap in due):  # on the host with no prefetch issued
                pins |= dict.fromkeys(waiting.pop(layer), current - 1)
                break
            if kernels[layer].kind == "conv":
                break
    return pins
