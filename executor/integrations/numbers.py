"""What a captured step and a trainer's Python say to each other beside the loss."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from executor.capture.python_values import names_of
from executor.capture.reach import CaptureError

PLACES = 64


class Numbers(nn.Module):
    """Numbers that a step computes and its loop wants to know (a norm, a metric), one after the other in one tensor.

    What is written while the step is captured is written by each step, and read afterwards. float64 has all values of
    the smaller types of floating point, and integers below 2**53.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.zeros(PLACES, dtype=torch.float64, device=device))
        self._places: dict[str, tuple[int, torch.dtype]] = {}

    def write(self, name: str, value: Tensor) -> None:
        """``value`` has one element; raises CaptureError where there are too many numbers."""
        place = self._places.get(name, (len(self._places),))[0]
        if place == PLACES:
            raise CaptureError(f"the step tells more than {PLACES} numbers, the last of them {name!r}")
        self._places[name] = place, value.dtype
        with torch.no_grad():
            self.numbers[place].copy_(value.detach().reshape(()))

    def read(self, name: str) -> Tensor:
        """What the last step wrote; a scalar of the type that was written."""
        place, dtype = self._places[name]
        return self.numbers[place].to(dtype)


class Named(dict[str, Any]):
    """The entries of a table that some code names, as a table: a capture finds the tensors, modules and numbers there
    that the code reads, and nothing else of an object that holds everything."""

    def __init__(self, table: dict[str, Any], names: set[str]) -> None:
        super().__init__({name: table[name] for name in table.keys() & names})
        self._table = table

    def __getitem__(self, name: str) -> Any:
        return self._table[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._table[name] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._table.update(*args, **kwargs)


def reached(owner: type, start: str) -> tuple[list[FunctionType], set[str]]:
    """Returns the functions that a method of a user's class runs, itself and those that it names, without those of
    transformers; and all attribute names in their code."""
    functions: list[FunctionType] = []
    names, ahead = set[str](), [start]
    while ahead:
        method = inspect.getattr_static(owner, ahead.pop(), None)
        method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
        method = inspect.unwrap(method) if callable(method) else method
        if isinstance(method, FunctionType) and method not in functions:
            if method.__module__.partition(".")[0] != "transformers":
                functions.append(method)
            elif functions or names:
                continue
            found = names_of(method.__code__)
            names, ahead = names | found, [*ahead, *found]
    return functions, names
