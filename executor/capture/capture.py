"""Captures one training step of a PyTorch model as a Program and an executable FX graph.

``make_fx`` traces the step (forward, loss, backward, optimizer) over fake tensors. Tracing allocates no memory for
the model and leaves the user's objects unchanged. Parameters, buffers, optimizer state and the batch become the graph's
placeholders, which are persistent tensors. One storage is one tensor, and nodes that only create views are not kernels.

Tensor lifetimes are those of eager PyTorch, not those of the graph. executor/capture/README.md lists the known
differences from eager mode: cuDNN kernels and workspaces, bucketed updates, gradients at the end of the step, Python
branches and ``capturable`` optimizers.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
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
from torch.utils._pytree import tree_unflatten

from executor.capture.batches import BatchError, Loss, arguments, compute_loss, flatten, structure
from executor.capture.captured import Captured, Returned, Source
from executor.capture.cuda_semantics import cuda_operators
from executor.capture.effects import Effects, rebind
from executor.capture.interception import traced_calls
from executor.capture.operators import Places, is_user_file
from executor.capture.optimizers import BUCKET_BYTES, Numbers, Option, constant_options, options
from executor.capture.python_values import PythonValues, compare_constants, preserve_random_states
from executor.capture.reach import CaptureError, hooks_of
from executor.capture.recorder import Recorder, report_outputs
from executor.capture.state import StepState, copy_batch
from simulator.machine import Machine

checks: list[Callable[[Captured], None]] = []  # compare a capture with its step (executor/training/check.py)


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
    as_cuda: bool = False,
    check: bool = True,
) -> Captured:
    """Captures ``loss_fn(model(x), y)``, its backward pass, the optimizer's step and ``zero_grad``.

    A mapping is passed as ``loss_fn(model(**batch), batch)``, any other single object as ``loss_fn(model(batch),
    batch)``. If ``loss_fn`` is None, the model's result contains the loss: the tensor itself, its ``loss`` attribute,
    or the first element of a tuple. If ``loss_fn`` returns ``(loss, …)``, the step also returns the extra values,
    detached.

    Gradients are released at the end of the step (``set_to_none=True``). A model on the meta device is captured as a
    CPU model.

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
        as_cuda: Captures a CPU model with the operators that the machine's GPU would run (cuda_semantics.py). It
            can be planned but not executed.
        check: Whether to compare the step with its capture on a few examples of the batch
            (executor/training/check.py). Skipped for models or batches on the meta device and with ``as_cuda``.

    Raises:
        CaptureError: If the step cannot be traced or differs from its capture.
    """
    if (
        not isinstance(model, nn.Module)
        or not isinstance(optimizer, Optimizer | None)
        or not (loss_fn is None or callable(loss_fn))
    ):
        raise CaptureError(
            "capture takes a torch.nn.Module, a callable loss or None, an Optimizer or None, and a batch; capture_step "
            "takes a step of any form"
        )
    if accumulate < 1 or (optimizer is None and (accumulate > 1 or clip_norm is not None)):
        raise CaptureError("accumulate must be at least 1; accumulate > 1 and clip_norm need an optimizer")
    other_batches = (example_batch,) * (accumulate - 1) if others is None else others
    batch_args = [arguments(batch) for batch in (example_batch, *other_batches)]
    if loss_fn is not None and len(batch_args[0]) == 1 and isinstance(batch_args[0][0], Tensor):
        raise CaptureError("example_batch is a tensor, not a pair (x, y) or an object that has both")
    if len(batch_args) != accumulate or len(set(map(structure, batch_args))) > 1:
        raise CaptureError("others: expected accumulate - 1 batches with the structure of example_batch")

    norms: list[Tensor] = []
    device = next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")

    def run_batch(batch: tuple[Any, ...]) -> tuple[Tensor, Any]:
        """Runs forward and backward for one batch and returns the loss and any extra results of the loss function."""
        with torch.autocast(device, autocast) if autocast is not None else nullcontext():
            result = compute_loss(model, loss_fn, report_outputs, *batch)
        loss, extras = (result[0], tuple(result[1:])) if isinstance(result, tuple) and result else (result, ())
        del result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            description = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise CaptureError(f"the loss is {description}, not a tensor of one element")
        if extras and accumulate > 1:
            raise CaptureError("loss_fn returns more than the loss, which a step of micro-batches does not support")
        if average and accumulate > 1:
            loss = loss / accumulate
        if optimizer is not None:
            (loss if scaler is None else scaler.scale(loss)).backward()
        return loss, extras

    def update() -> None:
        if clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm))
        if optimizer is not None:
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if not keep_grads:
                optimizer.zero_grad(set_to_none=True)

    def step(*batch: Any) -> Any:
        loss, extras = run_batch(batch)
        update()
        return (loss, *extras) if extras else loss

    def run_micro_batches(*batches: tuple[Any, ...]) -> Generator[Tensor, None, Tensor]:
        total = loss = run_batch(batches[0])[0].detach()
        yield loss
        for batch in batches[1:]:
            del loss  # dies as early as in a loop that only accumulates it
            loss = run_batch(batch)[0].detach()
            total = total + loss
            yield loss
        del loss
        update()
        return total

    roots = [(model, ""), (loss_fn, "loss_fn"), (optimizer, "optimizer"), (scaler, "scaler")]
    capture_with = partial(
        _capture,
        roots=roots,
        machine=machine,
        name=name or type(model).__name__,
        algorithms=algorithms,
        bucket_bytes=bucket_bytes,
        outside="loss_fn",
        as_cuda=as_cuda,
        keep_grads=keep_grads,
        norms=norms,
    )
    if accumulate == 1:
        return _checked(capture_with(step, batch_args[0]), check and not as_cuda)
    # Micro-batches are distinct tensors even if the examples are the same object: copy, then map each copy back.
    copies = [copy_batch(batch) for batch in batch_args]
    examples = {id(copy): original for _, pairs in copies for copy, original in pairs}
    batches = tuple(batch for batch, _ in copies)
    captured = capture_with(run_micro_batches, batches, is_generator=True)
    captured = replace(captured, sources=tuple(examples.get(id(s), s) for s in captured.sources))
    return _checked(captured, check and not as_cuda)


def capture_step(
    step: Callable[..., Any],
    *args: Any,
    machine: Machine | None = None,
    name: str | None = None,
    algorithms: bool = False,
    bucket_bytes: int | None = BUCKET_BYTES,
    as_cuda: bool = False,
    keep_grads: bool = False,
    check: bool = True,
) -> Captured:
    """Captures one call ``step(*args)`` of any callable.

    Modules, optimizers and tensors that ``step`` reaches through its closure, its globals or ``self`` become
    persistent, like the tensors in ``args``. The step may return any structure of tensors and None.

    Args:
        machine, name, algorithms, bucket_bytes, as_cuda, check: As in ``capture``.
        keep_grads: Whether gradients that exist at the end of ``step`` stay until the next one begins.

    Raises:
        CaptureError: If the step cannot be traced, returns anything but tensors, or differs from its capture.
    """
    roots = [(step, ""), (args, "")]
    label = name or getattr(step, "__qualname__", type(step).__name__)
    captured = _capture(
        step, args, roots, machine, str(label), algorithms, bucket_bytes, "step", as_cuda=as_cuda, keep_grads=keep_grads
    )
    return _checked(captured, check and not as_cuda)


def _checked(captured: Captured, check: bool) -> Captured:
    if check:
        for compare in checks:
            compare(captured)
    return captured


def _capture(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    roots: list[tuple[Any, str]],
    machine: Machine | None,
    name: str,
    algorithms: bool,
    bucket_bytes: int | None,
    outside: str,
    is_generator: bool = False,
    as_capturable: bool = False,
    as_cuda: bool = False,
    keep_grads: bool = False,
    norms: list[Tensor] | None = None,
) -> Captured:
    """Captures ``step(*args)``; both public functions end here.

    Args:
        outside: Name of the place of operators that run in no module.
        is_generator: Whether the step is a generator that yields at the end of each micro-batch.
        norms: List whose last element is the gradient norm at the end of the step.
    """
    params = dict(locals())

    def with_args(other: Any) -> Captured:
        return _capture(**{**params, "args": other, "roots": [(other if v is args else v, k) for v, k in roots]})

    # Sizes are those of the example. Only numbers that an optimizer reads may be symbols.
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=False), static_shapes=True)
    assert mode.shape_env is not None
    machine = machine or Machine.load("gtx1080ti")
    state = StepState(mode, as_capturable, as_cuda)
    weights_cast_once = torch.is_autocast_cache_enabled()
    groups: dict[Optimizer, tuple[dict[str, Any], ...]] = {}

    def trace(batch: Any) -> _Trace:
        """Runs the step's Python code once on fake tensors."""
        assert mode.shape_env is not None
        numbers = Numbers(mode.shape_env)
        recorder = Recorder(numbers, as_cuda)
        results: list[tuple[Returned, Effects]] = []

        def traced(*flat: Tensor) -> tuple[Tensor, ...]:
            # `flat` holds the entries' own fake tensors, which the step reaches through its own objects.
            places = Places(state.paths, {id(e.fake): e.owner for e in state.entries}, outside)
            example = {id(e.fake): e.real for e in state.entries if e.kind == "input" and e.real is not None}
            recorder.begin(flat, places, example)
            torch.set_autocast_cache_enabled(weights_cast_once)  # the tracer turns it off
            with recorder, cuda_operators(machine.capability) if as_cuda else nullcontext():
                result = step(*batch)
                if is_generator:
                    result = _drive_micro_batches(result, recorder)
                leaves, spec = flatten(result)
                effects = state.effects(recorder.is_used)
                rebind(effects, leaves)
            torch.clear_autocast_cache()
            for leaf in leaves:
                if leaf is not None and not isinstance(leaf, Tensor):
                    kind = _with_article(type(leaf).__name__)
                    raise CaptureError(f"the step returns {kind}, which the graph cannot recompute: return tensors")
            outputs = [leaf for leaf in leaves if leaf is not None]
            positions = {id(e.fake): i for i, e in enumerate(state.entries)}
            parameters = [e.fake for e in state.entries if keep_grads and e.kind == "parameter"]
            gradients = {positions[id(p)]: p.grad for p in parameters if p.grad is not None}
            rebound = tuple(positions[id(old)] for _, old, _ in effects.rebound)
            tensors = tuple(leaf is not None for leaf in leaves)
            returned = Returned(spec, tensors, tuple(gradients), bool(norms), tuple(effects.repeatable), rebound)
            outputs += [*gradients.values(), *(norms or ())[-1:], *effects.tensors]
            results.append((returned, effects))
            recorder.reap()
            return tuple(outputs)

        state.count_operators = lambda: len(recorder.ops)
        state.begin()
        with traced_calls(recorder, groups, bucket_bytes, state.unrepeatable), mode:
            graph = make_fx(traced, tracing_mode="real")(*(e.fake for e in state.entries))
        return _Trace(graph, recorder, numbers, *results[0])

    try:
        with preserve_random_states() as drawn_from, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for value, label in roots:
                state.add(value, label)
            values, spec = flatten(args)
            leaves = [
                state.fake(v, f"input{i}" if len(values) > 1 else "input", "input") if isinstance(v, Tensor) else v
                for i, v in enumerate(values)
            ]
            batch = tree_unflatten(leaves, spec)
            groups.update((o, tuple(map(options, o.param_groups))) for o in state.optimizers)
            modules = tuple((m, m.training, tuple(m._modules.values())) for m in state.modules)
            hooks = sum(map(len, hooks_of(state.modules)))
            with state.installed():
                trace_result = trace(batch)
                changes = compare_constants(state.watched)
                set_values = (*changes.updated, *trace_result.effects.new_constants)
                if trace_result.effects.repeatable or set_values:  # trace a second time to see if the effects repeat
                    trace_result.effects.restore_rebound()
                    trace_result = trace_result.with_repeated_effects(trace(batch))
                unstable = compare_constants(set_values).first
                if unstable is None:
                    state.first_run_values = set_values
                else:
                    state.written = changes.first or unstable
            unrepeatable = _unrepeatable(state, drawn_from())
    except CaptureError:
        raise
    except Exception as error:
        if isinstance(error, GuardOnDataDependentSymNode) and state.optimizers and not as_capturable:
            return _capture(**{**params, "as_capturable": True})
        raise CaptureError(_explain(error, state)) from error
    recorder = trace_result.recorder
    graph = trace_result.graph
    trace_result.effects.clear()
    if norms:
        norms.clear()
    if not recorder.ops:
        raise CaptureError("the step runs no tensor operation")
    unrepeatable = unrepeatable or next(iter(trace_result.effects.refusals), "") or recorder.remove_leaks()
    trace_result.numbers.close({node.target for node in graph.graph.nodes if isinstance(node.target, Option)})
    captured = recorder.build(
        graph,
        state.entries,
        name,
        leaves,
        spec=spec,
        settings=tuple((o, tuple(map(constant_options, group_options))) for o, group_options in groups.items()),
        modules=modules,
        python=PythonValues(state.watched, unrepeatable, state.first_run_values),
        hooks=hooks,
        returned=trace_result.returned,
        source=Source(step, args, tuple((v, label) for v, label in roots if v is not args), with_args),
    )
    return captured.on(machine, algorithms=algorithms)


