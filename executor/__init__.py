"""Everything that touches a framework or a GPU: capture of a training step, and its durations."""

from executor.algorithms import with_algorithms
from executor.capture import Captured, CaptureError, capture, capture_step
from executor.roofline import with_roofline

__all__ = ["CaptureError", "Captured", "capture", "capture_step", "with_algorithms", "with_roofline"]
