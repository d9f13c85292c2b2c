"""Tests that planning leaves the state of the process as it was: generators, gradient mode, threads, defaults."""

from __future__ import annotations

from typing import Any

import pytest
import sklearn.gaussian_process  # noqa: F401  (it loads rich, which draws from ``random`` when it is imported)

import agents
from agents.learned import edit_net, policy_net
from tests.process_state import process_state
from tests.tiny import LIMIT, MACHINE, PROGRAM

# Settings with which the slow planners end soon.
QUICK: dict[str, dict[str, Any]] = {
    "dqn_paper": {"episodes": 2},
    "smartpool+autoswap": {"evaluations": 4},
    "activation_budget": {"steps": 2},
    "rerun_search": {"seconds": 0.2},
}


@pytest.mark.parametrize("name", sorted(agents.PLANNERS))
def test_a_planner_leaves_the_process_as_it_was(name: str) -> None:
    for load in (edit_net.trained, policy_net.trained):  # the first use in a process constructs a network
        load.cache_clear()
    calls = {"calls": 60} if "calls" in agents.options(name) else {}
    planner = agents.make(name, min_bytes=0, **calls, **QUICK.get(name, {}))
    before = process_state()
    try:
        planner.plan(PROGRAM, MACHINE, LIMIT)
    except agents.Infeasible:
        pass
    assert process_state() == before
