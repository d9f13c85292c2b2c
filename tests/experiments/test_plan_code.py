"""Tests ``experiments.plan``: code snippets for its plan, and the table of the slowest kernels."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import agents
from agents.saved import saved_plan
from executor import Captured, capture
from experiments.plan import usage
from experiments.plan.capture import NO_OBSTACLE, Step
from experiments.plan.words import slowest
from simulator import Kernel, Machine, Plan, Program, Swap, Tensor
from simulator.report import Origins, Place, Unit
from tests.experiments.conftest import MB, chain

MACHINE = Machine.load("h100")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ModuleDict({"body": nn.Sequential(*(Block() for _ in range(6)))})["body"], nn.Linear(64, 10)
    )


def test_a_plan_that_moves_nothing_is_code_for_plain_pytorch() -> None:
    x = torch.randn(512, 64)
    y = torch.randint(10, (512,))

    def step(model: nn.Module) -> Captured:
        return capture(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), (x, y))

    captured = step(blocks()).on(MACHINE)
    program = captured.program
    limit = captured.program.peak_bytes * 7 // 10
    plan = agents.make("activation_budget", min_bytes=1024).plan(program, MACHINE, limit)
    paths = [name for name, _ in blocks().named_modules() if name]
    found = usage.checkpoints(program, MACHINE, limit, plan, captured.origins, paths)
    assert found is not None and found.names and found.peak_bytes <= limit and found.overhead > 0
    exec(found.code, {"model": (model := blocks())})
    pairs = []
    for one in (model, blocks()):
        loss = nn.functional.cross_entropy(one(x), y)
        loss.backward()
        pairs.append([loss, *(p.grad for p in one.parameters())])
    assert all(torch.equal(*both) for both in zip(*pairs, strict=True))
    assert step(model).program.peak_bytes == pytest.approx(
        found.peak_bytes, rel=0.1
    )  # as captured with the checkpoints
    text = found.describe(Unit.for_sizes(limit))
    assert f"checkpoints of {len(found.names)} modules" in text and f"{found.overhead:+.1%}" in text
    swaps = replace(plan, decisions=(Swap(*program.gaps(1024)[0]),))
    for nothing in ((swaps, captured.origins, paths), (plan, None, paths), (plan, captured.origins, [])):
        assert usage.checkpoints(program, MACHINE, limit, *nothing) is None


def test_kernels_list_their_rate_and_bound() -> None:
    kernels = (
        Kernel("aten.mm.default", "matmul", "forward", (), (0,), 2_000_000, flops=10**11, bytes=10**6),
        Kernel("aten.add.Tensor", "elementwise", "forward", (0,), (1,), 1_000_000, bytes=2 * 10**9),
        Kernel("aten.add.Tensor", "elementwise", "forward", (1,), (0,), 1_000_000, bytes=2 * 10**9),
        Kernel("tiny", "elementwise", "forward", (0,), (1,), 2_000, bytes=4),
        Kernel("marker", "other", "forward", (0,), (1,), 0),
    )
    program = Program("p", (Tensor("a", MB), Tensor("b", MB)), kernels)
    places = tuple(Place(name, "") for name in ("head", "body.0", "body.1", "", ""))
    types = ("tf32", "float32", "float32", "float32", "")
    step = Step(program, Origins(places, ("head", "body.0")), None, "", types, NO_OBSTACLE, ())
    heads, rows = slowest(step, MACHINE)
    assert len(heads) == len(rows[0]) and [row[0] for row in rows] == ["mm", "2 × add.Tensor", "tiny"]
    assert rows[0][1:] == ["head", "2.00 ms", "50.0%", "50.0 TFLOP/s", "tf32", "arithmetic"]
    assert rows[1][1:] == ["body.0 and 1 more", "2.00 ms", "50.0%", "2,000 GB/s", "float32", "memory"]
    assert rows[2][1:3] == ["(the model itself)", "2.0 us"] and rows[2][-1] == "the launch"


def test_a_plan_that_does_not_fit_another_capture_says_how_to_plan_there(tmp_path: Path) -> None:
    program = chain()
    limit = program.peak_bytes * 7 // 10
    agents.make("tensile").plan(program, MACHINE, limit).save(tmp_path / "plan.json")
    program.save(tmp_path / "program.json")
    plan = saved_plan(tmp_path)
    assert plan(replace(program, name="other"), MACHINE, limit).decisions == Plan.load(tmp_path / "plan.json").decisions
    other = replace(program, kernels=tuple(replace(k, name=f"cuda.{k.name}") for k in program.kernels))
    assert plan(other, MACHINE, limit).check(other) is None  # matched by the order of accesses
    with pytest.raises(agents.Infeasible, match=r"of its \d+ decisions could be mapped, .* omit planner="):
        plan(chain(7), MACHINE, limit)
