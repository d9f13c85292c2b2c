"""Captures one training step of a PyTorch model as a Program and an executable FX graph.

``make_fx`` traces the step (forward, loss, backward, optimizer) over fake tensors. Tracing allocates no memory for
the model and leaves the user's objects unchanged. Parameters, buffers, optimizer state and the batch become the graph's
placeholders, which are persistent tensors. One storage is one tensor, and nodes that only create views are not kernels.

Tensor lifetimes are those of eager PyTorch, not those of the graph. executor/capture/README.md lists the known
differences from eager mode: cuDNN kernels and workspaces, bucketed updates, gradients after their last use, Python
branches and ``capturable`` optimizers.
"""

from __future__ import annotations

import gc
import re
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.amp.grad_scaler import GradScaler
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_unflatten

from executor.capture.ambient import STALE_WEIGHTS, CastWeights, ambient_modes, saved_tensors_hooks
from executor.capture.batches import BatchError, Loss, arguments, compute_loss, flatten, structure
from executor.capture.captured import Captured, Returned, Source
from executor.capture.cuda_semantics import cuda_operators
from executor.capture.early_update import InBackward, with_early_update
from executor.capture.effects import Effects, rebind
from executor.capture.first_state import has_own_start
from executor.capture.hooks import hook_name
from executor.capture.interception import traced_calls
from executor.capture.operators import Places, is_user_file
from executor.capture.optimizers import BUCKET_BYTES, Numbers, Option, constant_options, options
from executor.capture.python_values import compare_constants, preserve_random_states, with_article
from executor.capture.reach import CaptureError
from executor.capture.recorder import Recorder, report_outputs
from executor.capture.references import PythonValues
from executor.capture.state import StepState, copy_batch
from simulator.machine import Machine


