"""How sure the kernel times of ``experiments.plan`` are, which plan that makes the best, and how it is said.

Times are a model's, with its error; or a model's scaled to a measured step (``step_ms=``), whose sum is then sure; or
measured, one by one (``times=measured``, of a program file). Of plans that cost about the same under the times that are
believed, the one is recommended that costs least if kernels are as fast, or as slow, as they may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from agents.search.other_times import DRAWS, OtherTimes, Spread, TimesError
from experiments.common import cli
from simulator.kernel_times import scaled
from simulator.machine import Machine
from simulator.program import Program

if TYPE_CHECKING:  # Matplotlib takes long to import
    from experiments.plan.summary import Best

KINDS = ("modelled", "measured")
ROOM = 0.01  # of the ideal time: how much dearer, as is believed, a plan may be that costs less if the times are others
TIE = 1e-4  # of the ideal time
MOST = 1_000_000  # kernels of all the programs whose times are drawn, together
BETTER = "step_ms= makes the sum sure, a profile (executor.calibrate, measure) each of them"


@dataclass(frozen=True)
class Times:
    """What is known of the times.

    Attributes:
        step_ns: a measured step, to which they are scaled; None: there is none.
        error: None: not known, or there is none.
        said: a sentence or two about it.
    """

    step_ns: int | None
    error: TimesError | None
    said: str


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
        return Times(
            step_ns,
            None,
            f"Kernel times are a roofline's{to}; its error is not known, as no kernel was measured on {machine.name}.",
        )
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
    known = [(b, b.plan, b.timeline.overhead) for b in families if b.plan is not None and b.timeline is not None]
    if not known:
        return None
    most = min(said for *_, said in known) + (ROOM if others is not None else 0.0)

    def rank(one: tuple[Any, ...]) -> tuple[float, int]:
        _, plan, said = one
        cost = said if others is None else others.expected(plan)
        return round(min(cost, 1e6) / TIE), len(plan.decisions)

    return min((one for one in known if one[2] <= most + TIE), key=rank)[0]


def ranged(spread: Spread | None) -> str:
    """The range in brackets, for a sentence; "" where it is not known."""
    if spread is None:
        return ""
    return f" ({_percent(spread.least)} to {_percent(spread.most)} within the error of the times)"


def said(spread: Spread, error: TimesError) -> str:
    """What a plan costs under other times, a sentence."""
    parts = [f"{_percent(spread.low)} to {_percent(spread.high)} where single kernels are others"]
    if error.step:
        fast, slow = _percent(spread.fast), _percent(spread.slow)
        parts = [f"{fast} where all kernels are {error.step:.0%} faster", f"{slow} where they are slower", *parts]
    return f"Under other times: {', '.join(parts)} (5th to 95th percentile)."


def percent(part: float) -> str:
    """Formats an overhead with its sign: two decimals below 10 %, else one."""
    return f"{'+' if part >= 0 else '−'}{abs(part):.2%}" if abs(part) < 0.1 else f"{part:+.1%}".replace("-", "−")


def _percent(part: float) -> str:
    return percent(part) if part < float("inf") else "it cannot run"
