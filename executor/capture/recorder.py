"""Records the operators of a trace and the lifetimes of storages, and builds the program from them.

The recorder is a dispatch mode above the tracer. Lifetimes are those of eager PyTorch, not those of the graph
(executor/capture/README.md). Calls that are not operators but concern it (optimizer steps, ``zero_grad``, GradScaler,
random states) are intercepted by ``traced_calls``.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tag, Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import (
    autograd_would_have_decomposed,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.capture.batches import tensors_in
from executor.capture.captured import Captured, HostRead, MicroBatch, UserHolds, evaluate_number
from executor.capture.durations import Precision
from executor.capture.effects import remove_fakes
from executor.capture.operators import (
    ALLOCATIONS,
    NUMBER,
    Places,
    adds_gradients,
    caller,
    flops_of,
    half_statistics,
    kind_of,
    mixed_dtypes,
    running_statistics,
    touched_bytes,
    written_tensors,
)
from executor.capture.optimizers import Numbers
from executor.capture.reach import CaptureError
from executor.capture.state import Entry
from simulator.program import Kernel, Phase, Program, Tensor as Storage, TensorKind
from simulator.report import Place

T = TypeVar("T")
_watchers: list[Callable[[int], None]] = []


@contextmanager
def watched(watcher: Callable[[int], None]) -> Iterator[None]:
    """Calls ``watcher`` before every operator of the captures in this context, with the number of operators so far.

    An exception that it raises ends the capture.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def report_outputs(result: T) -> T:
    """Reports a model's result to the active recorder, without keeping it alive, and returns it."""
    for mode in _python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, Recorder):
            mode.record_outputs(tensors_in(result))
    return result


@dataclass(slots=True)
class _Op:
    """One operator as dispatched, with storages by number."""

    func: OpOverload
    phase: Phase
    place: Place
    nodes: list[fx.Node]
    reads: list[int]
    writes: list[int]
    flops: int
    bytes: int
    sums: tuple[int, int] | None  # storages of two gradients that autograd adds
    optional: bool  # part of an update that a GradScaler may skip
    launches: bool  # False: a view or a no-op


