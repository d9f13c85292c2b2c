"""Tests the smallest limit of each method: it finds a plan there, and names that limit for one byte less."""

from __future__ import annotations

import pytest

import agents
from agents.heuristics.autoswap import SCORES
from simulator import Program, simulate
from tests import tiny
from tests.agents.heuristics import test_checkpoint_blocks, test_memonger, test_pytorch, test_superneurons, test_vdnn
from tests.agents.heuristics.test_autoswap import FOUR, MACHINE
from tests.agents.planned import planned
from tests.agents.test_floor import sandwich

# All four tensors of FOUR away: kernel 1 still writes 1 and 3 (4 bytes), kernel 4 reads 2 and 3 beside 6 of workspace.
REACH: list[tuple[str, dict[str, object], Program, int]] = [
    *((f"autoswap_{score}", {}, FOUR, 12) for score in SCORES),
    ("autoswap_bo", {"evaluations": 6}, FOUR, 12),
    ("tflms", {}, FOUR, 14),  # without a backward pass nothing can be swapped
    # With a1 and a2 evicted the loads are 50 90 90 90 100 110 110 60.
    ("tflms", {}, tiny.PROGRAM, 110),
    ("home", {"mode": "swap", "particles": 20}, tiny.PROGRAM, 110),
    # Kernel b4 [40, 60) is the peak. a1 could leave in [20, 40), a2 in [30, 40): too short for 40 bytes. Only w leaves.
    ("tensile", {"mode": "swap"}, tiny.PROGRAM, 170),
    ("vdnn_all", {}, test_vdnn.NETWORK, 70),  # k6 uses all but g3
    ("vdnn_conv", {}, test_vdnn.NETWORK, 95),  # k4 without a2
    ("vdnn_dyn", {}, test_vdnn.NETWORK, 70),
    # Kernel 8 holds 1, 2 and 3 while it recovers 3, beside 4 and two gradients.
    ("superneurons", {}, test_superneurons.NET, 42),
    # test_speed_and_memory_centric_recomputation_by_hand derives these.
    ("superneurons", {"mode": "recompute", "always": True, "recompute": "speed"}, test_superneurons.SEGMENT, 63),
    ("superneurons", {"mode": "recompute", "always": True, "recompute": "memory"}, test_superneurons.SEGMENT, 42),
    ("superneurons", {"mode": "recompute", "always": True, "recompute": "cost"}, test_superneurons.SEGMENT, 42),
    ("memonger", {}, test_memonger.chain(17), 60),  # every 4th layer is kept: test_plans_by_hand
    # 4 segments of 4 layers, the last of 5 runs plainly: a4 a8 a12, a13 … a16 and a17 at m17.
    ("checkpoint_sqrt", {}, test_memonger.chain(17), 80),
    # all: 8 a_i, h9 and a9: 90 + 100. sqrt: a3, a6 and the last three layers: 20 + 3 (100 + 10).
    ("checkpoint_all", {}, test_pytorch.chain(9, h=100), 190),
    ("checkpoint_sqrt", {}, test_pytorch.chain(9, h=100), 350),
    ("checkpoint_blocks", {}, test_checkpoint_blocks.chain(), 50),  # test_blocks_are_recomputed_at_once_by_hand
    ("activation_budget", {}, test_pytorch.THREE, 30),  # test_the_budget_is_tuned_to_the_limit
    ("lp_round", {}, sandwich(), 100),  # as the floor proves
]


@pytest.mark.parametrize(("name", "options", "program", "least"), REACH, ids=lambda v: v if isinstance(v, str) else "")
def test_the_smallest_limit(name: str, options: dict[str, object], program: Program, least: int) -> None:
    plan = planned(name, program, MACHINE, least, **options)
    assert simulate(program, plan, MACHINE, least).peak_bytes <= least
    with pytest.raises(agents.Infeasible, match=rf"^{name}: .* smallest limit it can reach is {least} bytes"):
        planned(name, program, MACHINE, least - 1, **options)
