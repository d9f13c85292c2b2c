"""Tests of a plan's decisions as marks for PyTorch's own partitioner."""

from typing import Any

import pytest
import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from executor.compiled import Partitioner, tag
from tests.executor.compiled.test_compiled import QUICK, blocks, interpreted, step


def saved_by(forward: Any, outputs: int) -> dict[str, int]:
    """Returns the bytes of saved values that the forward computes, by name."""
    values = forward.graph.output_node().args[0][outputs:]
    return {x.name: x.meta["val"].nbytes for x in values if x.op == "call_function"}


def test_pytorchs_partitioner_saves_nothing_that_the_plan_recomputes() -> None:
    from torch._guards import detect_fake_mode
    from torch._inductor.virtualized import V

    net = blocks()
    x = torch.randn(4, 64, 32)
    found: list[Any] = []

    def partition(gm: Any, inputs: Any, **options: Any) -> Any:
        outputs = options["num_fwd_outputs"]
        untagged, _ = min_cut_rematerialization_partition(gm, inputs, **options)
        with V.set_fake_mode(detect_fake_mode(torch.utils._pytree.tree_leaves(inputs))):
            marks = tag(gm, inputs, Partitioner(0.7, planner=QUICK), **options)
        parts = min_cut_rematerialization_partition(gm, inputs, **options)
        found.extend((marks, saved_by(untagged, outputs), saved_by(parts[0], outputs)))
        return parts

    torch.testing.assert_close(step(interpreted(net, partition), net, x), step(net, net, x))
    marks, untagged, tagged = found
    wanted = {name for name, policy in marks.items() if policy is CheckpointPolicy.MUST_SAVE}
    assert tagged and tagged.keys() & marks.keys() <= wanted and len(marks) > len(wanted)
    assert not untagged.keys() & marks.keys() <= wanted  # the control
    assert sum(tagged.values()) < sum(untagged.values())


def test_plans_with_swaps_are_refused() -> None:
    nothing = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    with pytest.raises(ValueError, match="partitioner: expected mode 'recompute', got 'joint'"):
        tag(nothing, (), Partitioner(0.5, mode="joint"))