class _Trace(NamedTuple):
    """Result of tracing a step once."""

    graph: fx.GraphModule
    recorder: Recorder
    numbers: Numbers
    returned: Returned
    effects: Effects

    def with_repeated_effects(self, second: _Trace) -> _Trace:
        """Returns this trace with the effects that a second trace repeats."""
        signatures = [_signature(trace.graph) for trace in (self, second)]
        actions = [{(id(e.owner.container), e.key): e.action for e in t.effects.repeatable} for t in (self, second)]
        # Effects that the second trace does not repeat have to bind persistent tensors.
        transient = [e for e in self.effects.repeatable if (id(e.owner.container), e.key) not in actions[1]]
        is_persistent = all(self.effects.is_persistent(e) for e in transient)
        second.effects.clear()
        if signatures[0] != signatures[1] or not actions[1].keys() <= actions[0].keys() or not is_persistent:
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


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def _explain(error: Exception, state: StepState) -> str:
    """Returns a sentence that explains a failed trace, with the line of the user's code."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if is_user_file(file):
            place = f" ({Path(file).name}:{line})"
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
        return (
            f"the step uses a tensor in {operator} that is not in its arguments, modules, optimizers or closure"
            f"{place}: make it a buffer (register_buffer), or pass it to the step"
        )
    if "SparseTensorImpl" in text:
        names = [state.paths[id(m)] for m in state.modules if getattr(m, "sparse", False)]
        owners = " and ".join(names) or "an embedding"
        return f"the gradient of {owners} is sparse, and its size is unknown to a plan{place}: remove sparse=True"
    return f"the step cannot be traced: {type(error).__name__}: {text[:300]}{place}"