def capture(
    model: nn.Module,
    loss_fn: Loss | None,
    optimizer: Optimizer | None,
    example_batch: Any,
    *,
    machine: Machine | None = None,
    name: str | None = None,
    algorithms: bool = False,
    accumulate: int = 1,
    average: bool = True,
    others: Sequence[Any] | None = None,
    clip_norm: float | None = None,
    keep_grads: bool = False,
    autocast: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    optimizer_in_backward: InBackward = False,
    as_cuda: bool = False,
    check: bool = True,
    first_step: bool = False,
) -> Captured:
    """Captures ``loss_fn(model(x), y)``, its backward pass, the optimizer's step and ``zero_grad``.

    A mapping is passed as ``loss_fn(model(**batch), batch)``, any other single object as ``loss_fn(model(batch),
    batch)``. If ``loss_fn`` is None, the model's result contains the loss: the tensor itself, its ``loss`` attribute,
    or the first element of a tuple. If ``loss_fn`` returns ``(loss, …)``, the step also returns the extra values,
    detached.

    Each gradient is released after its last use in the step, unless ``keep_grads`` is set. A model on the meta device
    is captured as a CPU model.

    Args:
        model: Module to train.
        loss_fn: Loss of model output and target, or None.
        optimizer: None captures only ``loss_fn(model(x), y)``, without gradients.
        example_batch: ``(x, y)`` or ``(inputs…, y)``, a mapping or one object (batches.py). Only shapes and dtypes
            matter.
        machine: The machine whose roofline gives the kernel durations (default: gtx1080ti).
        name: Name of the program; default: the model's class.
        algorithms: Whether convolutions get workspaces and variants, as in ``Captured.on``.
        accumulate: Number of micro-batches per step. With more than one, each loss is divided by this number before
            its backward pass, gradients accumulate, and the optimizer steps after the last micro-batch. The step then
            takes that many batches and returns the sum of the divided losses. PlannedStep also accepts them one by one.
        average: False leaves the micro-batch losses undivided, for a ``loss_fn`` that normalizes them itself.
        others: Examples of the micro-batches after the first, if their shapes differ from it.
        clip_norm: Applies ``clip_grad_norm_(model.parameters(), clip_norm)`` before the optimizer's step.
            ``PlannedStep.grad_norm`` is its result.
        keep_grads: Whether gradients stay after the step until the next one begins (``zero_grad`` comes first).
        autocast: The dtype of the ``torch.autocast`` context around the forward pass and the loss.
        scaler: Scales the loss and unscales gradients before clipping. ``scaler.step(optimizer)`` and
            ``scaler.update()`` end the step. The program is that of a step that is not skipped. A skipped step leaves
            parameters and optimizer state unchanged.
        bucket_bytes: A multi-tensor update (``foreach``, ``fused``) is one kernel that needs all its parameters,
            gradients and state in memory. This limit in bytes splits it into several kernels, each for at most so many
            bytes of parameters (or for one parameter). Results are bit-identical. None does not split it.
        optimizer_in_backward: Whether each of these kernels follows the last kernel that uses its weights or gradients
            (early_update.py), so that not all gradients live at once. Results are bit-identical. "auto": where the
            update does not need all gradients at once. A step that fails after its first update cannot be undone.
        as_cuda: Captures a CPU model with the operators that the machine's GPU would run (cuda_semantics.py). It
            can be planned but not executed.
        check: Whether to compare the step with its capture on a few examples of the batch
            (executor/training/check.py). Skipped for models or batches on the meta device and with ``as_cuda``.
        first_step: Whether a step whose first run differs from later ones is captured as that run
            (``Captured.is_first``) instead of being refused when it is trained.

    Returns:
        The program, with what is needed to run the step under a plan.

    Raises:
        CaptureError: If the step cannot be traced or differs from its capture, or if its update needs all gradients
            at once, with ``optimizer_in_backward=True``.
    """
    _check_kinds(model, loss_fn, optimizer)
    if accumulate < 1 or (optimizer is None and (accumulate > 1 or clip_norm is not None)):
        raise CaptureError("accumulate must be at least 1; accumulate > 1 and clip_norm need an optimizer")
    other_batches = (example_batch,) * (accumulate - 1) if others is None else others
    batch_args = [arguments(batch) for batch in (example_batch, *other_batches)]
    if loss_fn is not None and len(batch_args[0]) == 1 and isinstance(batch_args[0][0], Tensor):
        raise CaptureError("example_batch is a tensor: give a pair (x, y), or an object that has both")
    if len(batch_args) != accumulate or len(set(map(structure, batch_args))) > 1:
        raise CaptureError("others: expected accumulate - 1 batches with the structure of example_batch")
    options = StepOptions(accumulate, average, clip_norm, autocast, scaler)
    step = _TrainingStep(model, loss_fn, optimizer, keep_grads, options)
    call = _Call(
        step.run,
        batch_args[0],
        ((model, ""), (loss_fn, "loss_fn"), (optimizer, "optimizer"), (scaler, "scaler")),
        machine or Machine.load("gtx1080ti"),
        name or type(model).__name__,
        algorithms,
        bucket_bytes,
        as_cuda,
        keep_grads,
        first_step,
        outside="loss_fn",
        norms=step.norms,
    )
    if accumulate == 1:
        return with_early_update(_checked(call.capture(), check and not as_cuda), optimizer_in_backward)
    # Micro-batches are distinct tensors even if the examples are the same object: copy, then map each copy back.
    copies = [copy_batch(batch) for batch in batch_args]
    examples = {id(copy): original for _, pairs in copies for copy, original in pairs}
    batches = tuple(batch for batch, _ in copies)
    captured = replace(call, step=step.run_micro_batches, args=batches, is_generator=True).capture()
    captured = replace(captured, sources=tuple(examples.get(id(s), s) for s in captured.sources))
    return with_early_update(_checked(captured, check and not as_cuda), optimizer_in_backward)


