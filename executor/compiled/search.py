"""Searches for the fastest plan of a graph whose peak, as Inductor schedules it, fits.

A plan is made for a limit on the estimated peak. Inductor orders kernels by its own rules, so its peak differs from the
estimate, and it is known only after scheduling, which is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from executor.compiled.joint import Joint
from executor.fit import FitError
from executor.training.issue_order import Order
from simulator.plan import Plan
from simulator.report import size
from simulator.timeline import Timeline


class Candidate(NamedTuple):
    """A plan whose graphs Inductor has not scheduled yet."""

    plan: Plan
    floor_ns: int | None
    timeline: Timeline
    order: Order
    nbytes: int


class Scheduled(NamedTuple):
    """A plan whose graphs Inductor has scheduled, with their peak in bytes."""

    candidate: Candidate
    joint: Joint
    peak_bytes: int


@dataclass
class Search:
    """Re-plans with successively adjusted limits until the scheduled peak is close to ``aim``.

    Attributes:
        plan: Returns a plan for a limit in bytes; raises FitError.
        schedule: Partitions a plan's graphs and schedules them with Inductor.
        aim: Largest peak that fits, in bytes.
        enough: Limit in bytes from which the program needs no plan.
        max_plans, max_schedules: Most plans, and most schedules by Inductor.
        slack: Fraction of ``aim``: the search stops at a plan that leaves less unused.
        tolerance: Fraction of ``aim``: a plan whose estimate exceeds it by less may still fit.
        scheduled, unscheduled: Plans so far, with and without Inductor's schedule.
    """

    plan: Callable[[int], Candidate]
    schedule: Callable[[Candidate], Joint]
    aim: int
    enough: int
    max_plans: int = 6
    max_schedules: int = 4
    slack: float = 0.05
    tolerance: float = 0.01
    scheduled: list[Scheduled] = field(default_factory=list)
    unscheduled: list[Candidate] = field(default_factory=list)

    def run(self) -> tuple[Scheduled | None, str]:
        """Returns the fastest plan that fits and "", or None and the reason."""
        reason = self._explore()
        # What the estimate has ruled out may fit after all.
        rest = sorted(self.unscheduled, key=lambda candidate: candidate.nbytes)
        for candidate in rest[: self.max_schedules - len(self.scheduled)]:
            if self._feasible():
                break
            self._schedule(candidate)
        if feasible := self._feasible():
            return min(feasible, key=lambda entry: entry.candidate.timeline.iteration_ns), ""
        least = min((entry.peak_bytes for entry in self.scheduled), default=None)
        needed = f"as Inductor schedules what was tried, it needs {size(least)}" if least else ""
        # A planner's reason ends with advice.
        return None, f"{reason} ({needed})" if reason and needed else reason or f"{needed}: raise memory="

    def _explore(self) -> str:
        """Plans for one limit after the other; returns the last reason why no plan was found, or ""."""
        aim = self.aim
        limit = aim
        planned_limit = 0  # the last limit with a plan
        estimate_error = 0  # Inductor's peak minus the estimate
        reason = ""
        for _ in range(self.max_plans):
            try:
                candidate = self.plan(limit)
            except FitError as error:
                reason = str(error)
                if not planned_limit or self._feasible() or abs(planned_limit - limit) < self.tolerance * limit:
                    break
                limit = (limit + planned_limit) // 2  # Inductor's peak may be below the estimate
                continue
            planned_limit = limit
            spare = aim - candidate.nbytes - estimate_error
            if limit >= self.enough or -self.tolerance * aim <= spare < self.slack * aim:
                peak_bytes = self._schedule(candidate)
                estimate_error = peak_bytes - candidate.nbytes
                spare = aim - peak_bytes
            else:
                self.unscheduled.append(candidate)
            if limit >= self.enough or len(self.scheduled) == self.max_schedules or 0 <= spare < self.slack * aim:
                break
            # Lower the limit by at least 1 %, or the planner may return the same plan.
            limit += spare if spare >= 0 else min(spare, -aim // 100)
        return reason

    def _schedule(self, candidate: Candidate) -> int:
        """Schedules a plan's graphs with Inductor and returns their peak in bytes."""
        joint = self.schedule(candidate)
        self.scheduled.append(Scheduled(candidate, joint, joint.peak_bytes()))
        return self.scheduled[-1].peak_bytes

    def _feasible(self) -> list[Scheduled]:
        return [entry for entry in self.scheduled if entry.peak_bytes <= self.aim]
