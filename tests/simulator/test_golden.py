"""Timelines of small programs, compared byte for byte with tests/golden/*.json.

A difference means that the clock or the ledger of the simulator has changed. If that is meant, write the
files again, read the difference, and say in the changelog why it changed:

    python -m tests.simulator.test_golden
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from simulator import Kernel, Machine, Plan, Program, Recompute, Swap, Tensor, Timeline, simulate
from simulator.schedule import lower
from tests import tiny
from tests.oracle import violations

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def residual() -> Program:
    """Three layers with skip connections, an in-place update, workspaces and SGD; 1 kB to 64 kB, 1 to 20 us."""
    kb = 1024
    tensors = [Tensor(f"w{i}", 8 * kb, "parameter", True) for i in range(3)]
    tensors += [Tensor(f"momentum{i}", 8 * kb, "optimizer_state", True) for i in range(3)]
    tensors += [Tensor("running_mean", 64, "buffer", True), Tensor("x", 16 * kb, "input", True)]
    tensors += [Tensor(f"y{i}", 64 * kb) for i in range(3)] + [Tensor(f"z{i}", 64 * kb) for i in range(3)]
    tensors += [Tensor(f"dy{i}", 64 * kb, "gradient") for i in range(3)]
    tensors += [Tensor(f"dw{i}", 8 * kb, "gradient") for i in range(3)]
    w, m, mean, x, y, z, dy, dw = range(3), range(3, 6), 6, 7, range(8, 11), range(11, 14), range(14, 17), range(17, 20)
    kernels = []
    for i in range(3):
        source = x if i == 0 else z[i - 1]
        kernels.append(Kernel(f"conv{i}", "conv", "forward", (source, w[i]), (y[i],), 20_000, workspace=32 * kb))
        kernels.append(Kernel(f"norm{i}", "norm", "forward", (y[i],), (z[i], mean), 3_000))
        if i:
            kernels.append(Kernel(f"add{i}", "elementwise", "forward", (z[i], source), (z[i],), 1_000))
    for i in reversed(range(3)):
        later = (dy[i + 1],) if i < 2 else ()
        kernels.append(Kernel(f"norm{i}_back", "norm", "backward", (y[i], z[i], *later), (dy[i],), 6_000))
        source = x if i == 0 else z[i - 1]
        kernels.append(
            Kernel(f"conv{i}_back", "conv", "backward", (source, dy[i]), (dw[i],), 19_999, workspace=48 * kb)
        )
    kernels += [Kernel(f"sgd{i}", "optimizer", "optimizer", (w[i], m[i], dw[i]), (w[i], m[i]), 1_500) for i in range(3)]
    return Program("residual", tuple(tensors), tuple(kernels))


def one_engine() -> tuple[Program, Plan, Machine, int]:
    """Swaps over and inside the iteration, one of them pinned, on one copy engine, under the least limit."""
    program = residual()
    swaps = [Swap(g.tensor, g.after, g.before) for g in program.gaps(min_bytes=8 * 1024)]
    swaps[0] = Swap(swaps[0].tensor, swaps[0].after, swaps[0].before, prefetch=(swaps[0].before - 1) % 17)
    return tight(program, swaps, Machine("one engine", 2**20, 4 * 10**9, 3 * 10**9, 2_000, copy_engines=1))


def synchronous() -> tuple[Program, Plan, Machine, int]:
    """Every second swap-out makes compute wait."""
    program = residual()
    swaps = [Swap(*g, sync=i % 2 == 0) for i, g in enumerate(program.gaps(min_bytes=32 * 1024))]
    return tight(program, swaps, Machine("two engines", 2**20, 6 * 10**9, 6 * 10**9, 2_000))


def mixed(keep: bool) -> tuple[Program, Plan, Machine, int]:
    """Swaps and recomputation side by side on two copy engines."""
    program = residual()
    decisions: list[Swap | Recompute] = []
    for i, g in enumerate(program.gaps(min_bytes=32 * 1024)):
        again = Recompute(*g, keep)
        decisions.append(again if i % 3 and fits(program, again) else Swap(*g))
    return tight(program, decisions, Machine("two engines", 2**20, 6 * 10**9, 6 * 10**9, 2_000))


def fits(program: Program, decision: Recompute) -> bool:
    try:
        Plan((decision,)).check(program)
    except ValueError:
        return False
    return True


def tight(program: Program, decisions: list, machine: Machine) -> tuple[Program, Plan, Machine, int]:
    plan = Plan(tuple(decisions), program.fingerprint)
    return program, plan, machine, lower(program, plan).required_bytes


CASES: dict[str, Callable[[], tuple[Program, Plan, Machine, int]]] = {
    "tiny_swap": lambda: (tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT),
    "residual_one_engine": one_engine,
    "residual_synchronous": synchronous,
    "residual_memory_centric": lambda: mixed(keep=False),
    "residual_speed_centric": lambda: mixed(keep=True),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name, tmp_path):
    program, plan, machine, limit = CASES[name]()
    timeline = simulate(program, plan, machine, limit)
    assert violations(timeline, program, plan, machine, limit) == []
    timeline.save(tmp_path / "timeline.json")
    assert (tmp_path / "timeline.json").read_bytes() == (GOLDEN / f"{name}.json").read_bytes()


def test_golden_files_are_the_cases():
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


def test_the_cases_show_what_they_should():
    """Each has every kind of span that it is about, and waits."""
    timelines = {name: Timeline.load(GOLDEN / f"{name}.json") for name in CASES}
    for name, timeline in timelines.items():
        kinds = {s.kind for s in timeline.spans}
        assert {"kernel", "swap_out", "swap_in"} <= kinds and timeline.overhead > 0
        assert ("recompute" in kinds) == name.endswith("centric")
    memory, speed = timelines["residual_memory_centric"], timelines["residual_speed_centric"]
    assert memory.breakdown.recompute_ns > speed.breakdown.recompute_ns > 0


if __name__ == "__main__":
    for name, make in CASES.items():
        simulate(*make()).save(GOLDEN / f"{name}.json")
        print(GOLDEN / f"{name}.json")
