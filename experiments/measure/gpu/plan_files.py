"""Plans made before a GPU is lent: files beside the programs that an earlier run profiled.

A folder holds NAME-program.json.gz and NAME-FRACTION-FORM-INDEX.json. A plan uses ``LINK_MARGIN`` of the link, so that
slower copies cost no time. A CUDA graph packs its tensors and needs a little more than its plan's limit, so several
plans for less than the limit exist, in the order in which they are tried.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from executor import CaptureError
from executor.capture.captured import Captured
from executor.capture.profile import shape_of, with_profile
from executor.capture.profiler import measure
from executor.fit import LINK_MARGIN
from experiments.measure.networks import get_planner, limit_of
from simulator import Machine, Plan, Program

Form = Literal["graph", "kernels"]
AIMS: dict[Form, tuple[float, ...]] = {"graph": (0.97, 0.94, 0.88), "kernels": (1.0,)}
ITERATIONS = 50  # of annealing: 10 s of a processor for GPT-2


@dataclass(frozen=True)
class Prepared:
    """A captured step with its program's durations and the plans to try, mildest first.

    Attributes:
        captured: the captured step on the program that the plans are for.
        plans: plans in descending order of planned bytes.
        planned_here: why the plan files were not used; "" if they were.
    """

    captured: Captured
    plans: tuple[Plan, ...]
    planned_here: str


def program_file(folder: Path, name: str) -> Path:
    """Returns the path of a network's program."""
    return folder / f"{name}-program.json.gz"


def plan_file(folder: Path, name: str, fraction: float, form: Form, index: int) -> Path:
    """Returns the path of a plan; ``index`` is the position in AIMS."""
    return folder / f"{name}-{fraction}-{form}-{index}.json"


def make_plan(program: Program, machine: Machine, limit: int) -> Plan:
    """Plans a step within ``limit`` bytes for a part of the link."""
    return get_planner("annealing", program, iterations=ITERATIONS).plan(program, machine.with_link(LINK_MARGIN), limit)


def write_plans(folder: Path, name: str, fraction: float, program: Program, machine: Machine) -> float:
    """Writes the program and its plans; returns the CPU seconds of planning."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.process_time()
    program.save(program_file(folder, name))
    for form, aims in AIMS.items():
        for i, aim in enumerate(aims):
            plan = make_plan(program, machine, int(aim * limit_of(program, fraction)))
            plan.save(plan_file(folder, name, fraction, form, i))
    return time.process_time() - begin


def load_plans(folder: Path, name: str, fraction: float, forms: Iterable[Form]) -> tuple[Program, tuple[Plan, ...]]:
    """Returns a network's program and its plans for these forms.

    Raises:
        CaptureError: a file is missing, or a plan is for another program.
    """
    file = program_file(folder, name)
    if not file.exists():
        raise CaptureError(f"{file.name}: no such program; write it with `make gpu ARGS=plans`")
    program = Program.load(file)
    plans = []
    for form in forms:
        for i in range(len(AIMS[form])):
            path = plan_file(folder, name, fraction, form, i)
            if not path.exists():
                raise CaptureError(f"{path.name}: no such plan; write it with `make gpu ARGS=plans`")
            plan = Plan.load(path)
            if plan.fingerprint != program.fingerprint:
                raise CaptureError(
                    f"{path.name}: the plan is for program {plan.fingerprint[:12]}, {file.name} is "
                    f"{program.fingerprint[:12]}; write both again with `make gpu ARGS=plans`"
                )
            plans.append(plan)
    return program, tuple(plans)


def prepare(
    captured: Captured, folder: Path, name: str, fraction: float, form: Form, device: str, machine: Machine
) -> Prepared:
    """Returns a captured step with its plans from files; profiles and plans it here if they are for another step.

    Planning here takes one short profile and one plan, of which a section's time limit is the bound.

    Args:
        captured: step to run.
        folder: folder of the program and plan files.
        name: network name in the names of the files.
        fraction: limit as a fraction of the activation peak.
        form: whether the step runs as a CUDA graph.
        device: device of a profile made here.
        machine: machine to plan for.

    Raises:
        CaptureError: a file is missing, or the captured step has other kernels than the program of the files.
    """
    try:
        program, plans = load_plans(folder, name, fraction, (form,))
        if shape_of(captured.program).fingerprint != shape_of(program).fingerprint:
            raise CaptureError(
                f"{name}: the step captured here differs from {program_file(folder, name).name}; write it again with "
                "`make gpu ARGS=plans`"
            )
        return Prepared(replace(captured, program=program), plans, "")
    except CaptureError as error:
        profile = measure(captured, device, machine.name, 1, cache="cold" if device == "cuda" else "hot")
        program = with_profile(captured.program, profile)
        aims = AIMS[form][1:] or AIMS[form]  # the second aim of a graph is most likely to pack
        plan = make_plan(program, machine, int(aims[0] * limit_of(program, fraction)))
        return Prepared(replace(captured, program=program), (plan,), str(error))
