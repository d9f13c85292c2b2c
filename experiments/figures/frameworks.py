"""What SuperNeurons' Tables 4 and 5 share: the frameworks that they compare, and what stands for them here.

The paper runs Caffe, MXNet, Torch, TensorFlow and its own runtime on a K40c with 12 GB. Here memory strategies run on
the captured programs of PyTorch, with no workspaces and nothing else on the GPU:

- ``own``: every tensor has memory of its own, the paper's baseline; Caffe and Torch are at best twice as good (2.2);
- ``none``: dead tensors are freed (liveness analysis), as MXNet's and TensorFlow's engines do; nothing is planned;
- ``memonger``: sqrt(n) checkpoints, from the authors of MXNet; all between them is run again;
- ``vdnn_all``: every layer's input is swapped out;
- ``superneurons``: CONV outputs are swapped out, cheap layers run again; ``superneurons_joins``: sums and
  concatenations are swapped out, too (agents/heuristics/superneurons.py, choice 1);
- ``bound``: no method, but what none goes beyond: every tensor away whenever no kernel uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from omegaconf import DictConfig

import agents
from agents.heuristics.layers import feature_maps
from agents.heuristics.superneurons import leaving
from agents.planner import Candidates
from experiments.common.bisection import largest
from experiments.common.report import Row
from experiments.figures import attempt, chosen
from experiments.plotting.charts import Axis, Bars, Mark, Panel, Rule
from experiments.plotting.palette import CAPACITY_OF, INK
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.program import Program
from simulator.timeline import Timeline


class Method(NamedTuple):
    """One strategy.

    Attributes:
        planner: in ``agents``; "" for a strategy that plans nothing.
        options: of the planner.
    """

    label: str
    planner: str = ""
    options: Mapping[str, Any] = MappingProxyType({})


METHODS = {
    "own": Method("every tensor its own memory"),
    "none": Method("dead tensors freed", "none"),
    "memonger": Method("memonger", "memonger"),
    "vdnn_all": Method("vDNN all", "vdnn_all"),
    "superneurons": Method("SuperNeurons", "superneurons"),
    "superneurons_joins": Method("SuperNeurons, sums too", "superneurons", MappingProxyType({"joins": True})),
    "bound": Method("no plan goes beyond"),
}
FRAMEWORKS = ("Caffe", "MXNet", "Torch", "TensorFlow", "SuperNeurons")


def methods(settings: DictConfig) -> list[str]:
    """``settings.methods``; raises UsageError for one that there is not."""
    return chosen(settings, "methods", METHODS)


def planned(method: str, program: Program, machine: Machine) -> Timeline | None:
    """The iteration of a method in the machine's memory; None where it does not fit."""
    if floor(method, program) > machine.memory_bytes:
        return None
    how = METHODS[method]
    plan = attempt(agents.make(how.planner, **how.options), program, machine, machine.memory_bytes)
    return None if plan is None else simulate(program, plan, machine, machine.memory_bytes)


def floor(method: str, program: Program) -> int:
    """Bytes that a method cannot do without: with everything away that it moves, whenever it is not in use."""
    if method == "own":
        return sum(t.nbytes for t in program.tensors)
    if method == "none":
        return program.peak_bytes
    how = METHODS[method]
    if how.planner == "superneurons":
        gaps = list(leaving(program, **how.options))
    else:
        gaps = list(program.gaps()) if method == "bound" else [m.gap for m in feature_maps(program)]
    return Candidates(program, gaps).least


def most(method: str, at: Callable[[int], Program], machine: Machine, first: int, limit: int) -> tuple[int, Row]:
    """The largest size of a program with which a method fits, at most ``limit``, and what an iteration takes there, if
    the method has a plan.

    Args:
        at: the program of a size.
        first: a size to begin with.
    """
    top = largest(lambda n: floor(method, at(n)) <= machine.memory_bytes, min(first, limit), limit)
    if not METHODS[method].planner:
        return top, {}
    found: dict[int, Timeline | None] = {0: None}

    def fits(n: int) -> bool:
        if n not in found:
            found[n] = planned(method, at(n), machine)
        return n == 0 or found[n] is not None

    # The floor is near, so the search goes down from it: how far does it not fit?
    size = top if fits(top) else top - 1 - largest(lambda less: not fits(top - less), 1, top)
    timeline = found[size]
    if timeline is None:
        return 0, {}
    return size, {"overhead": timeline.overhead, "iteration_ns": timeline.iteration_ns, "peak": timeline.peak_bytes}


def panel(title: str, paper: Mapping[str, int | None], ours: Sequence[tuple[str, int]], texts: Sequence[str], axis: str,
          room: float, bound: int | None = None) -> Panel:  # fmt: skip
    """A bar for each framework of the paper, hollow, and for each of our methods, with its text."""
    n = len(paper)
    named = ["N/A" if value is None else f"{value:,}" for value in paper.values()]
    marks: list[Mark] = [Bars(range(n), list(paper.values()), INK, hollow=True, thick=0.7, texts=named)]
    marks += [Bars([n + i], [value], CAPACITY_OF[method], thick=0.7, texts=[text])
              for i, ((method, value), text) in enumerate(zip(ours, texts, strict=True))]  # fmt: skip
    marks += [] if bound is None else [Rule(bound)]
    names = [*(f"{name} (paper)" for name in paper), *(METHODS[method].label for method, _ in ours)]
    return Panel(title, marks, Axis(axis, limits=(0, None), room=room), Axis(names=names))
