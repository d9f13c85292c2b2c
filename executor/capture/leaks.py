"""Finds tensors of a trace in objects that the walk of the step's objects (reach.py) has not reached."""

from __future__ import annotations

import gc
import sys
from collections import deque
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef


def remove_fakes(storages: set[int]) -> str:
    """Takes fake tensors out of the lists and tables that hold them.

    Args:
        storages: addresses of storages (``StorageWeakRef.cdata``) that outlive the trace.

    Returns:
        A sentence that names a holder; "" if nothing holds one.
    """
    fakes = [x for x in gc.get_objects() if issubclass(type(x), FakeTensor)]
    held = [x for x in fakes if StorageWeakRef(x.untyped_storage()).cdata in storages]
    if not held:
        return ""
    tables = [vars(module) for module in list(sys.modules.values())]
    named = [(name, value) for table in tables for name, value in list(table.items())]
    ours = {id(fakes), id(held)}
    # Objects of before gc.freeze() are no referrers.
    holders = [(name, value) for name, value in named if type(value) in (list, dict, deque)]
    holders += [(f"a {type(x).__name__}", x) for t in held for x in gc.get_referrers(t) if type(x) in (list, dict)]
    names = [name for name, holder in holders if id(holder) not in ours and _remove(holder, held)]
    where = names[0] if names else "an object"
    way = "pass it as an argument, or make it an attribute of the model"
    return f"the step leaves a tensor in {where}, which nothing of the step names: {way}"


def _remove(holder: Any, tensors: list[Tensor]) -> bool:
    """Removes tensors from a container; was there one?"""
    ids = {id(t) for t in tensors}
    if isinstance(holder, dict):
        keys = [key for key, value in holder.items() if id(value) in ids]
        for key in keys:
            del holder[key]
        return bool(keys)
    kept = [x for x in holder if id(x) not in ids]
    found = len(kept) < len(holder)
    if found:
        holder.clear()
        holder.extend(kept)
    return found
