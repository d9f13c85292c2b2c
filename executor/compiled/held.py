"""Counts the tensors that a training step holds beside what one of its compiled graphs allocates.

These are parameters, buffers, optimizer state, the graph's inputs, and tensors of the step's other graphs. Graphs are
compiled in the order of their forward passes, and their backward passes run in the opposite order: while a graph runs,
earlier ones hold what they saved, and later ones, in its backward pass, the gradients of their parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, fx, nn, zeros
from torch.optim import Optimizer

from executor.capture.capture import capture
from executor.capture.captured import Captured
from executor.compiled.launches import sizes


class _Inputs(NamedTuple):
    """Bytes of the inputs of a graph."""

    parameters: int = 0
    trained: int = 0  # those of the parameters that have gradients
    others: int = 0  # neither parameters nor buffers
    shapes: tuple[tuple[int, ...], ...] = ()  # of these


class Update(NamedTuple):
    """Memory of an optimizer's update in bytes."""

    state: int  # between steps
    temporary: int  # at most at once
    per_byte: float = 0.0  # ``temporary`` per byte of the largest parameter

    @classmethod
    def of(cls, captured: Captured) -> Update:
        """Returns the memory of a captured update."""
        program = captured.program
        changes = [0] * (len(program.kernels) + 1)
        for tensor, accesses in zip(program.tensors, program.accesses, strict=True):
            if not tensor.persistent and program.kernels[accesses[0]].phase == "optimizer":
                changes[accesses[0]] += tensor.nbytes
                changes[accesses[-1] + 1] -= tensor.nbytes
        state = sum(t.nbytes for t in program.tensors if t.kind == "optimizer_state")
        temporary = max(accumulate(changes))
        largest = max(t.nbytes for t in program.tensors if t.kind == "parameter")
        return cls(state, temporary, temporary / largest)


class _Sum(nn.Module):
    """Model with any parameters whose gradients need no other memory.

    Args:
        model: The model that the optimizer may know beside the parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.parts = nn.ParameterList(parameters)

    def forward(self, loss: Tensor) -> Tensor:
        for part in self.parts:
            loss = loss + part.sum()
        return loss


class Held:
    """Bytes that a step holds, by kind of tensor, and by the graphs compiled so far.

    Args:
        model: A module, or a function, whose parameters are those that its first graph reads.
        optimizer: None: no state counts.

    Attributes:
        update: Memory of the optimizer's ordinary update.
        inputs: Those of the graph that is compiled now.

    Raises:
        CaptureError: If the update cannot be traced.
    """

    def __init__(self, model: Any = None, optimizer: Optimizer | None = None) -> None:
        self.model = model if isinstance(model, nn.Module) else nn.Module()
        self.update = Update(0, 0) if optimizer is None else Update.of(captured_update(self.model, optimizer))
        self.inputs = _Inputs()
        self._trained: dict[str, int] = {}  # frame -> bytes of its parameters that have gradients
        self._saved: dict[str, int] = {}  # frame -> bytes between its forward and its backward

    def add_inputs(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Records the inputs of the graph that is compiled next."""
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        tensors = [(name, x) for name, x in zip(names, inputs, strict=True) if isinstance(x, Tensor)]
        parameters = [x for _, x in tensors if isinstance(x, nn.Parameter)]
        others = [x for name, x in tensors if not isinstance(x, nn.Parameter) and "_buffers_" not in name]
        trained = [p for p in parameters if p.requires_grad]
        self.inputs = _Inputs(
            _nbytes(parameters), _nbytes(trained), _nbytes(others), tuple(sizes(x.size()) for x in others)
        )

    def beside(self, frame: str, copies: int = 1) -> dict[str, int]:
        """Returns the bytes beside the allocations of the graph that is compiled now, by kind of tensor."""
        trained = _nbytes(p for p in self.model.parameters() if p.requires_grad)
        counted = self.inputs.trained * copies + sum(n for other, n in self._trained.items() if other != frame)
        found = {
            "parameter": _nbytes(self.model.parameters()) or self.inputs.parameters,
            "buffer": _nbytes(self.model.buffers()),
            "optimizer_state": self.update.state,
            "input": self.inputs.others,
            "gradient": max(0, trained - counted),
            "activation": sum(n for other, n in self._saved.items() if other != frame),
        }
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}

    def in_update(self) -> int:
        """Returns the bytes of gradients and temporary tensors during the optimizer's ordinary update."""
        trained = _nbytes(p for p in self.model.parameters() if p.requires_grad) or self.inputs.trained
        return trained + self.update.temporary

    def add(self, frame: str, saved: int, copies: int = 1) -> None:
        """Records the bytes that the copies of a graph hold while later graphs run."""
        self._saved[frame] = saved * copies
        self._trained[frame] = self.inputs.trained * copies


def captured_update(
    model: nn.Module, optimizer: Optimizer, bucket_bytes: int | None = None, early: bool = False
) -> Captured:
    """Captures an optimizer's update with a model that only adds up its parameters; raises CaptureError.

    Args:
        bucket_bytes: As in ``capture``.
        early: Whether to refuse an update that cannot be made parameter by parameter.

    Returns:
        The capture of the update.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    start = zeros((), device=parameters[0].device)
    return capture(
        _Sum(parameters, model),
        None,
        optimizer,
        (start,),
        check=False,
        bucket_bytes=bucket_bytes,
        optimizer_in_backward=early,
    )


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the storages of tensors."""
    storages = (t.untyped_storage() for t in tensors)
    return sum(sizes({s._cdata: s.nbytes() for s in storages}.values()))
