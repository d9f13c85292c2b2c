"""Several programs on one machine; README.md says in which order to read."""

from simulator.job import Eviction, Job, JobsDeadlock, JobsTimeline, JobTimeline, Stall
from simulator.jobs.compare import alone_ns, without_limit
from simulator.jobs.engine import JobScore, JobsEngine, JobsScore, simulate_jobs
from simulator.jobs.noise import Noise
from simulator.plan_transfer import adapted

__all__ = ["Eviction", "Job", "JobScore", "JobTimeline", "JobsDeadlock", "JobsEngine", "JobsScore", "JobsTimeline",
           "Noise", "Stall", "adapted", "alone_ns", "simulate_jobs", "without_limit"]  # fmt: skip