class Recorder(TorchDispatchMode):
    """Dispatch mode that records a trace; executor/capture/README.md explains the design."""

    def __init__(self, numbers: Numbers, as_cuda: bool = False) -> None:
        super().__init__()
        self.numbers = numbers
        self.as_cuda = as_cuda
        self._widened: set[int] = set()  # storages in float32 whose fakes are in half precision
        self.ops: list[_Op] = []
        self.values: dict[fx.Node, int] = {}
        self.nbytes: list[int] = []
        self.death: dict[int, int] = {}  # storage -> operators dispatched before it was found dead
        self.persistent: set[int] = set()
        self.constants: dict[int, str] = {}  # real tensors without a placeholder
        self.gradients: dict[int, int] = {}  # storage of a gradient -> storage of its parameter
        self.is_stepping = False  # an optimizer's step is running
        self.skip_flags: set[fx.Node] = set()
        self.last_draw = self.draw_index = -1  # operator that drew last; operator after whose draws the state is now
        self.draws: dict[int, int] = {}  # operator -> operator after whose draws it starts, if not the last one
        self.reads: list[HostRead] = []
        self.batch: dict[fx.Node, Tensor] = {}  # placeholders of the step's arguments -> the example's tensors
        self.micro: list[tuple[int, fx.Node, int, bool]] = []  # ends of micro-batches (MicroBatch)
        self.outputs: tuple[int, list[int]] = (0, [])  # operators when the model returned, storages of its result
        self.zero_grad_index = -1  # number of operators at the last zero_grad call; -1 if none
        self._optional = self._is_reading_flag = False
        self._index: dict[StorageWeakRef, int] = {}
        self._live: dict[int, StorageWeakRef] = {}
        self._backward_seen = False

    def begin(self, placeholders: tuple[Tensor, ...], places: Places, batch: Mapping[int, Tensor]) -> None:
        """Starts a trace.

        Args:
            placeholders: Fake tensors of the graph's placeholders.
            places: Source locations of operators.
            batch: id of a fake input -> the example batch's tensor.
        """
        self.places = places
        mode = get_proxy_mode()
        assert mode is not None
        self.graph: fx.Graph = mode.tracer.graph
        for node, tensor in zip(list(self.graph.nodes), placeholders, strict=True):
            self.values[node] = self._storage(tensor)
            if id(tensor) in batch:
                self.batch[node] = batch[id(tensor)]
        self.persistent = set(self._live)
        self._live.clear()

    def reap(self) -> None:
        """Records the storages that died since the last operator."""
        expired = torch.UntypedStorage._expired  # StorageWeakRef.expired without its overhead
        for s in [s for s, reference in self._live.items() if expired(reference.cdata)]:
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
        storage_count = len(self.nbytes)
        s = self._storage(tensor)
        if s == storage_count:  # read before any write
            self.constants[s] = f"constant{len(self.constants)}"
            self.persistent.add(s)
            del self._live[s]
        return s

    def _touched(self, tensor: Tensor) -> int:
        """Returns ``touched_bytes`` of the real tensor that a fake tensor represents."""
        return touched_bytes(tensor) << (self._storage(tensor) in self._widened)

    def _phase(self, func: OpOverload) -> Phase:
        root_gradient = func is torch.ops.aten.ones_like.default and caller() == "_make_grads"
        if torch._C._current_graph_task_id() != -1 or root_gradient:
            self._backward_seen = True
            return "backward"
        if self.is_stepping or (self._backward_seen and not torch.is_grad_enabled()):
            return "optimizer"
        return "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            fake = args[0]
            # The modes below would return the same after several more calls.
            if isinstance(fake, FakeTensor) and not fake.fake_mode.in_kernel_invocation:
                return fake.fake_device
            return func(*args, **kwargs)
        for watcher in _watchers:
            watcher(len(self.ops))
        if autograd_would_have_decomposed(func, tree_leaves((args, kwargs))):
            with self:  # decompose here: below this mode the tracer's operators would be invisible
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if func is NUMBER and not (self.is_stepping or self._is_reading_flag):
            return self._read_number(args[0])
        if func is torch.ops.aten.set_.source_Storage:
            raise CaptureError(
                "the step makes a tensor of a whole storage, as cuDNN does of an RNN's weights, and no program has "
                "such: torch.backends.cudnn.enabled = False captures an RNN"
            )
        self.reap()
        phase = self._phase(func)
        place = self.places.locate(phase)
        if dtypes := mixed_dtypes(func, args, kwargs):
            source = place.line or place.module
            where = f" ({source})" if source else ""
            raise CaptureError(
                f"{func} does not take tensors of {dtypes} together{where}: convert the batch to the model's type "
                "(x.float()), or the model to the batch's (model.double())"
            )
        # A host constant is not on the device until it is copied there.
        is_host_constant = func._overloadpacket in (torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy)
        tensors = [] if is_host_constant else [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        reads = [self._read(x) for x in tensors]
        sums = (reads[0], reads[1]) if phase == "backward" and adds_gradients(func, args, kwargs) else None
        before = len(self.graph.nodes)
        out = func(*args, **kwargs)
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        widened = half_statistics(func, args, kwargs, self.as_cuda)
        for i in widened:  # the fake ones are half as large
            self._widened.add(s := self._storage(out[i]))
            self.nbytes[s] *= 2
        statistics = [self._storage(x) for x in running_statistics(func, args, kwargs)]
        reads = [s for s in reads if s not in statistics]
        writes = [self._storage(x) for x in written_tensors(func, args, kwargs) + outs] + statistics
        nodes = []
        values: dict[fx.Node, Any] = {}
        for node in list(islice(reversed(self.graph.nodes), len(self.graph.nodes) - before))[::-1]:
            node.meta.pop("val", None)  # an alias, which would keep the storage alive
            if node.op == "call_function":
                nodes.append(node)
                is_item = node.target is operator.getitem
                value = values.get(node.args[0], out)[node.args[1]] if is_item else out
                values[node] = value
                if isinstance(value, Tensor):
                    self.values[node] = self._storage(value)
                if is_item and node.args[1] in widened:
                    node.meta["tensor_meta"] = node.meta["tensor_meta"]._replace(dtype=torch.float32)
        if isinstance(out, (list, tuple)) and nodes:
            nodes[0].meta["items"] = len(out)
        if func._overloadpacket.__name__.startswith("_fused_") and self.is_stepping and nodes:
            self.numbers.connect(nodes[0], args[0][0])
        if self._is_reading_flag:
            self.skip_flags.update(node for node in nodes if node.target is NUMBER)
        if Tag.nondeterministic_seeded in func.tags:
            if self.draw_index != self.last_draw:
                self.draws[len(self.ops)] = self.draw_index
            self.last_draw = self.draw_index = len(self.ops)
        launched = nodes[0].target if nodes and isinstance(nodes[0].target, OpOverload) else func
        # An in-place update returns the tensors that it writes, except foreach and fused updates.
        updated = [] if outs else written_tensors(func, args, kwargs)
        touched = [] if func._overloadpacket in ALLOCATIONS else tensors + outs + updated
        is_view = Tag.inplace_view in func.tags or (not func._schema.is_mutable and set(writes) <= set(reads))
        self.ops.append(
            _Op(
                launched,
                phase,
                place,
                nodes,
                list(dict.fromkeys(reads)),
                list(dict.fromkeys(writes)),
                flops_of(func, args, kwargs, out),
                sum(map(self._touched, touched)),
                sums,
                self._optional,
                not is_view and any(self.nbytes[s] for s in reads + writes),
            )
        )
        return out

    def is_used(self, tensor: Tensor) -> bool:
        """Returns whether an operator has read or written the tensor."""
        s = self._storage(tensor)
        return any(s in op.reads or s in op.writes for op in self.ops)

    def remove_leaks(self) -> str:
        """Removes the trace's tensors from containers that are not reachable from the step.

        Returns:
            A sentence that names such a container, or "".
        """
        self.reap()
        if self._live:
            gc.collect()
            self.reap()
        leaked = {reference.cdata for reference in self._live.values()}
        return remove_fakes(leaked) if leaked else ""

    def _read_number(self, tensor: Tensor) -> Any:
        """Returns the number that the step's Python code reads, which may depend only on the batch and constants."""
        mode = get_proxy_mode()
        assert mode is not None
        needed = {self._storage(tensor)}
        producers = list[_Op]()
        for op in reversed(self.ops):
            if needed & {*op.writes}:
                needed.update(op.reads)
                producers.append(op)
        nodes = [node for op in reversed(producers) for node in op.nodes]
        batch_inputs = {node: real for node, real in self.batch.items() if self.values[node] in needed}
        other_inputs = needed & self.persistent - {self.values[node] for node in batch_inputs}
        is_random = any(Tag.nondeterministic_seeded in op.func.tags for op in producers)
        if torch.is_anomaly_enabled():
            raise CaptureError(
                "anomaly detection reads every gradient on the host: turn it off for what is planned "
                "(torch.autograd.set_detect_anomaly)"
            )
        if other_inputs or is_random or any(real.device.type == "meta" for real in batch_inputs.values()):
            raise DataDependentOutputException(NUMBER)
        last = get_proxy_slot(tensor, mode.tracer).proxy.node
        nodes = nodes[: nodes.index(last) + 1] if last in nodes else [last]  # a tensor of the batch itself
        inputs = {n for node in nodes for n in node.all_input_nodes if n.op == "get_attr"}
        constants = {node: getattr(mode.tracer.root, str(node.target)) for node in inputs}
        with disable_proxy_modes_tracing(), unset_fake_temporarily(), _python_dispatch._disable_current_modes():
            value = evaluate_number(nodes, {**constants, **batch_inputs})
        if batch_inputs:
            self.reads.append(HostRead(tuple(nodes), constants, value, self.places.line()))
        return value

    def record_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Records the current gradients of these parameters."""
        for p in parameters:
            storage = None if p.grad is None else self._index.get(StorageWeakRef(p.grad.untyped_storage()))
            if storage is not None:
                self.gradients[storage] = self._storage(p)

    def record_outputs(self, outputs: Iterable[Tensor]) -> None:
        """Records the tensors of the model's result."""
        self.outputs = len(self.ops), [self._storage(x) for x in outputs]

    @contextmanager
    def optional(self, skipped: Tensor) -> Iterator[None]:
        """Marks operators in this context as skipped if ``skipped`` is nonzero when the graph executes.

        Raises:
            CaptureError: If several optimizer steps of the step use a GradScaler.
        """
        if self.skip_flags:
            raise CaptureError(
                "the step has several steps of optimizers with a GradScaler, and only one is supported: give all "
                "parameters to one optimizer, or train in bfloat16 without a scaler"
            )
        self._is_reading_flag = True
        skipped.item()
        self._is_reading_flag = False
        self._optional = True
        try:
            yield
        finally:
            self._optional = False

    def end_micro_batch(self, loss: Tensor) -> None:
        """Records the end of a micro-batch and its contribution ``loss`` to the step's loss."""
        s = self._storage(loss)
        node = next(node for node, storage in reversed(self.values.items()) if storage == s)
        self.micro.append((len(self.ops), node, self.draw_index, self.draw_index != self.last_draw))

    def build(self, graph: fx.GraphModule, entries: list[Entry], name: str, leaves: list[Any], **rest: Any) -> Captured:
        """Builds the program and the rest of the capture from the recorded operators.

        Args:
            leaves: The step's arguments, flat; fake tensors of placeholders for tensors.
            rest: Fields of the capture that the operators do not determine.
            graph: Traced graph.
            entries: Persistent tensors.
            name: Name of the program.

        Returns:
            The capture.
        """
        self._add_in_place()
        ops = [op for op in self.ops if op.launches]
        last: dict[int, int] = {}  # storage -> its last kernel, markers not counted
        for k, op in enumerate(ops):
            last.update(dict.fromkeys(op.reads + op.writes, k))
        done = [0]  # operators dispatched -> kernels among them
        for op in self.ops:
            done.append(done[-1] + op.launches)
        held_until: dict[int, list[int]] = {}  # number of kernels done -> storages that eager holds until then
        (outputs,) = graph.graph.output_node().args
        # A planned step leaves no gradient in ``p.grad`` unless it is an output, so each ends at its last use.
        released = self.gradients.keys() - {self.values[node] for node in outputs if node in self.values}
        for s, k in last.items():
            if s not in self.persistent and s not in released:
                until = done[self.death.get(s, len(self.ops))]
                if until > k + 1:
                    held_until.setdefault(until, []).append(s)

        tensors, index = self._tensors(ops, last, entries)
        owners = self._owners(ops, index, entries)
        kernels: list[Kernel] = []
        places: list[Place] = []
        nodes: list[tuple[fx.Node, ...]] = []
        launched: list[int] = []  # kernels of ``ops``
        left_out: set[int] = set()
        for k in range(len(ops) + 1):
            # Storages that no kernel has written are empty.
            if k in held_until and (read := tuple(sorted(index[s] for s in held_until[k] if s in index))):
                phase = ops[k - 1].phase
                place = ops[k - 1].place
                kernels.append(Kernel("marker", "other", phase, read, (), 0, recomputable=False, module=place.module))
                places.append(place)
                nodes.append(())
            if k < len(ops):
                op = ops[k]
                reads, writes = (tuple(index[s] for s in side if s in index) for side in (op.reads, op.writes))
                is_recomputable = not any(tensors[t].persistent and t in reads for t in writes)
                kernels.append(
                    Kernel(
                        str(op.func),
                        kind_of(op.func, op.phase),
                        op.phase,
                        reads,
                        writes,
                        0,
                        flops=op.flops,
                        bytes=op.bytes,
                        recomputable=is_recomputable,
                        module=op.place.module,
                    )
                )
                places.append(op.place)
                launched.append(len(nodes))
                if op.optional:
                    left_out.add(len(nodes))
                nodes.append(tuple(op.nodes))
        kernel_of = dict(zip((i for i, op in enumerate(self.ops) if op.launches), launched, strict=True))
        draws = {kernel_of[i]: kernel_of.get(j, -1) for i, j in self.draws.items()}
        if self.draw_index != self.last_draw:
            draws[len(kernels)] = kernel_of.get(self.draw_index, -1)

        launched.append(len(kernels))

        def after(count: int) -> int:
            """Returns the first kernel after ``count`` operators."""
            return launched[done[count]]

        def step_tensors(storages: Iterable[int]) -> tuple[int, ...]:
            """Returns the tensors of these storages that live within a step."""
            return tuple(sorted({index[s] for s in storages if s in index and not tensors[index[s]].persistent}))

        placeholders = dict(zip((id(e.fake) for e in entries), graph.graph.find_nodes(op="placeholder"), strict=True))
        return Captured(
            program=Program(name, tuple(tensors), tuple(kernels)),
            graph=graph,
            nodes=tuple(nodes),
            values={node: index[s] for node, s in self.values.items() if s in index},
            placeholders=tuple(placeholders.values()),
            names=tuple(e.name for e in entries),
            sources=tuple(e.real for e in entries),
            homes=[e.home for e in entries],
            devices=tuple(e.fake.device for e in entries),
            outputs=tuple(outputs),
            leaves=tuple(placeholders.get(id(leaf), leaf) for leaf in leaves),
            numbers=self.numbers,
            skip_flags=frozenset(self.skip_flags),
            skippable=frozenset(left_out),
            draws=draws,
            places=tuple(places),
            owners=owners,
            precision=Precision.from_flags(),
            micro=tuple(MicroBatch(after(n), loss, kernel_of.get(i, -1), b) for n, loss, i, b in self.micro),
            holds=UserHolds(
                step_tensors(self.outputs[1]),
                after(self.outputs[0]),
                step_tensors(self.gradients),
                -1 if self.zero_grad_index < 0 else after(self.zero_grad_index),
            ),
            reads=tuple(self.reads),
            **rest,
        )

    def _add_in_place(self) -> None:
        """Turns autograd's gradient sums into in-place adds if the operand dies with the sum, as in eager mode."""
        alias: dict[int, int] = {}

        def root(s: int) -> int:
            while s in alias:
                s = alias[s]
            return s

        for i, op in enumerate(self.ops):
            if op.sums is None or op.sums[0] == op.sums[1]:
                continue
            reused = op.sums[0]
            total = op.writes[0]
            if reused in self.persistent or self.death.get(reused) != i + 1:
                continue  # something else holds it
            op.nodes[0].target = op.func = torch.ops.aten.add_.Tensor
            alias[total] = reused
        for total in alias:  # the storage lives as long as its last sum (to the end if that has no death)
            if total not in self.death:
                self.death.pop(root(total), None)
            elif root(total) in self.death:
                self.death[root(total)] = max(self.death[root(total)], self.death[total])
        for op in self.ops:
            op.reads = list(dict.fromkeys(map(root, op.reads)))
            op.writes = list(dict.fromkeys(map(root, op.writes)))
        self.values = {node: root(s) for node, s in self.values.items()}
        self.gradients = {root(s): p for s, p in self.gradients.items()}

    def _tensors(
        self, ops: list[_Op], last: dict[int, int], entries: list[Entry]
    ) -> tuple[list[Storage], dict[int, int]]:
        """Returns the program's tensors (persistent first, then by birth) and their index by storage."""
        tensors: list[Storage] = []
        index: dict[int, int] = {}
        for entry, s in zip(entries, self.values.values(), strict=False):
            # State of a parameter without a gradient, or a reachable tensor that the step does not use.
            unused = (entry.real is None or not entry.registered) and s not in last
            if s not in index and not unused:
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

    def _owners(self, ops: list[_Op], index: dict[int, int], entries: list[Entry]) -> tuple[str, ...]:
        """Returns the module of each of the program's tensors."""
        owners: dict[int, str] = {}
        for entry, s in zip(entries, self.values.values(), strict=False):
            owners.setdefault(s, entry.owner)
        owners.update({s: owners[p] for s, p in self.gradients.items() if s not in self.persistent})
        for op in ops:
            for s in op.reads + op.writes:
                owners.setdefault(s, op.place.module)
        return tuple(owners[s] for s in index)
