"""Uncertainty of the kernel times of ``experiments.plan``, and the choice of the recommended plan.

Times are modeled, with the model's error; or modeled and scaled to a measured step (``step_ms=``), which removes the
error of their sum; or measured per kernel (``times=measured``, for program files). Among plans of similar cost, the
plan with the lowest expected cost under perturbed times is recommended.
"""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from agents.search.retimed import DRAWS, Retimed, TimesError
from experiments.common import cli
from experiments.plan.answer import Best, Times
from simulator.kernel_times import scaled
from simulator.machine import Machine
from simulator.program import Program

ROOM = 0.01  # fraction of the ideal time: largest extra nominal cost of a plan that is more robust to time errors
TIE = 1e-4  # fraction of the ideal time: costs closer than this are equal


def read(cfg: DictConfig, machine: Machine, captured: bool) -> Times:
    """Returns the kernel times by ``step_ms=``, ``times=`` and the machine.

    Args:
        cfg: settings of the command.
        machine: machine that the times are for.
        captured: whether the program is captured, with modeled times.

    Raises:
        UsageError: a value is of the wrong type or out of range.
    """
    kind = cli.choice(cfg, "times", ("modeled", "measured"))
    if kind == "measured" and captured:
        raise cli.UsageError("times: measured requires a program file (program=); a capture has modeled times")
    step_ns = None if cfg.step_ms is None else round(cli.number(cfg, "step_ms") * 1e6)
    if step_ns == 0:
        raise cli.UsageError(f"step_ms: expected at least 0.000001, got {cfg.step_ms}")
    if kind == "measured":
        return Times(step_ns, None, "Kernel times are taken as exact (times=measured).")
    basis = "" if step_ns is None else f", scaled to the step of {step_ns / 1e6:,.1f} ms"
    model = machine.kernel_times
    if model is None:
        reason = f"its error is unknown: no kernels were measured on {machine.name}"
        return Times(step_ns, None, f"Kernel times come from a roofline model{basis}; {reason}.")
    error = TimesError(model.error, model.step_error if step_ns is None else 0.0)
    sum_error = (
        f", their sum within {error.step:.0%}; step_ms= removes the error of the sum, a profile (executor.calibrate, "
        "measure) that of each kernel"
        if step_ns is None
        else ""
    )
    return Times(step_ns, error, f"Kernel times are modeled{basis}: each within about {error.kernel:.0%}{sum_error}.")


def rescaled(program: Program, times: Times) -> Program:
    """Scales the durations of a program to the measured step, if any.

    Raises:
        UsageError: all kernels have zero duration.
    """
    if times.step_ns is None:
        return program
    try:
        return program.with_durations(scaled([k.duration_ns for k in program.kernels], times.step_ns))
    except ValueError as error:
        raise cli.UsageError(f"step_ms: {error}") from None


def perturbed_times(task: tuple[Program, Machine, int], error: TimesError | None, seed: int = 0) -> Retimed | None:
    """Returns perturbed times of a task's step; None if the error is unknown or zero."""
    draws = min(DRAWS, max(1_000_000 // len(task[0].kernels), 2))  # bounds the number of kernel times drawn
    return None if error is None else Retimed(*task, error, draws, seed)


def recommended(families: Sequence[Best], perturbed: Retimed | None) -> Best | None:
    """Returns the recommended plan, or None if no plan is given.

    Among plans whose overhead is at most ROOM above the lowest, it has the lowest expected cost; ties are broken by the
    number of decisions.
    """
    candidates = [b for b in families if b.plan is not None and b.timeline is not None]
    largest_overhead = min((b.overhead for b in candidates), default=0.0) + (ROOM if perturbed is not None else 0.0)

    def rank(best: Best) -> tuple[float, int]:
        assert best.plan is not None
        cost = best.overhead if perturbed is None else perturbed.expected(best.plan)
        return round(min(cost, 1e6) / TIE), len(best.plan.decisions)

    return min((b for b in candidates if b.overhead <= largest_overhead + TIE), key=rank, default=None)