def capture_step(
    step: Callable[..., Any],
    *args: Any,
    machine: Machine | None = None,
    name: str | None = None,
    algorithms: bool = False,
    bucket_bytes: int | None = BUCKET_BYTES,
    as_cuda: bool = False,
    keep_grads: bool = False,
    optimizer_in_backward: InBackward = False,
    check: bool = True,
    first_step: bool = False,
) -> Captured:
    """Captures one call ``step(*args)`` of any callable.

    Modules, optimizers and tensors that ``step`` reaches through its closure, its globals or ``self`` become
    persistent, like the tensors in ``args``. The step may return any structure of tensors and None.

    Args:
        machine, name, algorithms, bucket_bytes, optimizer_in_backward, as_cuda, check, first_step: As in ``capture``.
        keep_grads: Whether gradients that exist at the end of ``step`` stay until the next one begins.

    Returns:
        The program, with what is needed to run the step under a plan.

    Raises:
        CaptureError: As in ``capture``, or if the step returns anything but tensors.
    """
    call = _Call(
        step,
        args,
        ((step, ""), (args, "")),
        machine or Machine.load("gtx1080ti"),
        str(name or getattr(step, "__qualname__", type(step).__name__)),
        algorithms,
        bucket_bytes,
        as_cuda,
        keep_grads,
        first_step,
        outside="step",
    )
    return with_early_update(_checked(call.capture(), check and not as_cuda), optimizer_in_backward)


def register_check(check: Callable[[Captured], None]) -> Callable[[Captured], None]:
    """Makes ``capture`` and ``capture_step`` pass each capture to ``check`` (a decorator)."""
    _checks.append(check)
    return check


# A check runs the captured step, so it is in executor/training, which imports this package and registers it here.
_checks: list[Callable[[Captured], None]] = []


def _checked(captured: Captured, check: bool) -> Captured:
    for compare in _checks if check else ():
        compare(captured)
    return captured


def _check_kinds(model: Any, loss_fn: Any, optimizer: Any) -> None:
    """Raises CaptureError if the parts of a training step are no module, loss and optimizer."""
    if (
        not isinstance(model, nn.Module)
        or not isinstance(optimizer, Optimizer | None)
        or not (loss_fn is None or callable(loss_fn))
    ):
        raise CaptureError(
            "capture takes a torch.nn.Module, a callable loss or None, an Optimizer or None, and a batch; capture_step "
            "takes a step of any form"
        )


@dataclass(frozen=True)
class StepOptions:
    """Options of a training step that a step function of the user's implements itself; fields as in ``capture``."""

    accumulate: int = 1
    average: bool = True
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    scaler: GradScaler | None = None


