"""Code snippets: the call of ``fit`` for the recommended plan, and an equivalent with PyTorch checkpoints.

``torch.utils.checkpoint`` of a module stores its inputs and outputs and recomputes its forward pass in the backward
pass, so it cannot select single tensors as a plan can. The simulator finds the modules whose checkpoints approximate a
recomputation plan, and their cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.heuristics.layers import FeatureMap, feature_maps
from agents.heuristics.memonger import recomputable, recomputations
from agents.planner import small
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan import Plan, PlanError, Recompute
from simulator.program import Program
from simulator.report import Origins, Unit

FIT = """\
{imports}
{made}
{plan}step = fit({parts}, memory={memory!r}, machine={machine!r}{options})
print(step.report())
for x, y in loader:
    loss = step(x, y)  # bit-identical to the eager step"""
CHECKPOINT = """\
from functools import partial
from torch.utils.checkpoint import checkpoint

for name in {names!r}:
    module = model.get_submodule(name)
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)"""


def fit_call(
    target: str | None, memory: int | float | str, machine: str, folder: Path | None, in_backward: bool = False
) -> str:
    """Returns Python code that trains under the plan of a run directory.

    Args:
        target: target= of the command; None: the user supplies model, loss, optimizer and batch.
        memory, machine: values as typed on the command line.
        folder: the run directory; None: the step needs no plan.
        in_backward: whether the plan is for the optimizer's update in the backward pass.
    """
    module, _, factory = (target or "").partition(":")
    parts = "*parts[:-1], example_batch=parts[-1]" if target else "model, loss_fn, optimizer, (x, y)"
    setup = f"from {module} import {factory}\n\nparts = {factory}()"
    setup = setup if target else "\n# model, loss_fn, optimizer and one batch of the step that was planned"
    imports = "from executor import fit"
    plan = options = ""
    if folder is not None:
        imports = f"from agents.saved import saved_plan\n{imports}"
        plan = f"plan = saved_plan({str(folder)!r})\n"
        options = ", planner=plan"
    if in_backward:
        options += ", optimizer_in_backward=True"
    return FIT.format(
        imports=imports, made=setup, plan=plan, parts=parts, memory=memory, machine=machine, options=options
    )


@dataclass(frozen=True)
class Checkpoints:
    """Modules whose checkpoints approximate a plan in plain PyTorch."""

    names: tuple[str, ...]
    overhead: float  # simulated, relative to the ideal time
    peak_bytes: int  # simulated peak of the tensors

    @property
    def code(self) -> str:
        """Code to insert before the training loop."""
        return CHECKPOINT.format(names=self.names)

    def describe(self, size: Unit) -> str:
        """Describes the cost of the checkpoints in one or two sentences."""
        return (
            f"The plan only recomputes, so checkpoints of {len(self.names)} modules approximate it: about "
            f"{self.overhead:+.1%}, and {size(self.peak_bytes)} of tensors. The loss is unchanged; batch norm "
            "layers update their running statistics twice."
        )


def checkpoints(
    program: Program, machine: Machine, limit: int, plan: Plan, origins: Origins | None, modules: Sequence[str]
) -> Checkpoints | None:
    """Returns the cheapest set of module checkpoints that fits ``limit``; None without one, or if the plan also swaps.

    Sets consist of modules of one depth; modules of which the plan recomputes the largest share come first.

    Args:
        program: program of the plan.
        machine: machine to simulate.
        limit: memory limit in bytes.
        plan: plan whose recomputations the checkpoints replace.
        origins: source locations of the kernels; None: unknown.
        modules: paths of the callable modules.
    """
    if origins is None or not plan.decisions or not all(isinstance(d, Recompute) for d in plan.decisions):
        return None
    recomputed = {d.tensor for d in plan.of_kind(Recompute)}
    engine = Engine(program, machine, limit)
    best: Checkpoints | None = None
    for blocks in _by_depth(program, origins, frozenset(modules)):
        shares = {
            name: _bytes(program, [m for m in maps if m.tensor in recomputed]) / max(_bytes(program, maps), 1)
            for name, maps in blocks.items()
        }
        names = sorted(blocks, key=lambda name: -shares[name])
        for n in range(1, len(names) + 1):
            try:
                maps = sorted((m for name in names[:n] for m in blocks[name]), key=lambda m: (m.layer, m.tensor))
                score = engine.score(recomputations(maps))
            except PlanError:
                continue
            if score.feasible:
                cost = score.iteration_ns / max(program.ideal_ns, 1) - 1
                if best is None or cost < best.overhead:
                    chosen = set(names[:n])
                    best = Checkpoints(tuple(name for name in blocks if name in chosen), cost, score.required_bytes)
                break
    return best


def _by_depth(program: Program, origins: Origins, modules: frozenset[str]) -> Iterator[dict[str, list[FeatureMap]]]:
    """Yields, for each module depth, the feature maps that a checkpoint of each module drops, in call order."""
    places = [place.module for place in origins.places]
    maps = recomputable(program, feature_maps(program, small(program)))
    for depth in range(1, 1 + max((name.count(".") + 1 for name in modules), default=0)):
        blocks = [".".join(path.split(".")[:depth]) for path in places]
        candidates: dict[str, list[FeatureMap]] = {}
        for m in maps:
            block = blocks[m.layer]
            uses = (k for k in program.accesses[m.tensor] if program.kernels[k].phase == "forward")
            if block in modules and all(blocks[k] == block for k in uses):  # else it is a stored output
                candidates.setdefault(block, []).append(m)
        if candidates:
            yield candidates


def _bytes(program: Program, maps: Sequence[FeatureMap]) -> int:
    return sum(program.tensors[m.tensor].nbytes for m in maps)
