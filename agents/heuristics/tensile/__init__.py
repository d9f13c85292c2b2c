"""TENSILE, for one job or for several jobs on one GPU.

Algorithm 3 (``plan_jobs``): find the peaks of all jobs' footprints (Algorithm 2), swap the largest tensor that is idle
at one of them and whose transfers fit on the PCIe channel (Algorithm 1), and repeat; once no swap succeeds, recompute,
by MSPS (section 4.4). No kernel waits for a swap scheduled this way: a tensor without a free region stays. schedule.py
has one job's algorithms; times.py predicts and corrects kernel times (4.3). Numbered choices and deviations:
README.md.

Source: "TENSILE: A Tensor granularity dynamic GPU memory scheduler method towards multitasking dynamic workloads
system" (Zhang et al., 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.heuristics.tensile.schedule import Schedule, array
from agents.planner import PlannerInfo, RowsPlanner, infeasible, one_of
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import MODES
from simulator.plan import Plan
from simulator.program import Program

__all__ = ["TENSILE"]


@dataclass(eq=False)
class TENSILE(RowsPlanner):
    """TENSILE, for one job (``plan``) or several (``plan_jobs``).

    Args:
        mode: swap, recompute or joint.
        max_swap_ratio: fraction of the tensors that may be swapped, 0 to 1; for several jobs one per job, or one for
            all. The lower a job's ratio, the higher its priority (section 4.1).
    """

    facts = PlannerInfo(
        "tensile",
        "TENSILE",
        (
            '"TENSILE: A Tensor granularity dynamic GPU memory scheduler method towards multitasking dynamic workloads '
            'system", 2021'
        ),
        family="swap and recompute",
        slot=2,
        place=170,
    )

    mode: str = one_of(MODES, "joint")
    max_swap_ratio: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ratios = self.max_swap_ratio
        self.ratios = [ratios] if isinstance(ratios, (int, float)) else list(ratios)
        if not self.ratios or not all(0 <= ratio <= 1 for ratio in self.ratios):
            raise ValueError(f"max_swap_ratio: expected numbers from 0 to 1, got {ratios}")

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Plans by Algorithm 3; raises Infeasible if swaps and recomputation do not reach ``limit``."""
        (plan,) = self.plan_jobs([program], machine, limit)
        return plan

    def plan_jobs(
        self,
        programs: Sequence[Program],
        machine: Machine,
        limit: int,
        sequences: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Plan, ...]:
        """Plans jobs that share ``limit`` bytes by Algorithm 3; returns one plan per job.

        Args:
            programs: the jobs.
            machine: machine that they share.
            limit: memory limit in bytes for all jobs.
            sequences: per job n + 1 times in ns, when its kernels start and its iteration ends; None: choice 1.

        Raises:
            ValueError: the number of ``max_swap_ratio`` values differs from the number of jobs.
            Infeasible: the minimum that the jobs need together exceeds ``limit``.
        """
        ratios = self.ratios * len(programs) if len(self.ratios) == 1 else self.ratios
        if len(ratios) != len(programs):
            raise ValueError(f"max_swap_ratio: expected one for each of {len(programs)} jobs, got {len(ratios)}")
        sequences = sequences or [[t * len(programs) for t in program.start_ns] for program in programs]
        jobs = [
            Schedule(Engine(program, machine, limit), self.min_bytes, ratio, starts)
            for program, ratio, starts in zip(programs, ratios, sequences, strict=True)
        ]
        steps = [_swap] if self.mode != "recompute" else []
        steps += [_recompute] if self.mode != "swap" else []
        for step in steps:
            while sum(job.peak for job in jobs) > limit and step(jobs, machine):
                pass
        needs = [int(job.engine.residency(array(job.rows)).max()) for job in jobs]
        if sum(needs) > limit:
            raise infeasible(self, programs[0], limit, sum(needs))
        calls = 0
        plans = []
        for job, need in zip(jobs, needs, strict=True):
            job_limit = limit - sum(needs) + need  # memory left by the other jobs
            engine = job.engine if job_limit == limit else Engine(job.program, machine, job_limit)
            plans.append(self.finish(engine, array(job.rows)))
            calls += self.simulator_calls
        self.simulator_calls = calls
        return tuple(plans)


def _swap(jobs: list[Schedule], machine: Machine) -> bool:
    """Schedules the largest swappable tensor of all jobs' peaks (Algorithm 1); returns False if none fits."""
    room = machine.host_bytes - sum(job.host_bytes for job in jobs)
    candidates = [(job, gap) for job in jobs for gap in job.candidates()]
    for job, gap in sorted(candidates, key=lambda entry: -entry[0].nbytes(entry[1])):
        free = 1.0 - sum(other.channel.load for other in jobs if other is not job)
        if gap.tensor not in job.swapped and job.nbytes(gap) > room:
            continue
        if job.swap(gap, free):
            return True
    return False


def _recompute(jobs: list[Schedule], machine: Machine) -> bool:
    """Drops the peak tensor with the largest MSPS of all jobs (section 4.4); returns False if none lowers its peak."""
    candidates = [(cost, i, gap) for i, job in enumerate(jobs) for cost, gap in job.droppable()]
    return any(jobs[i].drop(gap) for _, i, gap in sorted(candidates, key=lambda entry: entry[0]))
