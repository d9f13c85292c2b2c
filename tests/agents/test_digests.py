"""Tests that the decisions on random programs stay as they are: digests of plans, refusals and simulator calls.

Planners whose decisions depend on a solver's or a mathematical library's version are tested elsewhere. Writes the file:

    python -m tests.agents.test_digests
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

import agents
from agents.heuristics import tensor_cache
from agents.heuristics.smartpool_autoswap import SmartPoolAutoSwap
from agents.heuristics.tensile import TENSILE
from agents.heuristics.tensile.controller import control
from agents.heuristics.workspace import plan_with_variants
from agents.jobs import Split
from agents.search.retimed import Retimed, TimesError
from simulator import Job, Machine, Plan, Program
from tests import random_cases
from tests.agents.heuristics.test_superneurons import network
from tests.agents.test_planner import layers

PROGRAMS = 10
LAYERS = ("conv", "conv", "norm", "activation", "activation", "pool", "dropout", "matmul", "elementwise")
DIGESTS = Path(__file__).resolve().parents[1] / "data" / "plans.json"
SWARM = {"particles": 8, "iterations": 3, "jobs": 1}
PLANNERS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name, facts in agents.PLANNERS.items() if facts.family.startswith(("swap: other", "recompute"))),
    *((f"autoswap_{score}", {}) for score in ("doa", "aoa", "wdoa", "swdoa")),
    ("random_search", {"calls": 20}),
    *(("capuchin", options) for options in ({"rounds": 5}, {"policy": "layers"}, {"mode": "swap", "rounds": 5})),
    *(("home", SWARM | options) for options in ({}, {"update": "whole"}, {"evaluator": "stages"}, {"calls": 200})),
    *(("tensile", options) for options in ({}, {"mode": "recompute"}, {"max_swap_ratio": 0.3})),
    *(("superneurons", {option: True}) for option in ("always", "early", "joins")),
    *(("superneurons", options) for options in ({}, {"cache": "off"}, {"recompute": "cost"}, {"mode": "recompute"})),
    ("vdnn_all", {"sync": False}),
    ("tflms", {"lower_bound": 3}),
    ("activation_budget", {"runtime": "profile"}),
    *(("smartpool+autoswap", {"steps": 3, "align": False, "score": score}) for score in ("all", "random")),
]


def jobs(program: Program, machine: Machine, limit: int, planner: agents.jobs.JobsPlanner) -> object:
    """Runs a planner for two jobs, at once and by the controller."""
    arrivals = [Job(f"job {ns}", program, Plan((), program.fingerprint), arrives_ns=ns) for ns in (0, 200)]
    together = planner.plan_jobs([program, program], machine, 2 * limit)
    end_ns = 6 * program.ideal_ns
    check_ns = program.ideal_ns // 2
    return [plan.decisions for plan in together], control(arrivals, machine, 2 * limit, planner, end_ns, check_ns)


def variants(rng: Random, program: Program, machine: Machine, limit: int, planner: agents.Planner) -> object:
    """Plans a program whose kernels have several algorithms."""
    several, _ = random_cases.with_algorithms(rng, program)
    return plan_with_variants(planner, several, machine, limit), planner.simulator_calls


def spread(program: Program, machine: Machine, limit: int) -> object:
    """Returns the overheads under other kernel times."""
    plan = agents.make("tensile", min_bytes=1).plan(program, machine, limit)
    return Retimed(program, machine, limit, TimesError(0.0, 0.1), draws=2).spread(plan)


def planned(task: tuple[Program, Machine, int], name: str, options: dict[str, object]) -> object:
    planner = agents.make(name, min_bytes=1, **options)
    plan = planner.plan(*task)
    return plan.decisions, plan.variants, plan.limit, planner.simulator_calls


def results(rng: Random) -> dict[str, Callable[[], object]]:
    """Draws a task; returns what each digest covers of it, to be computed."""
    if rng.random() < 0.3:
        program = layers(random_cases.program_of(rng, 40), rng.random() < 0.2)
    else:
        program = network([(rng.choice(LAYERS), rng.randint(5, 30)) for _ in range(14)])
    work = (replace(k, flops=rng.randint(0, 9), duration_ns=rng.randint(5, 40)) for k in program.kernels)
    machine = replace(random_cases.machine_of(rng), host_bytes=rng.choice([150, 10**12, 10**12]))
    task = replace(program, kernels=tuple(work)), machine, int(rng.uniform(0.6, 0.9) * program.peak_bytes)
    return {
        **{f"{name} {options}": lambda n=name, o=options: planned(task, n, o) for name, options in PLANNERS},
        "tensor cache": lambda: tensor_cache.run(*task, 1),
        **{f"jobs {mode}": lambda m=mode: jobs(*task, TENSILE(m, min_bytes=1)) for mode in ("swap", "joint")},
        "jobs split": lambda: jobs(*task, Split("autoswap_swdoa", min_bytes=1)),
        "workspace filled": lambda: variants(rng, *task, TENSILE(min_bytes=1)),
        "workspace kept": lambda: variants(rng, *task, SmartPoolAutoSwap(steps=3, min_bytes=1, align=False)),
        "smallest": lambda: SmartPoolAutoSwap(steps=3, min_bytes=1, align=False).smallest(*task[:2], (0.0, 0.1, 0.5)),
        "spread": lambda: spread(*task),
    }


def digests() -> dict[str, str]:
    texts: dict[str, str] = {}
    for seed in range(PROGRAMS):
        for key, run in results(Random(seed)).items():
            try:
                text = repr(run())
            except (agents.Infeasible, *random_cases.REFUSALS) as error:
                text = str(error)
            texts[key] = texts.get(key, "") + text
    return {key: sha256(text.encode()).hexdigest()[:16] for key, text in texts.items()}


@pytest.mark.usefixtures("few_moves")
def test_decisions_stay_as_they_are() -> None:
    assert digests() == json.loads(DIGESTS.read_text())


if __name__ == "__main__":
    DIGESTS.write_text(json.dumps(digests(), indent=1) + "\n")
