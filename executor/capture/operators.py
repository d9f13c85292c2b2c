"""Reads, writes and costs of ATen operators, derived from their schemas and names, and the places that call them."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tag, Tensor, fx, nn
from torch._dynamo import eval_frame
from torch._ops import OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.autograd import graph
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from simulator.program import KernelKind, Phase
from simulator.report import Place

aten = torch.ops.aten

# Operators that reserve memory and launch nothing.
ALLOCATIONS = frozenset(
    {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.empty_permuted}
)

NUMBER = aten._local_scalar_dense.default  # reads a tensor's number on the host (``item``)


def is_random(node: fx.Node) -> bool:
    """Returns whether a graph node draws random numbers."""
    return isinstance(node.target, OpOverload) and Tag.nondeterministic_seeded in node.target.tags


# First match wins; the strings are parts of operator names.
_KINDS: tuple[tuple[KernelKind, tuple[str, ...]], ...] = (
    ("conv", ("convolution", "conv_depthwise", "slow_conv")),
    ("rnn", ("rnn", "lstm", "gru")),
    ("dropout", ("dropout", "bernoulli")),
    ("pool", ("_pool",)),
    ("norm", ("batch_norm", "layer_norm", "group_norm", "rms_norm", "weight_norm")),
    ("lrn", ("local_response_norm", "cross_map_lrn")),
    ("matmul", ("mm", "linear", "attention", "mv", "dot", "einsum")),
    (
        "activation",
        ("relu", "threshold", "gelu", "silu", "sigmoid", "tanh", "elu", "softplus", "hardswish", "mish", "softmax"),
    ),
    ("copy", ("copy", "clone", "cat", "stack", "constant_pad", "_to_dense")),
    (
        "reduce",
        (
            "sum",
            "mean",
            "amax",
            "amin",
            "argmax",
            "argmin",
            "vector_norm",
            "var",
            "std",
            "prod",
            "nll_loss",
            "mse_loss",
            "bce_loss",
            "binary_cross_entropy",
            "cumsum",
            "logsumexp",
            "any",
            "all",
            "max",
            "min",
        ),
    ),
    ("elementwise", ("fill", "zero", "ones", "full", "where", "_like")),
)


def kind_of(func: OpOverload, phase: Phase) -> KernelKind:
    """Returns the kernel kind of an operator; operators of an optimizer's step are ``optimizer``."""
    if phase == "optimizer":
        return "optimizer"
    name = func._overloadpacket.__name__
    if func._overloadpacket in ALLOCATIONS:
        return "other"
    for kind, parts in _KINDS:
        if kind == "reduce" and torch.Tag.pointwise in func.tags:
            return "elementwise"
        if any(part in name for part in parts):
            return kind
    return "elementwise" if torch.Tag.pointwise in func.tags else "other"


def is_profiler_node(node: fx.Node) -> bool:
    """Returns whether a node only marks a range for PyTorch's profiler, or is a constant used only by such calls."""
    if node.op == "get_attr":
        return all(map(is_profiler_node, node.users))
    return node.op == "call_function" and getattr(node.target, "namespace", "") == "profiler"


