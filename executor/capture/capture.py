"""Capture: one training step of a real model becomes a Program, and the graph that runs it.

The step (forward, loss, backward, optimizer) is traced once by ``make_fx`` over fake tensors: nothing of the model's
size is ever allocated and nothing of the user's is changed. Parameters, buffers, optimizer state and the batch are the
graph's placeholders, hence persistent tensors. One storage is one tensor; nodes that only make views are no kernels.

Lifetimes are eager PyTorch's, not the graph's: the recorder, a dispatch mode above the tracer, looks before every
operator for storages that died since the last. Where eager holds a tensor past its last use in the graph, a
zero-duration ``marker`` kernel reads it. Details, and what a trace shows differently: executor/capture/README.md.
Known differences from eager:

1. cuDNN's fused kernels and workspaces are not seen from CPU operators (algorithms.py can model the workspaces).
2. ``foreach`` and ``fused`` optimizers are captured as their single-tensor form.
3. A parameter that gets a gradient but belongs to no optimizer loses the gradient at the end of the step.
4. Python branches are taken as they fall during the trace; an optimizer's numbers are read at each step (numbers.py).
5. Optimizers that branch on a number read from a tensor (RAdam, ASGD) are captured in their ``capturable`` form.
"""

from __future__ import annotations

import operator
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tag, Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.proxy_tensor import autograd_would_have_decomposed, get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from executor.capture.algorithms import convolution_of, with_algorithms
from executor.capture.operators import (
    ALLOCATIONS,
    adds_gradients,
    caller,
    flops_of,
    kind_of,
    mutated,
    running_statistics,
    touched_bytes,
)
from executor.capture.numbers import Numbers, Option
from executor.capture.roofline import with_roofline
from executor.capture.state import Entry, Home, StepState, capturable, fixed, options, takes_capturable, untouched
from simulator.machine import Machine
from simulator.program import Kernel, Phase, Program, Tensor as Storage, TensorKind


class CaptureError(ValueError):
    """A step cannot be captured; the message is one sentence naming the cause."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A program and the graph it came from.

    ``graph`` takes the placeholders' tensors in order and returns ``outputs`` (the step's tensors, flat);
    run on real tensors it does exactly the step, in-place updates of the state included.
    """

    program: Program
    graph: fx.GraphModule
    nodes: tuple[tuple[fx.Node, ...], ...]  # per kernel: its operator and the getitems of it; () for a marker
    values: dict[fx.Node, int]  # node whose value is one tensor -> index in program.tensors
    placeholders: tuple[fx.Node, ...]
    names: tuple[str, ...]  # per placeholder, e.g. "features.0.weight", "optimizer.features.0.weight.momentum_buffer"
    sources: tuple[Tensor | None, ...]  # per placeholder: the user's tensor; None: state not created yet
    homes: tuple[Home | None, ...]  # per placeholder: where the step finds its tensor; None for its arguments
    devices: tuple[torch.device, ...]  # per placeholder
    outputs: tuple[fx.Node, ...]
    spec: TreeSpec  # of the step's arguments
    leaves: tuple[Any, ...]  # those, flat; a tensor's placeholder stands for it
    settings: tuple[tuple[Optimizer, tuple[dict[str, Any], ...]], ...]  # per optimizer and group: what cannot change
    numbers: Numbers  # of the optimizers' options: what may change
    modules: tuple[tuple[nn.Module, bool, tuple[nn.Module | None, ...]], ...]  # whether it trains, its submodules

    def on(
        self, machine: Machine, dtype: str = "float32", iteration_ns: int | None = None, algorithms: bool = False
    ) -> Captured:
        """The same capture with durations for another machine (see ``with_roofline``).

        Args:
            algorithms: convolutions have the workspace of their fastest algorithm, and the others as variants (see
                ``with_algorithms``); without it they have neither.
        """
        found = {k: convolution_of(nodes[0]) for k, nodes in enumerate(self.nodes) if nodes and algorithms}
        known = {k: convolution for k, convolution in found.items() if convolution is not None}
        program = with_roofline(self.program, machine, dtype, iteration_ns)
        return replace(self, program=with_algorithms(program, known, machine, dtype))


