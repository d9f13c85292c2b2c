"""How sure the kernel times of ``experiments.plan`` are, which plan that makes the best, and how it is said.

Times are a model's, with its error; or a model's scaled to a measured step (``step_ms=``), whose sum is then sure; or
measured, one by one (``times=measured``, of a program file). Of plans that cost about the same under the times that are
believed, the one is recommended that costs least if kernels are as fast, or as slow, as they may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from agents.search.other_times import DRAWS, OtherTimes, TimesError
from experiments.common import cli
from experiments.plan.answer import Best, Times
from simulator.kernel_times import scaled
from simulator.machine import Machine
from simulator.program import Program

KINDS = ("modelled", "measured")
ROOM = 0.01  # of the ideal time: how much dearer, as is believed, a plan may be that costs less if the times are others
TIE = 1e-4  # of the ideal time
MOST = 1_000_000  # kernels of all the programs whose times are drawn, together
BETTER = "step_ms= makes the sum sure, a profile (executor.calibrate, measure) each of them"


def read(cfg: DictConfig, machine: Machine, captured: bool) -> Times:
    """What ``step_ms=``, ``times=`` and the machine say.

    Args:
        captured: the program is captured, which measures nothing.

    Raises:
        UsageError: a value is of the wrong kind or out of range.
    """
    kind = cli.choice(cfg, "times", KINDS)
    if kind == "measured" and captured:
        raise cli.UsageError("times: those of a capture are modelled; a program file's (program=) can be measured")
    step_ns = None if cfg.step_ms is None else round(cli.number(cfg, "step_ms") * 1e6)
    if step_ns == 0:
        raise cli.UsageError(f"step_ms: expected at least 0.000001, got {cfg.step_ms}")
    if kind == "measured":
        return Times(step_ns, None, "Kernel times are taken as measured, without an error.")
    to = "" if step_ns is None else f", scaled to the step of {step_ns / 1e6:,.1f} ms"
    model = machine.kernel_times
    if model is None:
        why = f"its error is not known, as no kernel was measured on {machine.name}"
        return Times(step_ns, None, f"Kernel times are a roofline's{to}; {why}.")
    error = TimesError(model.error, model.step_error if step_ns is None else 0.0)
    sum_of = f", their sum within {error.step:.0%}; {BETTER}" if step_ns is None else ""
    return Times(step_ns, error, f"Kernel times are modelled{to}: each within about {error.kernel:.0%}{sum_of}.")


def with_step(workload: dict[str, Any] | None, times: Times) -> dict[str, Any] | None:
    """The workload as it is captured with these times."""
    if workload is None or times.step_ns is None:
        return workload
    return {**workload, "iteration_ms": times.step_ns / 1e6}


def lasting(program: Program, times: Times) -> Program:
    """The program of a file with these times.

    Raises:
        UsageError: none of its kernels takes time.
    """
    if times.step_ns is None:
        return program
    try:
        return program.with_durations(scaled([k.duration_ns for k in program.kernels], times.step_ns))
    except ValueError as error:
        raise cli.UsageError(f"step_ms: {error}") from None


def other_times(task: tuple[Program, Machine, int], error: TimesError | None, seed: int = 0) -> OtherTimes | None:
    """What the step of a task may be else; None where that is not known, or sure."""
    draws = min(DRAWS, max(MOST // len(task[0].kernels), 2))
    return None if error is None else OtherTimes(*task, error, draws, seed)


def recommended(families: Sequence[Best], others: OtherTimes | None) -> Best | None:
    """The cheapest plan; of those at most ROOM dearer, the one of the least expected cost; of equal ones that which
    decides least. None where there is no plan."""
    known = [b for b in families if b.plan is not None and b.timeline is not None]
    most = min((b.overhead for b in known), default=0.0) + (ROOM if others is not None else 0.0)

    def rank(best: Best) -> tuple[float, int]:
        assert best.plan is not None
        cost = best.overhead if others is None else others.expected(best.plan)
        return round(min(cost, 1e6) / TIE), len(best.plan.decisions)

    return min((b for b in known if b.overhead <= most + TIE), key=rank, default=None)
