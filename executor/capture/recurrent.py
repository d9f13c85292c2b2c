"""Dispatches recurrent layers to cuDNN's operator for a step that is captured on the CPU.

On CUDA, PyTorch runs LSTM, GRU and RNN as one ``_cudnn_rnn`` for all layers. Its reserve space keeps values of the
forward pass for the backward pass. Without cuDNN each time step is a cell of several operators, as on the CPU without
oneDNN. Not counted: cuDNN's workspace, the masks and the state of dropout between layers, and packing.

Sources: PyTorch's aten/src/ATen/native/cudnn/RNN.cpp, and aten/src/ATen/cudnn/AutocastRNN.cpp, which casts to float16
whatever autocast's dtype is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.library import Library
from torch.utils._pytree import tree_map_only

from executor.capture.operators import bind_arguments
from executor.capture.reach import CaptureError

aten = torch.ops.aten
MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # in the order of cudnnRNNMode_t
LSTM = MODES.index("lstm")
KEPT = (1, 1, 5, 6)  # per mode: values per hidden unit, layer, direction and row in the reserve space


def reserve_bytes(
    mode: int, rows: int, hidden_size: int, output_size: int, layers: int, directions: int, itemsize: int
) -> int:
    """Returns the bytes that cuDNN's reserve space needs at least.

    It holds ``KEPT`` values per hidden unit (an LSTM's four gates and its cell state, six of a GRU, an RNN's
    activation) and the outputs between layers. cuDNN may reserve more, for example for dropout or in other versions.

    Args:
        mode: Index in ``MODES``.
        rows: Time steps times sequences.
        hidden_size: Hidden units per layer and direction.
        output_size: Width of a layer's output per direction: ``hidden_size``, or the size of an LSTM's projection.
        layers: Number of layers.
        directions: 1, or 2 if bidirectional.
        itemsize: Bytes per value.

    Returns:
        The reserve space in bytes.

    Source: sizes that cuDNN returned for an LSTM (736,000,000 bytes) and a GRU (864,000,000), by their parameter counts
    of four layers of 320 units (github.com/pytorch/pytorch/issues/2895). Their ratio is 23 to 27 for any number of
    rows, as 4 * 5 + 3 and 4 * 6 + 3 are. An RNN's size is not published: its activations are counted once.
    """
    return itemsize * rows * directions * (layers * KEPT[mode] * hidden_size + (layers - 1) * output_size)


def register(library: Library) -> None:
    """Makes recurrent layers on CPU tensors dispatch as on a GPU while ``library`` is in use."""
    for mode, name in enumerate(MODES):
        library.impl(f"{name}.input", partial(_layers, mode, getattr(aten, name).input), "AutogradCPU")
    library.impl("_cudnn_rnn", _forward, "Meta", allow_override=True)
    library.impl("_cudnn_rnn_backward", _backward, "Meta")


def _layers(
    mode: int,
    op: OpOverload,
    x: Tensor,
    state: Any,
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Runs all layers, with cuDNN if it is enabled."""
    if not torch.backends.cudnn.enabled or not x.numel():
        with torch.backends.mkldnn.flags(enabled=False):
            arguments = x, state, weights, has_biases, layers, dropout, train, bidirectional, batch_first
            return op._op_dk(DispatchKey.CompositeImplicitAutograd, *arguments)
    if torch.is_autocast_enabled("cpu"):
        x, state, weights = tree_map_only(Tensor, _to_half, (x, state, weights))
    hx, cx = state if mode == LSTM else (state, None)
    hidden_size = hx.shape[2] if cx is None else cx.shape[2]
    is_projected = hidden_size != hx.shape[2]
    result: Any = aten._cudnn_rnn(
        x,
        weights,
        (4 if has_biases else 2) + is_projected,
        None,
        hx,
        cx,
        mode,
        hidden_size,
        hx.shape[2] if is_projected else 0,
        layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        [],
        None,
    )
    return result[:3] if mode == LSTM else result[:2]


def _to_half(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.half()


def _forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Allocates output, states, reserve space and flat weights (empty: the weights are flat already)."""
    bound = bind_arguments(aten._cudnn_rnn.default, args, kwargs)
    x = bound["input"]
    hx = bound["hx"]
    cx = bound["cx"]
    batch_first = bound["batch_first"]
    hidden_size = bound["hidden_size"]
    directions = 2 if bound["bidirectional"] else 1
    output_size = bound["proj_size"] or hidden_size
    length, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    output = x.new_empty(length, batch, directions * output_size)
    nbytes = reserve_bytes(
        bound["mode"], length * batch, hidden_size, output_size, bound["num_layers"], directions, x.element_size()
    )
    return (
        output.transpose(0, 1) if batch_first else output,
        torch.empty_like(hx),
        x.new_empty(0) if cx is None else torch.empty_like(cx),
        x.new_empty(nbytes if bound["train"] else 0, dtype=torch.uint8),
        x.new_empty(0),
    )


def _backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Allocates all gradients; those of the weights are parts of one tensor."""
    bound = bind_arguments(aten._cudnn_rnn_backward.default, args, kwargs)
    if not bound["train"]:
        raise CaptureError(
            f"cuDNN has no backward pass for a layer in eval mode, such as the step's {MODES[bound['mode']]}: call its "
            "train(), or set torch.backends.cudnn.enabled = False"
        )
    x = bound["input"]
    cx = bound["cx"]
    sizes = [weight.numel() for weight in bound["weight"]]
    parts = x.new_empty(sum(sizes)).split(sizes)
    gradients = [part.view(weight.shape) for part, weight in zip(parts, bound["weight"], strict=True)]
    return (
        torch.empty_like(x),
        torch.empty_like(bound["hx"]),
        x.new_empty(0) if cx is None else torch.empty_like(cx),
        gradients,
    )