def capture(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Optimizer | None,
    example_batch: tuple[Any, Any],
    *,
    machine: Machine | None = None,
    name: str | None = None,
    algorithms: bool = False,
) -> Captured:
    """Captures ``loss_fn(model(x), y)``, its backward pass, the optimizer's step and ``zero_grad``.

    Gradients die at the end of the step (``set_to_none=True``). The model may live on the meta device;
    it is then captured as a CPU model.

    Args:
        optimizer: None for a step without gradients: ``loss_fn(model(x), y)`` is all of it.
        example_batch: ``(x, y)``; only shapes and dtypes matter.
        machine: whose roofline gives the kernels' durations; gtx1080ti when not given.
        algorithms: give convolutions workspaces and variants, as in ``Captured.on``.

    Raises:
        CaptureError: the step cannot be traced.
    """
    if not isinstance(example_batch, (tuple, list)) or len(example_batch) != 2:
        raise CaptureError("example_batch is not a pair (x, y); capture_step takes a step of any form")
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer | None) or not callable(loss_fn):
        raise CaptureError("capture takes a torch.nn.Module, a callable loss, an Optimizer or None, and a batch")

    def step(x: Any, y: Any) -> Tensor:
        loss = loss_fn(model(x), y)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise CaptureError(f"the loss is {what}, not a tensor of one element")
        if optimizer is not None:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    roots = [(model, ""), (loss_fn, "loss_fn"), (optimizer, "optimizer")]
    return _capture(step, tuple(example_batch), roots, machine, name or type(model).__name__, algorithms)


def capture_step(
    step: Callable[..., Any], *args: Any, machine: Machine | None = None, name: str | None = None,
    algorithms: bool = False,
) -> Captured:  # fmt: skip
    """Captures one call ``step(*args)`` of any callable.

    Modules, optimizers and tensors that ``step`` reaches (closure, globals it names, ``self``) are found
    and become persistent, like the tensors in ``args``.

    Raises:
        CaptureError: the step cannot be traced, or returns something other than tensors.
    """
    roots = [(step, ""), (args, "")]
    label = name or getattr(step, "__qualname__", type(step).__name__)
    return _capture(step, args, roots, machine, str(label), algorithms)


def _capture(
    step: Callable[..., Any], args: tuple[Any, ...], roots: list[tuple[Any, str]], machine: Machine | None, name: str,
    algorithms: bool, as_capturable: bool = False,
) -> Captured:  # fmt: skip
    # Sizes are those of the example; only numbers that an optimizer reads may be symbols.
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=False), static_shapes=True)
    assert mode.shape_env is not None
    state, numbers = StepState(mode, as_capturable), Numbers(mode.shape_env)
    recorder = _Recorder()
    returned: list[Tensor] = []

    def traced(*flat: Tensor) -> tuple[Tensor, ...]:
        # `flat` are the entries' fake tensors themselves; the step reaches them through its own objects.
        recorder.begin(flat)
        with recorder:
            result = step(*batch)
        leaves = tree_leaves(result)
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise CaptureError(f"the step returns {_article(type(leaf).__name__)}, not tensors")
        returned.extend(leaf for leaf in leaves if leaf is not None)
        recorder.reap()
        return tuple(returned)

    try:
        with untouched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for value, label in roots:
                state.add(value, label)
            leaves, spec = tree_flatten(args)
            inputs = [
                state.fake(v, f"input{i}" if len(leaves) > 1 else "input", "input") if isinstance(v, Tensor) else v
                for i, v in enumerate(leaves)
            ]
            batch = tree_unflatten(inputs, spec)
            groups = {o: tuple(map(options, o.param_groups)) for o in state.optimizers}
            modules = tuple((m, m.training, tuple(m._modules.values())) for m in state.modules)
            place = {id(e.fake): i for i, e in enumerate(state.entries)}
            flat = [(place[id(v)], None) if isinstance(v, Tensor) else (None, v) for v in inputs]
            del leaves, inputs
            with state.installed(), capturable_optimizers(recorder, numbers, groups):
                fakes = [e.fake for e in state.entries]
                with mode:
                    graph = make_fx(traced, tracing_mode="real")(*fakes)
    except CaptureError:
        raise
    except Exception as error:
        if isinstance(error, GuardOnDataDependentSymNode) and state.optimizers and not as_capturable:
            return _capture(step, args, roots, machine, name, algorithms, as_capturable=True)
        raise CaptureError(_sentence(error)) from error
    if not recorder.ops:
        raise CaptureError("the step runs no tensor operation")
    numbers.close({node.target for node in graph.graph.nodes if isinstance(node.target, Option)})
    captured = recorder.build(graph, state.entries, name, (spec, flat), numbers)
    settings = tuple((o, tuple(map(fixed, was))) for o, was in groups.items())
    captured = replace(captured, settings=settings, modules=modules)
    return captured.on(machine or Machine.load("gtx1080ti"), algorithms=algorithms)