class _TrainingStep:
    """Forward, loss, backward and update of a model, in eager PyTorch.

    Attributes:
        norms: The gradient norms of the steps run so far, with ``clip_norm``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss | None,
        optimizer: Optimizer | None,
        keep_grads: bool,
        options: StepOptions,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.keep_grads = keep_grads
        self.options = options
        self.norms: list[Tensor] = []
        self._device = next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")

    def run(self, *batch: Any) -> Any:
        """Runs a step of one batch; returns the loss, or a tuple of it and the extra results of the loss function."""
        loss, extras = self._run_batch(batch)
        self._update()
        return (loss, *extras) if extras else loss

    def run_micro_batches(self, *batches: tuple[Any, ...]) -> Generator[Tensor, None, Tensor]:
        """Runs a step of several batches: yields the loss of each and returns their sum."""
        total = loss = self._run_batch(batches[0])[0].detach()
        yield loss
        for batch in batches[1:]:
            del loss  # dies as early as in a loop that only accumulates it
            loss = self._run_batch(batch)[0].detach()
            total = total + loss
            yield loss
        del loss
        self._update()
        return total

    def _run_batch(self, batch: tuple[Any, ...]) -> tuple[Tensor, Any]:
        """Runs forward and backward for one batch and returns the loss and any extra results of the loss function."""
        options = self.options
        with torch.autocast(self._device, options.autocast) if options.autocast is not None else nullcontext():
            result = compute_loss(self.model, self.loss_fn, report_outputs, *batch)
        loss, extras = (result[0], tuple(result[1:])) if isinstance(result, tuple) and result else (result, ())
        del result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            description = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise CaptureError(f"the loss is {description}, not a tensor of one element: reduce it, e.g. with mean()")
        if extras and options.accumulate > 1:
            raise CaptureError(
                "loss_fn returns more than the loss, which a step of micro-batches does not support: return only it"
            )
        if options.average and options.accumulate > 1:
            loss = loss / options.accumulate
        if self.optimizer is not None:
            (loss if options.scaler is None else options.scaler.scale(loss)).backward()
        return loss, extras

    def _update(self) -> None:
        clip_norm = self.options.clip_norm
        scaler = self.options.scaler
        if self.optimizer is None:
            return
        if clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            self.norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm))
        if scaler is not None:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        if not self.keep_grads:
            self.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call ``step(*args)`` to capture.

    Attributes:
        roots: Objects from which the step's state is reached, each with its name.
        machine, name, algorithms, bucket_bytes, as_cuda, keep_grads, first_step: As in ``capture``.
        outside: Name of the place of operators that run in no module.
        is_generator: Whether the step is a generator that yields at the end of each micro-batch.
        norms: List whose last element is the gradient norm at the end of the step.
        as_capturable: Whether optimizers run in their ``capturable`` form.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    roots: tuple[tuple[Any, str], ...]
    machine: Machine
    name: str
    algorithms: bool
    bucket_bytes: int | None
    as_cuda: bool
    keep_grads: bool
    first_step: bool
    outside: str
    is_generator: bool = False
    norms: list[Tensor] = field(default_factory=list)
    as_capturable: bool = False

    def recapture(self, args: Any) -> Captured:
        """Captures the same step with other arguments."""
        roots = tuple((args if value is self.args else value, label) for value, label in self.roots)
        return replace(self, args=args, roots=roots).capture()

    def _mapping_hint(self, error: Exception) -> str:
        """Returns how to pass a mapping as keyword arguments if an error names one that the model got, or ""."""
        kinds = {type(value).__name__ for value in self.args[:-1] if isinstance(value, Mapping)}
        if self.outside != "loss_fn" or not any(re.search(rf"\b{kind}\b", str(error)) for kind in kinds):
            return ""
        return (
            "; the model gets this mapping as its input: for model(**inputs), pass the mapping alone as the batch (the "
            "loss is then loss_fn(output, mapping))"
        )

    def capture(self) -> Captured:
        """Traces the step, a second time if it leaves effects in Python objects, and builds its program."""
        if (hooks_around := saved_tensors_hooks()) is not None:
            raise CaptureError(
                f"torch.autograd.graph.saved_tensors_hooks ({hook_name(hooks_around[0])}) surround the step, and a "
                "graph calls no functions of its surroundings: enter them in the step"
            )
        stale = CastWeights.stale()  # the trace clears the cache that tells
        tracer = _Tracer(self)
        state = tracer.state
        try:
            with preserve_random_states() as drawn_from, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tracer.add_state()
                if not stale.isdisjoint(id(entry.real) for entry in state.entries):
                    raise CaptureError(STALE_WEIGHTS)
                modules = tuple((m, m.training, tuple(m._modules.values())) for m in state.modules)
                hooks = state.hooks()
                with state.installed():
                    traced = tracer.trace_effects()
                unrepeatable = _unrepeatable(state, drawn_from())
        except CaptureError:
            raise
        except Exception as error:
            if isinstance(error, GuardOnDataDependentSymNode) and state.optimizers and not self.as_capturable:
                return replace(self, as_capturable=True).capture()
            raise CaptureError(_explain(error, state) + self._mapping_hint(error)) from error
        recorder = traced.recorder
        # What still holds a fake tensor of the step after this counts as a leak.
        traced.effects.clear()
        self.norms.clear()
        if not recorder.ops:
            raise CaptureError("the step runs no tensor operation: give a function that computes with its tensors")
        unrepeatable = unrepeatable or next(iter(traced.effects.refusals), "") or recorder.remove_leaks()
        nodes = traced.graph.graph.nodes
        traced.numbers.close({node.target for node in nodes if isinstance(node.target, Option)})
        captured = recorder.build(
            traced.graph,
            state.entries,
            self.name,
            tracer.leaves,
            spec=tracer.spec,
            settings=tuple((o, tuple(map(constant_options, groups))) for o, groups in tracer.groups.items()),
            modules=modules,
            python=PythonValues(state.watched, unrepeatable, state.first_run_values),
            hooks=hooks,
            modes=ambient_modes(),
            is_first=traced.is_first,
            returned=traced.returned,
            source=Source(
                self.step, self.args, tuple((v, label) for v, label in self.roots if v is not self.args), self.recapture
            ),
        )
        return captured.on(self.machine, algorithms=self.algorithms)


@contextmanager
def _old_objects_frozen() -> Iterator[None]:
    """Exempts existing objects from garbage collection, which otherwise visits all of them several times."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Tracer:
    """Traces a call on fake tensors.

    Attributes:
        state: Tensors that the step reaches, and their fakes.
        groups: Options of each optimizer's parameter groups before the step.
        leaves, spec: The call's arguments, flat, with fakes in place of tensors, and their structure.
    """

    def __init__(self, call: _Call) -> None:
        # Sizes are those of the example. Only numbers that an optimizer reads may be symbols.
        self._shapes = ShapeEnv(allow_dynamic_output_shape_ops=False)
        self._mode = FakeTensorMode(shape_env=self._shapes, static_shapes=True)
        self._call = call
        self._weights_cast_once = torch.is_autocast_cache_enabled()
        self.state = StepState(self._mode, call.as_capturable, call.as_cuda)
        self.groups: dict[Optimizer, tuple[dict[str, Any], ...]] = {}

    def add_state(self) -> None:
        """Finds the tensors that the step reaches and replaces those of its arguments by fakes."""
        state = self.state
        for value, label in self._call.roots:
            state.add(value, label)
        values, self.spec = flatten(self._call.args)
        self.leaves = [
            state.fake(v, f"input{i}" if len(values) > 1 else "input", "input") if isinstance(v, Tensor) else v
            for i, v in enumerate(values)
        ]
        self.groups.update((o, tuple(map(options, o.param_groups))) for o in state.optimizers)
        if self._call.first_step and not self._call.as_cuda and not state.scalers:  # a scaler may skip the first update
            state.starting = {id(o) for o in state.optimizers if has_own_start(o)}

    def trace_effects(self) -> _Traced:
        """Traces the step and finds out which of its effects on Python objects repeat in a second trace."""
        state = self.state
        traced = self._trace()
        changes = compare_constants(state.watched)
        set_values = (*changes.updated, *traced.effects.new_constants)
        if traced.effects.repeatable or set_values:
            traced.effects.restore_rebound()
            traced = traced.with_repeated_effects(self._trace(), self._call.first_step)
        unstable = compare_constants(set_values).first
        if unstable is None:
            state.first_run_values = set_values
        else:
            state.written = changes.first or unstable
        return traced

    def _trace(self) -> _Traced:
        """Runs the step's Python code once on fake tensors."""
        call = self._call
        state = self.state
        batch = tree_unflatten(self.leaves, self.spec)
        numbers = Numbers(self._shapes)
        recorder = Recorder(numbers, call.as_cuda)
        results: list[tuple[Returned, Effects]] = []

        def traced(*flat: Tensor) -> tuple[Tensor, ...]:
            # `flat` holds the entries' own fake tensors, which the step reaches through its own objects.
            places = Places(state.paths, {id(e.fake): e.owner for e in state.entries}, call.outside)
            example = {id(e.fake): e.real for e in state.entries if e.kind == "input" and e.real is not None}
            recorder.begin(flat, places, example)
            torch.set_autocast_cache_enabled(self._weights_cast_once)  # the tracer turns it off
            with (
                _old_objects_frozen(),
                recorder,
                cuda_operators(call.machine.capability) if call.as_cuda else nullcontext(),
            ):
                result = call.step(*batch)
                if call.is_generator:
                    result = _drive_micro_batches(result, recorder)
                leaves, spec = flatten(result)
                effects = state.effects(recorder.is_used)
                rebind(effects, leaves)
            torch.clear_autocast_cache()
            recorder.record_gradients(e.fake for e in state.entries if e.kind == "parameter")
            returned, outputs = self._outputs(leaves, spec, effects)
            results.append((returned, effects))
            recorder.reap()
            return outputs

        # Comparing objects that hold fake tensors, between two traces, may have left symbols.
        self._shapes.pending_fresh_unbacked_symbols.clear()
        state.count_operators = lambda: len(recorder.ops)
        state.begin()
        with traced_calls(recorder, self.groups, call.bucket_bytes, state.starting, state.unrepeatable), self._mode:
            graph = make_fx(traced, tracing_mode="real")(*(e.fake for e in state.entries))
        state.count_operators = int  # releases the recorder, whose graph may hold tensors of an earlier trace
        return _Traced(graph, recorder, numbers, *results[0])

    def _outputs(self, leaves: list[Any], spec: TreeSpec, effects: Effects) -> tuple[Returned, tuple[Tensor, ...]]:
        """Returns the graph's outputs and their layout; ``leaves`` and ``spec`` are the step's result."""
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Tensor):
                kind = with_article(type(leaf).__name__)
                raise CaptureError(f"the step returns {kind}, which the graph cannot recompute: return tensors")
        entries = self.state.entries
        arguments = {id(leaf) for leaf in self.leaves}
        for entry in entries:
            if id(entry.fake) in arguments and entry.home is None and entry.fake.grad is not None:
                raise CaptureError(
                    f"the step leaves a gradient in its argument {entry.name}, which requires gradients: detach it, or "
                    "return the gradient (torch.autograd.grad)"
                )
        norms = self._call.norms
        positions = {id(e.fake): i for i, e in enumerate(entries)}
        parameters = [e.fake for e in entries if self._call.keep_grads and e.kind == "parameter"]
        gradients = {positions[id(p)]: p.grad for p in parameters if p.grad is not None}
        rebound = tuple(positions[id(old)] for _, old, _ in effects.rebound)
        tensors = tuple(leaf is not None for leaf in leaves)
        returned = Returned(spec, tensors, tuple(gradients), bool(norms), tuple(effects.repeatable), rebound)
        results = [leaf for leaf in leaves if leaf is not None]
        return returned, (*results, *gradients.values(), *norms[-1:], *effects.tensors)


