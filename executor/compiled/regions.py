"""Finds a model's repeated blocks, which ``compile(regional=True)`` plans and compiles once for all of them.

A region is a set of equal modules that are compiled together, as in PyTorch's regional compilation: blocks of one
``ModuleList`` or ``Sequential``, or a module outside of them, such as an embedding. What the model computes between its
regions runs in eager mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class Region(NamedTuple):
    """Equal modules that are planned and compiled once."""

    name: str
    modules: tuple[nn.Module, ...]


def regions(model: nn.Module) -> tuple[Region, ...]:
    """Returns the regions of a model in the order of its modules.

    Raises:
        ValueError: If no ``ModuleList`` or ``Sequential`` holds equal blocks.
    """
    found = tuple(_regions(model, ""))
    if not any(len(region.modules) > 1 for region in found):
        raise ValueError(
            f"regional: {type(model).__name__} has no ModuleList or Sequential with equal blocks: use regional=False"
        )
    return found


def _regions(module: nn.Module, name: str) -> Iterator[Region]:
    if _has_blocks(module):
        for (kind, *_), blocks in _equal(module).items():
            yield Region(f"{name}.{kind.__name__}".lstrip("."), tuple(blocks))
    elif any(map(_has_blocks, module.modules())) or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child, part in module.named_children():
            yield from _regions(part, f"{name}.{child}".lstrip("."))
    elif any(True for _ in module.parameters()):
        yield Region(name, (module,))


def _has_blocks(module: nn.Module) -> bool:
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    return is_list and any(len(blocks) > 1 for blocks in _equal(module).values())


def _equal(module: nn.Module) -> dict[tuple[type, str], list[nn.Module]]:
    """Returns the children that have parameters, by type and the form of their tensors."""
    groups: dict[tuple[type, str], list[nn.Module]] = {}
    for child in module.children():
        tensors = [*child.named_parameters(), *child.named_buffers()]
        form = str([(name, tuple(x.shape), x.dtype, x.requires_grad) for name, x in tensors])
        if any(True for _ in child.parameters()):
            groups.setdefault((type(child), form), []).append(child)
    return groups