def touched_bytes(tensor: Tensor) -> int:
    """Returns the bytes of one pass over a tensor or view; an expanded view is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def arguments(func: OpOverload, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (schema argument, value) for every argument passed."""
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def bind_arguments(func: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a call by their names in the schema."""
    return {argument.name: value for argument, value in arguments(func, args, kwargs)}


def flops_of(func: OpOverload, args: Any, kwargs: Any, out: Any) -> int:
    """Returns the FLOPs of a matrix product, convolution, attention or cuDNN's recurrent operator, and 0 for any other.

    It corrects PyTorch's formulas, which omit the CPU's fused attention and count the half of causal attention that
    kernels skip.
    """
    bound = bind_arguments(func, args, kwargs)
    if func._overloadpacket in (aten._cudnn_rnn, aten._cudnn_rnn_backward):
        rows = prod(bound["input"].shape[:-1])
        passes = 1 if func._overloadpacket is aten._cudnn_rnn else 2
        flops = 2 * passes * rows * sum(weight.numel() for weight in bound["weight"] if weight.dim() == 2)
    elif func._overloadpacket in _CPU_ATTENTION:
        shapes = [bound[name].shape for name in ("grad_out", "query", "key", "value") if name in bound]
        flops = int((sdpa_backward_flop_count if "grad_out" in bound else sdpa_flop_count)(*shapes))
    else:
        formula = flop_registry.get(func._overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=out)) if formula else 0
    return flops // 2 if bound.get("is_causal") else flops


_CPU_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


def mixed_dtypes(func: OpOverload, args: Any, kwargs: Any) -> str:
    """Returns the dtypes that a call mixes although PyTorch's kernels need one, as "float32 and float64", or "".

    Fake tensors do not check them. Normalizations accept half precision beside float32.
    """
    is_norm = func in _ONE_NORM_DTYPE
    if func not in _ONE_DTYPE and not is_norm:
        return ""
    dtypes = {x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dtype.is_floating_point}
    if len(dtypes) < 2 or (is_norm and torch.float64 not in dtypes):
        return ""
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


_ONE_DTYPE = frozenset(
    getattr(aten, name).default
    for name in (
        "mm addmm bmm baddbmm mv addmv dot vdot binary_cross_entropy huber_loss_backward index_add index_add_"
    ).split()
)
_ONE_NORM_DTYPE = frozenset(
    getattr(aten, name).default
    for name in "native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm".split()
)


def written_tensors(func: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensor arguments that the schema declares as written."""
    if not func._schema.is_mutable:
        return []
    return [
        leaf
        for argument, value in arguments(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


def running_statistics(func: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the running mean and variance that a batch-norm forward kernel updates.

    The schemas do not declare these writes. The old content does not affect the other outputs, so the kernel can be
    recomputed if the statistics are set aside.
    """
    name = func._overloadpacket.__name__
    if "batch_norm" not in name or "backward" in name or "stats" in name:
        return []
    bound = bind_arguments(func, args, kwargs)
    if not bound.get("training", bound.get("train", "with_update" in name)):
        return []
    return [bound[key] for key in ("running_mean", "running_var") if isinstance(bound.get(key), Tensor)]


def half_statistics(func: OpOverload, args: Any, kwargs: Any, as_cuda: bool) -> tuple[int, ...]:
    """Returns indices of results that are float32 although their fake CPU tensors are in half precision.

    These are a normalization's statistics for half-precision inputs: on the CPU if weights or running statistics are
    float32, on CUDA always except for group norm.
    """
    name = func._overloadpacket.__name__
    if "backward" in name or not any(f"native_{norm}_norm" in name for norm in ("batch", "layer", "group")):
        return ()
    bound = bind_arguments(func, args, kwargs)
    x = bound["input"]
    parameters = [bound.get(k) for k in ("weight", "bias", "running_mean", "running_var")]
    is_mixed = any(isinstance(v, Tensor) and v.dtype == torch.float32 for v in parameters)
    is_half = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)
    return (1, 2) if is_half and (is_mixed or (as_cuda and "group" not in name)) else ()


def adds_gradients(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Returns whether this ``add`` is autograd's own sum of two gradients in a form that autograd performs in place.

    The first operand must be dense and not a view. The caller has to check that it has no other reference.

    Source: ``can_accumulate_inplace`` in PyTorch's input_buffer.cpp.
    """
    if func is not aten.add.Tensor or kwargs or len(args) != 2 or torch.is_grad_enabled():
        return False
    a, b = args
    if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a._is_view() or not is_non_overlapping_and_dense_or_false(a):
        return False
    # Exclude Python code that the engine calls (custom Functions, hooks); its own threads have no Python frames.
    return caller() in ("_engine_run_backward", "")


def caller() -> str:
    """Returns the name of the innermost Python function outside this package and the dispatch machinery."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else ""


_MACHINERY = (str(Path(__file__).parents[1]), torch._compile.__file__, eval_frame.__file__, _python_dispatch.__file__)


class Places:
    """Determines each operator's place when it is dispatched: the module of the model and the line of the user's code.

    Both are read from Python's stack: the innermost named module, and the innermost frame outside PyTorch, Python's
    library and this package. The autograd engine has no such frames. In a backward pass the sequence number of the
    executing autograd node identifies the forward operator, whose place is used. Checkpoints execute forward code in a
    backward pass, where the frames give the place.

    Args:
        modules: Module paths by module id.
        parameters: Paths of the owning modules by parameter id.
        outside: Name used for operators outside any module.
    """

    def __init__(self, modules: Mapping[int, str], parameters: Mapping[int, str], outside: str) -> None:
        self.modules = modules
        self.parameters = parameters
        self.outside = outside
        self._task = -1  # backward pass of the last operator; -1 if none
        self._parent: dict[int, int] = {}  # backward pass -> backward pass in which its nodes were created
        self._created: dict[int, dict[int, Place]] = {-1: {}}  # per backward pass: sequence number -> place of creation
        self._next = 0  # sequence number of the next node
        self._last = Place(outside, "")

    def locate(self, phase: Phase) -> Place:
        """Returns the source location of the operator being dispatched; must be called once per operator, in order."""
        outer_task = self._task
        self._task = torch._C._current_graph_task_id()
        task = self._task
        if task != -1:
            self._parent.setdefault(task, outer_task)
        module, line = self._walk_stack(task != -1)
        if phase == "optimizer":
            place = Place("optimizer", line)
        elif task == -1:
            place = Place(self.outside if module is None else module, line)
        else:
            place = self._locate_node(task)
            if module is not None:  # of a checkpoint
                place = Place(module, line or place.line)
        # The engine's GPU threads have their own counters, so existing entries are kept.
        created = self._created.setdefault(task, {})
        next_number = torch.autograd._get_sequence_nr()
        for number in range(self._next if self._next <= next_number else next_number - 1, next_number):
            created.setdefault(number, place)
        self._next = next_number
        self._last = place
        return place

    def line(self) -> str:
        """Returns the line of the user's code that is being executed, or ""."""
        return self._walk_stack(False)[1]

    def _walk_stack(self, backward: bool) -> tuple[str | None, str]:
        """Returns the innermost module's path (or None) and the user's line (or ""), within the current engine."""
        module = None
        line = ""
        frame = sys._getframe(3)
        while frame is not None and (module is None or not line):
            code = frame.f_code
            owner = _owner(code.co_filename)
            if owner == "user":
                line = line or f"{_display_name(frame)}:{frame.f_lineno}"
            elif owner == "capture":
                break  # outer frames belong to the caller of the capture
            elif code is _CALL and module is None:
                module = self.modules.get(id(frame.f_locals["self"]))
            elif code is _ENGINE and backward:
                break
            frame = frame.f_back
        return module, line

    def _locate_node(self, task: int) -> Place:
        """Returns the source location of the executing autograd node, or of the last one if none is executing."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._last
        if (variable := getattr(node, "variable", None)) is not None:  # it accumulates a leaf's gradient
            return Place(self.parameters.get(id(variable), self.outside), "")
        number = node._sequence_nr()
        for created in (self._created.get(self._parent[task], {}), *self._created.values()):
            if number in created:
                return created[number]
        return self._last


def _display_name(frame: FrameType) -> str:
    """Returns a frame's file relative to its package's parent ("transformers/models/…"), or a script's name."""
    file = frame.f_code.co_filename.rpartition("/")[2]
    packages = str(frame.f_globals.get("__package__") or "").split(".")
    return "/".join([*filter(None, packages), file])


def is_user_file(file: str) -> bool:
    """Returns whether this file is the user's own code."""
    return _owner(file) == "user"


@functools.cache
def _owner(file: str) -> str:
    here = Path(__file__)
    if file == str(here.with_name("capture.py")):
        return "capture"
    library = sysconfig.get_paths()["stdlib"] + "/"
    is_library = file.startswith(library) and not any(part in file for part in ("site-packages", "dist-packages"))
    known = f"{Path(torch.__file__).parent}/", f"{here.parents[1]}/"
    return "known" if is_library or file.startswith(known) or "<" in file else "user"


_CALL = nn.Module._call_impl.__code__
_ENGINE = graph._engine_run_backward.__code__
