"""Steps under a plan in the trainers that people use; extras, each imported with its class.

from executor.integrations import PlannedTrainer      # transformers.Trainer: pip install 'headroom[hf]'
from executor.integrations import PlannedStrategy     # lightning.Trainer(strategy=…): 'headroom[lightning]'
"""

from importlib import import_module
from typing import Any

_WHERE = {"PlannedTrainer": ("hugging_face", "hf"), "PlannedStrategy": ("lightning_strategy", "lightning")}
__all__ = ["PlannedStrategy", "PlannedTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _WHERE[name]
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}: pip install 'headroom[{extra}]'") from error