@contextmanager
def capturable_optimizers(
    recorder: _Recorder, numbers: Numbers, groups: dict[Optimizer, tuple[dict[str, Any], ...]]
) -> Iterator[None]:
    """Tells the recorder when an optimizer's step runs, in the form that it is to be captured in."""
    stack: list[ExitStack] = []

    def enter(optimizer: Optimizer, *_: Any) -> None:
        context = ExitStack()
        context.enter_context(capturable(takes_capturable(optimizer)))
        if optimizer in groups:
            context.enter_context(numbers.symbolic(optimizer, groups[optimizer]))
        stack.append(context)
        recorder.stepping = True

    def leave(*_: Any) -> None:
        stack.pop().close()
        recorder.stepping = False

    hooks = [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while stack:  # the step raised
            stack.pop().close()


@dataclass(slots=True)
class _Op:
    """One operator as dispatched; storages by number."""

    func: OpOverload
    phase: Phase
    nodes: list[fx.Node]
    reads: list[int]
    writes: list[int]
    flops: int
    bytes: int
    sums: tuple[int, int] | None  # storages of two gradients that autograd adds
    launches: bool  # False: a view or a no-op


class _Recorder(TorchDispatchMode):
    """Sits above the tracer: sees every operator, numbers storages, and sees them die."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []
        self.values: dict[fx.Node, int] = {}
        self.nbytes: list[int] = []
        self.death: dict[int, int] = {}  # storage -> operators dispatched before it was found dead
        self.persistent: set[int] = set()
        self.constants: dict[int, str] = {}  # real tensors that no placeholder stands for
        self.stepping = False  # an optimizer's step is running
        self._index: dict[StorageWeakRef, int] = {}
        self._live: dict[int, StorageWeakRef] = {}
        self._backward_seen = False

    def begin(self, placeholders: tuple[Tensor, ...]) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        self.graph: fx.Graph = mode.tracer.graph
        for node, tensor in zip(list(self.graph.nodes), placeholders, strict=True):
            self.values[node] = self._storage(tensor)
        self.persistent = set(self._live)
        self._live.clear()

    def reap(self) -> None:
        """Notes the storages that died since the last operator."""
        for s in [s for s, reference in self._live.items() if reference.expired()]:
            self.death[s] = len(self.ops)
            del self._live[s]

    def _storage(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        if key not in self._index:
            self._index[key] = len(self.nbytes)
            self._live[len(self.nbytes)] = key
            self.nbytes.append(storage.nbytes())
        return self._index[key]

    def _read(self, tensor: Tensor) -> int:
        known = len(self.nbytes)
        s = self._storage(tensor)
        if s == known:  # read before any write
            self.constants[s] = f"constant{len(self.constants)}"
            self.persistent.add(s)
            del self._live[s]
        return s

    def _phase(self, func: OpOverload) -> Phase:
        root_gradient = func is torch.ops.aten.ones_like.default and caller() == "_make_grads"
        if torch._C._current_graph_task_id() != -1 or root_gradient:
            self._backward_seen = True
            return "backward"
        if self.stepping or (self._backward_seen and not torch.is_grad_enabled()):
            return "optimizer"
        return "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if autograd_would_have_decomposed(func, tree_leaves((args, kwargs))):
            with self:  # what the tracer would do below, where its operators could not be seen
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if func is torch.ops.aten._local_scalar_dense.default and not self.stepping:
            raise DataDependentOutputException(func)
        self.reap()
        phase = self._phase(func)
        # A constant that the host makes is not on the device until it is copied there.
        hosted = func._overloadpacket in (torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy)
        tensors = [] if hosted else [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        reads = [self._read(x) for x in tensors]
        sums = (reads[0], reads[1]) if phase == "backward" and adds_gradients(func, args, kwargs) else None
        before = len(self.graph.nodes)
        out = func(*args, **kwargs)
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        statistics = [self._storage(x) for x in running_statistics(func, args, kwargs)]
        reads = [s for s in reads if s not in statistics]
        writes = [self._storage(x) for x in mutated(func, args, kwargs) + outs] + statistics
        nodes = []
        for node in self._new_nodes(before):
            node.meta.pop("val", None)  # an alias, which would keep the storage alive
            if node.op == "call_function":
                nodes.append(node)
                value = out[node.args[1]] if node.target is operator.getitem else out
                if isinstance(value, Tensor):
                    self.values[node] = self._storage(value)
        launched = nodes[0].target if nodes and isinstance(nodes[0].target, OpOverload) else func
        moved = 0 if func._overloadpacket in ALLOCATIONS else sum(map(touched_bytes, tensors + outs))
        view = Tag.inplace_view in func.tags or (not func._schema.is_mutable and set(writes) <= set(reads))
        self.ops.append(
            _Op(launched, phase, nodes, list(dict.fromkeys(reads)), list(dict.fromkeys(writes)),
                flops_of(func, args, kwargs, out), moved, sums,
                not view and any(self.nbytes[s] for s in reads + writes))
        )  # fmt: skip
        return out

    def _new_nodes(self, before: int) -> list[fx.Node]:
        count = len(self.graph.nodes) - before
        return list(islice(reversed(self.graph.nodes), count))[::-1]

    def build(
        self, graph: fx.GraphModule, entries: list[Entry], name: str, batch: tuple[TreeSpec, list[tuple[Any, Any]]],
        numbers: Numbers,
    ) -> Captured:  # fmt: skip
        """The program of what was recorded."""
        self._add_in_place()
        ops = [op for op in self.ops if op.launches]
        last: dict[int, int] = {}  # storage -> its last kernel, markers not counted
        for k, op in enumerate(ops):
            last.update(dict.fromkeys(op.reads + op.writes, k))
        done = [0]  # operators dispatched -> kernels among them
        for op in self.ops:
            done.append(done[-1] + op.launches)
        held: dict[int, list[int]] = {}  # number of kernels done -> storages that eager holds until then
        for s, k in last.items():
            if s not in self.persistent:
                until = done[self.death.get(s, len(self.ops))]
                if until > k + 1:
                    held.setdefault(until, []).append(s)

        tensors, index = self._tensors(ops, last, entries)
        kernels: list[Kernel] = []
        nodes: list[tuple[fx.Node, ...]] = []
        for k in range(len(ops) + 1):
            if k in held:
                phase = ops[k - 1].phase
                read = tuple(sorted(index[s] for s in held[k]))
                kernels.append(Kernel("marker", "other", phase, read, (), 0, recomputable=False))
                nodes.append(())
            if k < len(ops):
                op = ops[k]
                reads, writes = (tuple(index[s] for s in side if s in index) for side in (op.reads, op.writes))
                twice = not any(tensors[t].persistent and t in reads for t in writes)
                kernels.append(Kernel(str(op.func), kind_of(op.func, op.phase), op.phase, reads, writes, 0,
                                      flops=op.flops, bytes=op.bytes, recomputable=twice))  # fmt: skip
                nodes.append(tuple(op.nodes))
        placeholders = tuple(n for n in graph.graph.nodes if n.op == "placeholder")
        (returned,) = next(n for n in graph.graph.nodes if n.op == "output").args
        return Captured(
            Program(name, tuple(tensors), tuple(kernels)), graph, tuple(nodes),
            {node: index[s] for node, s in self.values.items() if s in index}, placeholders,
            tuple(e.name for e in entries), tuple(e.real for e in entries), tuple(e.home for e in entries),
            tuple(e.fake.device for e in entries), tuple(returned), batch[0],
            tuple(v if i is None else placeholders[i] for i, v in batch[1]), (), numbers, (),
        )  # fmt: skip

    def _add_in_place(self) -> None:
        """Autograd's sums, done in the operand that dies with the sum, as eager does them."""
        alias: dict[int, int] = {}

        def root(s: int) -> int:
            while s in alias:
                s = alias[s]
            return s

        for i, op in enumerate(self.ops):
            if op.sums is None or op.sums[0] == op.sums[1]:
                continue
            reused, total = op.sums[0], op.writes[0]
            if reused in self.persistent or self.death.get(reused) != i + 1:
                continue  # something else holds it
            op.nodes[0].target = op.func = torch.ops.aten.add_.Tensor
            alias[total] = reused
        for total in alias:  # the storage lives as long as its last sum; no entry: to the end
            if total not in self.death:
                self.death.pop(root(total), None)
            elif root(total) in self.death:
                self.death[root(total)] = max(self.death[root(total)], self.death[total])
        for op in self.ops:
            op.reads = list(dict.fromkeys(map(root, op.reads)))
            op.writes = list(dict.fromkeys(map(root, op.writes)))
        self.values = {node: root(s) for node, s in self.values.items()}

    def _tensors(
        self, ops: list[_Op], last: dict[int, int], entries: list[Entry]
    ) -> tuple[list[Storage], dict[int, int]]:
        """The program's tensors and storage -> position: persistent ones first, the others by birth."""
        tensors: list[Storage] = []
        index: dict[int, int] = {}
        for entry, s in zip(entries, self.values.values(), strict=False):
            made_in_vain = entry.real is None and s not in last  # state of a parameter that gets no gradient
            if s not in index and not made_in_vain:
                index[s] = len(tensors)
                tensors.append(Storage(entry.name, self.nbytes[s], entry.kind, True))
        for s, label in self.constants.items():
            if s in last:
                index[s] = len(tensors)
                tensors.append(Storage(label, self.nbytes[s], "buffer", True))
        names: dict[int, str] = {}
        for node, s in self.values.items():
            names.setdefault(s, node.name)
        for op in ops:
            for s in op.writes:
                if s not in index:
                    index[s] = len(tensors)
                    kind: TensorKind = "activation" if op.phase == "forward" else "gradient"
                    tensors.append(Storage(names.get(s, f"storage{s}"), self.nbytes[s], kind, False))
        return tensors, index


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def _sentence(error: Exception) -> str:
    """What stopped the trace, and where in the user's code."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE)) and "<" not in file:
            where = f" ({Path(file).name}:{line})"
    text = " ".join(str(error).split())
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        return f"the step's Python depends on the values of a tensor: {str(error.args[0]).splitlines()[0]}{where}"
    if isinstance(error, DynamicOutputShapeException):
        return f"the shape of a result depends on the values of a tensor: {error.args[0]}{where}"
    if "convert all Tensors to FakeTensors" in text:
        return f"the step uses a tensor that is not in its arguments, modules, optimizers or closure{where}"
    return f"the step cannot be traced: {type(error).__name__}: {text[:300]}{where}"


_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parents[1])
