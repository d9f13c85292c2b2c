"""Framework and GPU code: capture, kernel durations, replay, training under a plan."""

from executor.capture.algorithms import with_algorithms
from executor.capture.capture import capture, capture_step
from executor.capture.captured import Captured
from executor.capture.durations import with_roofline
from executor.capture.reach import CaptureError
from executor.fit import FitError, FittedStep, FittedSteps, fit, report
from executor.replay import open_backend
from executor.replay.backend import BackendError
from executor.replay.replay import Measured, replay
from executor.replay.streams import ReplayError
from executor.training.planned_step import PlannedStep, StepError
from executor.training.planned_steps import PlannedSteps
from simulator.report import Report

__all__ = [
    "BackendError",
    "CaptureError",
    "Captured",
    "FitError",
    "FittedStep",
    "FittedSteps",
    "Measured",
    "PlannedStep",
    "PlannedSteps",
    "ReplayError",
    "Report",
    "StepError",
    "capture",
    "capture_step",
    "fit",
    "open_backend",
    "replay",
    "report",
    "with_algorithms",
    "with_roofline",
]
