"""Several programs on one machine; README.md says in which order to read."""

from simulator.jobs.nouns import Eviction, Job, JobsDeadlock, JobsTimeline, JobTimeline, Stall
from simulator.jobs.reference import simulate_jobs

__all__ = ["Eviction", "Job", "JobTimeline", "JobsDeadlock", "JobsTimeline", "Stall", "simulate_jobs"]