class _Traced(NamedTuple):
    """Result of tracing a step once."""

    graph: fx.GraphModule
    recorder: Recorder
    numbers: Numbers
    returned: Returned
    effects: Effects
    is_first: bool = False

    def with_repeated_effects(self, second: _Traced, first_step: bool) -> _Traced:
        """Returns this trace with the effects that a second trace repeats, or all if it ``is_first``."""
        signatures = [_signature(trace.graph) for trace in (self, second)]
        actions = [{(id(e.owner.container), e.key): e.action for e in t.effects.repeatable} for t in (self, second)]
        # Effects that the second trace does not repeat have to bind persistent tensors.
        transient = [e for e in self.effects.repeatable if (id(e.owner.container), e.key) not in actions[1]]
        is_persistent = all(self.effects.is_persistent(e) for e in transient)
        second.effects.clear()
        if signatures[0] != signatures[1] or not actions[1].keys() <= actions[0].keys() or not is_persistent:
            if first_step:
                return self._replace(is_first=True)
            names = [effect.owner.name(effect.key) for effect in self.effects.repeatable] or ["a value of Python's"]
            self.effects.refusals.append(
                f"the step does something else once {names[0]} is set: run one step without a plan first"
            )
            return self
        repeatable = self.effects.repeatable
        effects = tuple(replace(e, action=actions[1].get((id(e.owner.container), e.key), e.action)) for e in repeatable)
        return self._replace(returned=self.returned._replace(effects=effects))


