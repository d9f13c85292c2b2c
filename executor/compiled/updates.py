"""Puts the optimizer's update into the compiled backward pass: each parameter is updated once its gradient is final.

A hook on the parameters could not do this: autograd receives all gradients of a compiled graph at once, after its
backward. Instead ``headroom::update`` is a call of the backward graph, which takes a gradient and runs the optimizer
for its parameter alone, as eager mode would. The gradient dies with it and never reaches ``p.grad``.
"""

from __future__ import annotations

import itertools
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from executor.capture.optimizers import step_without_hooks
from executor.compiled.launches import TEMPORARY, is_view

LIBRARY = torch.library.Library("headroom", "DEF")
LIBRARY.define("update(Tensor grad, Tensor(a!)[] parameter, int key) -> ()")
UPDATE = torch.ops.headroom.update.default

_UPDATES: weakref.WeakValueDictionary[int, Updates] = weakref.WeakValueDictionary()
_KEYS = itertools.count()


class Updates:
    """The updates of an optimizer's parameters, one parameter at a time.

    Args:
        optimizer: Its update must be separable (``with_early_update`` checks this).
        temporary: Temporary bytes of an update per byte of its parameter.
    """

    def __init__(self, optimizer: Optimizer, temporary: float) -> None:
        _register_lowering()
        self.optimizer = optimizer
        self.temporary = temporary
        self.groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self.parameters: dict[int, nn.Parameter] = {}  # key in the graph -> parameter
        self._keys: dict[int, int] = {}

    def __deepcopy__(self, memo: Any) -> Updates:
        return self

    def key_of(self, parameter: nn.Parameter) -> int | None:
        """Returns the key of a parameter in graphs; None if the optimizer does not update it."""
        if id(parameter) not in self.groups:
            return None
        if id(parameter) not in self._keys:
            key = next(_KEYS)
            self._keys[id(parameter)] = key
            self.parameters[key] = parameter
            _UPDATES[key] = self
        return self._keys[id(parameter)]

    def run(self, key: int, grad: Tensor) -> None:
        """Applies ``optimizer.step()`` to the parameter with this key alone, with ``grad`` as its gradient."""
        parameter = self.parameters[key]
        group = self.groups[id(parameter)]
        groups, members = self.optimizer.param_groups, group["params"]
        parameter.grad = grad
        try:
            group["params"] = [parameter]
            self.optimizer.param_groups = [group]
            step_without_hooks(self.optimizer)
        finally:
            group["params"] = members
            self.optimizer.param_groups = groups
            parameter.grad = None


def _run(grad: Tensor, parameter: list[Tensor], key: int) -> None:
    _UPDATES[key].run(key, grad)


LIBRARY.impl("update", _run, "CompositeExplicitAutograd")
torch.library.register_fake("headroom::update", lambda grad, parameter, key: None, lib=LIBRARY)


@cache
def _register_lowering() -> None:
    """Makes Inductor compute inlined readers of a parameter before its update, not after it as of other calls."""
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    call = fallback_handler(UPDATE, add_to_fallback_set=False)

    @register_lowering(UPDATE, type_promotion_kind=None)  # type: ignore[untyped-decorator,unused-ignore]
    def _(grad: Any, parameter: list[Any], key: int) -> Any:
        for alias in parameter:
            V.graph.mark_buffer_mutated(alias.get_name())
        return call(grad, parameter, key)


def updated_early(
    forward: fx.GraphModule, backward: fx.GraphModule, parameters: list[int | None], temporary: float
) -> None:
    """Makes a backward graph update parameters in place of returning their gradients.

    Args:
        forward: Forward graph, of which input i is the parameter of gradient i.
        backward: Backward graph, which is modified.
        parameters: Key of the parameter of each gradient that the graph returns, or None.
        temporary: As in ``Updates``.

    Each update follows the last reader of its parameter, and directly the writer of its gradient if that is later.
    """
    graph = backward.graph
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    position = {node: i for i, node in enumerate(graph.nodes)}
    inputs = graph.find_nodes(op="placeholder")
    primals = forward.graph.find_nodes(op="placeholder")
    returned = [x for x in results if isinstance(x, fx.Node)]
    for i, (key, grad) in enumerate(zip(parameters, results, strict=True)):
        if key is None or not isinstance(grad, fx.Node) or returned.count(grad) > 1:
            continue
        memory = _memory(primals[i])
        aliases = [x for x in inputs if _memory(x) == memory]
        last = max((grad, inputs[-1], *(x for a in aliases for x in readers(a))), key=position.__getitem__)
        with graph.inserting_after(last):
            node = graph.create_node("call_function", UPDATE, (grad, aliases, key), name=f"update_{primals[i].name}")
        node.meta |= {"val": None, "partitioner_tag": "must_be_in_backward"}
        node.meta[TEMPORARY] = int(temporary * primals[i].meta["val"].nbytes)
        position[node] = position[last]
        results[i] = None
    graph.output_node().args = (tuple(results),)
    backward.recompile()


def _memory(node: fx.Node) -> int | None:
    """Returns the address of a tensor's storage, None of a symbolic size."""
    value = node.meta.get("val")
    return StorageWeakRef(value.untyped_storage()).cdata if isinstance(value, Tensor) else None


def readers(parameter: fx.Node) -> list[fx.Node]:
    """Returns the operators that read a parameter or a view of it, with updates."""
    found: list[fx.Node] = []
    stack = [parameter]
    while stack:
        for user in stack.pop().users:
            if user.op == "call_function":
                found.append(user)
                stack += [user] if is_view(user) else []
    return found
