"""TENSILE: "TENSILE: A Tensor granularity dynamic GPU memory scheduler method towards multitasking dynamic workloads
system" (Zhang et al., 2021).

Algorithm 3 (``plan_jobs``): find the peaks of all jobs' footprints (Algorithm 2), swap the largest tensor that lies at
one of them unused and whose transfers find their place on the PCIe channel (Algorithm 1), and repeat; once no swap
succeeds, recompute, by MSPS (section 4.4). No kernel waits for a swap scheduled so: where no region is free, the tensor
stays. schedule.py has one job's algorithms, times.py the kernel times that are predicted and corrected (4.3). Choices
and deviations: ../README.md, by their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.heuristics.tensile.schedule import Channel, Schedule, array
from agents.planner import PlannerInfo, RowsPlanner, infeasible, one_of
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import MODES
from simulator.plan import Plan
from simulator.program import Program

__all__ = ["TENSILE", "Channel"]


@dataclass(eq=False)
class TENSILE(RowsPlanner):
    """TENSILE, for one job (``plan``) or several (``plan_jobs``).

    Args:
        mode: swap, recompute or joint.
        max_swap_ratio: share of the tensors that may be swapped, 0 to 1; for several jobs one of each, or one for all.
            The less a job may swap, the higher its priority (section 4.1).
    """

    facts = PlannerInfo(
        "tensile", "TENSILE",
        '"TENSILE: A Tensor granularity dynamic GPU memory scheduler method towards multitasking dynamic workloads '
        'system", 2021',
        family="swap and recompute", slot=2, place=170, moves="joint",
    )  # fmt: skip

    mode: str = one_of(MODES, "joint")
    max_swap_ratio: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ratios = self.max_swap_ratio
        self.ratios = [ratios] if isinstance(ratios, (int, float)) else list(ratios)
        if not self.ratios or not all(0 <= ratio <= 1 for ratio in self.ratios):
            raise ValueError(f"max_swap_ratio: expected numbers from 0 to 1, got {ratios}")

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Algorithm 3; raises Infeasible when neither swaps nor recomputation bring the plan within ``limit``."""
        (plan,) = self.plan_jobs([program], machine, limit)
        return plan

    def plan_jobs(
        self, programs: Sequence[Program], machine: Machine, limit: int,
        sequences: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Plan, ...]:  # fmt: skip
        """Algorithm 3 for jobs that share ``limit`` bytes: a plan of each.

        Args:
            sequences: of each job n + 1 times in ns, when its kernels start and its iteration ends; None: choice 1.

        Raises:
            ValueError: as many ``max_swap_ratio`` as jobs were expected.
            Infeasible: the least that the jobs need together is more than ``limit``.
        """
        ratios = self.ratios * len(programs) if len(self.ratios) == 1 else self.ratios
        if len(ratios) != len(programs):
            raise ValueError(f"max_swap_ratio: expected one for each of {len(programs)} jobs, got {len(ratios)}")
        sequences = sequences or [[t * len(programs) for t in program.start_ns] for program in programs]
        jobs = [
            Schedule(program, machine, Engine(program, machine, limit), self.min_bytes, ratio, starts)
            for program, ratio, starts in zip(programs, ratios, sequences, strict=True)
        ]
        steps = [_swap] if self.mode != "recompute" else []
        steps += [_recompute] if self.mode != "swap" else []
        for step in steps:
            while sum(job.peak for job in jobs) > limit and step(jobs, machine):
                pass
        least = [int(job.engine.residency(array(job.rows)).max()) for job in jobs]
        if sum(least) > limit:
            raise infeasible(self, programs[0], limit, sum(least))
        calls, plans = 0, []
        for job, mine in zip(jobs, least, strict=True):
            left = limit - sum(least) + mine  # what the others leave
            engine = job.engine if left == limit else Engine(job.program, machine, left)
            plans.append(self.finish(engine, array(job.rows)))
            calls += self.simulator_calls
        self.simulator_calls = calls
        return tuple(plans)


def _swap(jobs: list[Schedule], machine: Machine) -> bool:
    """Algorithm 1: schedules the largest tensor of all jobs' peaks that can be; False when there is none."""
    room = machine.host_bytes - sum(job.hosted for job in jobs)
    found = [(job, gap) for job in jobs for gap in job.candidates()]
    for job, gap in sorted(found, key=lambda entry: -entry[0].nbytes(entry[1])):
        free = 1.0 - sum(other.channel.load for other in jobs if other is not job)
        if gap.tensor not in job.swapped and job.nbytes(gap) > room:
            continue
        if job.swap(gap, free):
            return True
    return False


def _recompute(jobs: list[Schedule], machine: Machine) -> bool:
    """Section 4.4: drops the tensor of all jobs' peaks with the largest MSPS; False when none lowers its peak."""
    found = [(cost, i, gap) for i, job in enumerate(jobs) for cost, gap in job.droppable()]
    return any(jobs[i].drop(gap) for _, i, gap in sorted(found, key=lambda entry: entry[0]))
