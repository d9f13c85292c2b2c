"""Tests cuts between the blocks of models in which tables, masks and embeddings cross all blocks.

    forward    e → x_0, r → table      block i: a_i: x_i → h_i    b_i: h_i, table → g_i    c_i: g_i, x_i → x_(i+1)
    backward   loss, then each block's c' (g_i), b' (h_i, table), a' (x_i)      (gradients have no bytes)

All tensors have 10 bytes and all kernels take 10 ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import agents
from agents.heuristics.memonger import cuts_of
from agents.planner import small
from simulator import Kernel, Program, Tensor, simulate
from tests.agents.heuristics.test_checkpoint_blocks import A100, SMALL, language_model
from tests.agents.planned import planned
from tests.programs import BYTE_PER_NS as MACHINE

BLOCKS = 6
TABLE = 0


def model(reads_table: Sequence[bool] = (True,) * BLOCKS, held: bool = False) -> Program:
    """Builds the model; ``held``: Python holds x_0, which the first block alone uses, until the forward pass ends."""
    tensors = [Tensor("table", 10), Tensor("x0", 10), Tensor("d", 0, "gradient")]
    forward = [Kernel("r", "elementwise", "forward", (), (TABLE,), 10), Kernel("e", "copy", "forward", (), (1,), 10)]
    backward: list[Kernel] = []
    x = 1
    for reads in reads_table:
        h, g, y = range(len(tensors), len(tensors) + 3)
        tensors += [Tensor(f"{name}{h}", 10) for name in "hgx"]
        table = (TABLE,) if reads else ()
        forward += [
            Kernel("a", "matmul", "forward", (x,), (h,), 10),
            Kernel("b", "elementwise", "forward", (h, *table), (g,), 10),
            Kernel("c", "matmul", "forward", (g, x), (y,), 10),
        ]
        backward[:0] = [
            Kernel("c'", "matmul", "backward", (g,), (2,), 10),
            Kernel("b'", "elementwise", "backward", (h, *table), (2,), 10),
            Kernel("a'", "matmul", "backward", (x,), (2,), 10),
        ]
        x = y
    forward += [Kernel("marker", "other", "forward", (1,), (), 0, recomputable=False)] if held else []
    loss = Kernel("loss", "reduce", "backward", (x,), (2,), 10)
    return Program("blocks", tuple(tensors), (*forward, loss, *backward))


@pytest.mark.parametrize("held", [False, True])
def test_tensors_that_cross_all_blocks_do_not_count(held: bool) -> None:
    program = model(held=held)
    splits, through = cuts_of(program, 1)
    # After r, e, and each c_i; the table is left out.
    assert through == {TABLE} and [s.kernel for s in splits] == [0, *(1 + 3 * i for i in range(BLOCKS + 1))]
    assert [s.crossing for s in splits][1:-1] == [{1}, *({3 * i + 2} for i in range(1, BLOCKS))]
    # x_1 to x_5 and the table, and the h and g of the last block beside x_6. The first layer includes e.
    plan = planned("checkpoint_all", program, MACHINE, 100)
    names = {program.tensors[d.tensor].name for d in plan.decisions}  # type: ignore[union-attr]
    assert {name for name in names if name[0] not in "hg"} == {"x0"}
    timeline = simulate(program, plan, MACHINE, 100)
    assert timeline.peak_bytes <= 100 < program.peak_bytes == 200
    assert planned("memonger", program, MACHINE, 100).decisions


def test_an_embedding_that_python_holds_does_not_count() -> None:
    program = model([False] * BLOCKS, held=True)
    splits, through = cuts_of(program, 1)
    assert not through and len([s for s in splits if len(s.crossing) == 1]) >= BLOCKS


def test_tensors_that_cross_unlike_blocks_still_count() -> None:
    program = model(held=True)
    kernels = tuple(replace(k, name=f"{k.name}{i}") if k.name in "ac" else k for i, k in enumerate(program.kernels))
    cuts = cuts_of(replace(program, kernels=kernels), 1)
    assert not cuts.through and all(len(s.crossing) <= 1 for s in cuts.splits) and len(cuts.splits) < 5


@pytest.mark.parametrize("name", SMALL)
def test_checkpoints_of_transformers_save_memory(name: str) -> None:
    program = language_model(name, False, True)
    least = {"checkpoint_all": 0.6, "checkpoint_sqrt": 0.8, "memonger": 0.6}
    blocks = agents.make("checkpoint_blocks").plan(program, A100, program.peak_bytes)
    target = simulate(program, blocks, A100, program.peak_bytes).peak_bytes
    for planner, part in least.items():
        limit = int(max(1.1 * target, part * program.peak_bytes)) if planner == "memonger" else program.peak_bytes
        plan = agents.make(planner, min_bytes=small(program)).plan(program, A100, limit)
        assert simulate(program, plan, A100, limit).peak_bytes <= max(part * program.peak_bytes, 1.1 * target)
