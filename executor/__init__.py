"""Everything that touches a framework or a GPU: capture, durations, replay, training under a plan."""

from executor.algorithms import with_algorithms
from executor.backend import BackendError, open_backend
from executor.capture import Captured, CaptureError, capture, capture_step
from executor.replay import Measured, replay
from executor.roofline import with_roofline
from executor.streams import ReplayError
from executor.train import PlannedStep, StepError

__all__ = ["BackendError", "CaptureError", "Captured", "Measured", "PlannedStep", "ReplayError", "StepError", "capture",
           "capture_step", "open_backend", "replay", "with_algorithms", "with_roofline"]  # fmt: skip