def _signature(graph: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Returns a comparable form of a graph's computation, constants included."""
    numbers: dict[fx.Node, int] = {}
    signature = []
    for node in graph.graph.nodes:
        numbers[node] = len(numbers)
        args = fx.node.map_arg((node.args, dict(node.kwargs)), numbers.__getitem__)
        target = node.target.key if isinstance(node.target, Option) else str(node.target)
        value = getattr(graph, str(node.target)) if node.op == "get_attr" else None
        constant = value.tolist() if isinstance(value, Tensor) and type(value) is Tensor else str(type(value))
        signature.append((node.op, "" if node.op in ("placeholder", "get_attr") else target, repr(args), constant))
    return signature


def _unrepeatable(state: StepState, drawn_from: str) -> str:
    """Returns a sentence about a Python side effect of the step that its graph cannot repeat, or ""."""
    if drawn_from:
        return f"the step draws from {drawn_from}, and its graph would repeat the same numbers: use torch's generator"
    if state.unrepeatable:
        return state.unrepeatable[0]
    if state.silent_hooks:
        return f"{state.silent_hooks[0]} runs no operator, so the graph would not call it: call it outside of the step"
    if state.written is not None:
        name, old, new = state.written
        return (
            f"the step changes {name} from {old!r} to {new!r}, which the graph cannot repeat: make it a buffer, change "
            "it outside of the step, or run one step without a plan first if it stays constant after that"
        )
    return ""


def _drive_micro_batches(step: Generator[Tensor, None, Any], recorder: Recorder) -> Any:
    """Runs a step that yields at the end of each micro-batch and returns its result."""
    try:
        while True:
            recorder.end_micro_batch(next(step))
    except StopIteration as end:
        return end.value


def _explain(error: Exception, state: StepState) -> str:
    """Returns a sentence that explains a failed trace, with the line of the user's code."""
    place = ""
    names: tuple[str, ...] = ()  # in the user's code of this line
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if is_user_file(file):
            place = f" ({Path(file).name}:{line})"
            names = frame.f_code.co_names
    text = " ".join(str(error).split())
    if isinstance(error, BatchError):
        return text
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        reason = str(error.args[0]).splitlines()[0]
        return (
            f"the step's Python depends on the values of a tensor: {reason}{place}; keep it a tensor (torch.where), or "
            "do this after the step with tensors that the step returns"
        )
    if isinstance(error, DynamicOutputShapeException):
        if "ctc_loss" in str(error.args[0]):
            return (
                f"ctc_loss cannot be traced{place}, as PyTorch has no rule for its shapes: plan the model without it, "
                "with executor.compiled.compile(model, memory=...)"
            )
        return (
            f"the shape of a result depends on the values of a tensor: {error.args[0]}{place}; its size is unknown to "
            "a plan: use a mask of fixed shape (torch.where), or do this before the step"
        )
    if "dynamo-optimized" in text:
        reason = "a part of the step is compiled (torch.compile), which cannot be captured"
        return f"{reason}{place}: pass the function that was compiled"
    if "convert all Tensors to FakeTensors" in text:
        operator = text.partition("Found in ")[2].partition("(")[0]
        if shared := [name for name in names if name in state.code.class_tensors]:
            return (
                f"the step uses {state.code.class_tensors[shared[0]]}, a tensor of a class, in {operator}{place}: make "
                "it an attribute of the object (in __init__)"
            )
        return (
            f"the step uses a tensor in {operator} that is not in its arguments, modules, optimizers or closure"
            f"{place}: make it a buffer (register_buffer), or pass it to the step"
        )
    if "does not require grad" in text and not torch.is_grad_enabled():
        return (
            f"the step's backward pass{place} needs gradients, which torch.no_grad or torch.inference_mode around the "
            "step turns off: call it outside of them"
        )
    if "its data is not allocated yet" in text:
        return (
            f"an operator reads the values of a tensor during the capture{place}, when only its shape is known, "
            "such as the lengths of a PackedSequence: pass padded tensors (pad_packed_sequence) and a mask"
        )
    if "nference tensor" in text:
        made = [e.name for e in state.entries if e.real is not None and e.real.is_inference()]
        return (
            f"{made[0] if made else 'a tensor'} was created in inference mode, so the step{place} cannot compute "
            "gradients with it or write to it: clone it outside of torch.inference_mode, or use torch.no_grad"
        )
    if "TorchScript interpreter" in text:
        lines = re.findall(r'File "(\S+)", line (\d+), in (\w+)', text)
        function = f"{lines[-1][2]} ({Path(lines[-1][0]).name}:{lines[-1][1]})" if lines else "a function"
        return (
            f"an operator of {function}, which torch.jit has scripted or traced, cannot be traced, such as a branch on "
            f"the values of a tensor{place}: call the Python function itself"
        )
    if "SparseTensorImpl" in text:
        names = [state.paths[id(m)] for m in state.modules if getattr(m, "sparse", False)]
        owners = " and ".join(names) or "an embedding"
        return f"the gradient of {owners} is sparse, and its size is unknown to a plan{place}: remove sparse=True"
    return f"the step cannot be traced: {type(error).__name__}: {text[:300]}{place}"
