"""Feature maps, for layer-based methods: tensors that the forward pass leaves for the backward pass.

A feature map is a non-persistent tensor that the forward pass writes and a later phase uses again. Its layer is
the kernel that writes it first.
"""

from __future__ import annotations

from typing import NamedTuple

from agents.planner import MIB
from simulator.program import Gap, Kernel, Program


class FeatureMap(NamedTuple):
    """Tensor that the forward pass retains for a later phase."""

    tensor: int
    layer: int  # kernel that writes it first
    gap: Gap  # from its last use in the forward pass to its first use after that


def feature_maps(program: Program, min_bytes: int = MIB) -> list[FeatureMap]:
    """Returns the feature maps of at least ``min_bytes`` that are idle for at least one kernel, in layer order."""
    phases = [k.phase for k in program.kernels]
    found = []
    for t, tensor in enumerate(program.tensors):
        uses = program.accesses[t]
        if tensor.persistent or tensor.nbytes < max(min_bytes, 1) or not uses or phases[uses[0]] != "forward":
            continue
        later = [k for k in uses if phases[k] != "forward"]
        if not later:
            continue
        last = max(k for k in uses if k < later[0])
        if later[0] - last > 1:
            found.append(FeatureMap(t, uses[0], Gap(t, last, later[0])))
    return sorted(found, key=lambda f: (f.layer, f.tensor))


def is_marker(kernel: Kernel) -> bool:
    """Returns whether a kernel computes nothing: in a captured step it stands for references that Python holds."""
    return not kernel.outputs and not kernel.duration_ns
