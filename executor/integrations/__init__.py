"""Planned steps in trainers of other libraries; each class imports its library when first used.

from executor.integrations import PlannedTrainer      # transformers.Trainer: pip install 'headroom[hf]'
"""

from importlib import import_module
from typing import Any

__all__ = ["PlannedTrainer"]


def __getattr__(name: str) -> Any:
    if name != "PlannedTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(f"{__name__}.hugging_face").PlannedTrainer
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}: pip install 'headroom[hf]'") from error
