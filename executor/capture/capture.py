"""Capture: one training step of a real model becomes a Program, and the graph that runs it.

The step (forward, loss, backward, optimizer) is traced once by ``make_fx`` over fake tensors: nothing of the model's
size is ever allocated and nothing of the user's is changed. Parameters, buffers, optimizer state and the batch are the
graph's placeholders, hence persistent tensors. One storage is one tensor; nodes that only make views are no kernels.

Lifetimes are eager PyTorch's, not the graph's. The README has the known differences from eager: cuDNN's kernels and
workspaces, buckets of updates, gradients at the end of the step, Python's branches, ``capturable`` optimizers.
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

from executor.capture import hooks
from executor.capture.as_cuda import operators_of_cuda
from executor.capture.batches import BatchError, Loss, arguments, called, flatten, structure
from executor.capture.captured import Captured, Returned, Source
from executor.capture.effects import Effects, rebind
from executor.capture.optimizers import BUCKET_BYTES, Numbers, Option, fixed, options
from executor.capture.python_values import PythonValues, changed, untouched
from executor.capture.reach import CaptureError
from executor.capture.recorder import Recorder, noted
from executor.capture.source_locations import Places, users
from executor.capture.state import StepState, copied
from simulator.machine import Machine

checks: list[Callable[[Captured], None]] = []  # what compares a capture with its step (executor/training/check.py)


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

    Of a batch that is a mapping it is ``loss_fn(model(**batch), batch)``, of another object ``loss_fn(model(batch),
    batch)``. Where ``loss_fn`` is None the model returns its loss: a tensor, the ``loss`` of an object, the first of a
    tuple. What ``loss_fn`` returns besides, ``(loss, …)``, the step returns, too, without a graph.

    Gradients die at the end of the step (``set_to_none=True``). The model may live on the meta device;
    it is then captured as a CPU model.

    Args:
        optimizer: None for a step without gradients: ``loss_fn(model(x), y)`` is all of it.
        example_batch: ``(x, y)`` or ``(inputs…, y)``, a mapping or one object (batches.py); only shapes and dtypes
            matter.
        machine: whose roofline gives the kernels' durations; gtx1080ti when not given.
        algorithms: give convolutions workspaces and variants, as in ``Captured.on``.
        accumulate: micro-batches of a step. With more than one, each loss is divided by their number before its
            backward pass, gradients add up, and the optimizer steps after the last. The step then takes that many
            batches and returns the sum of these losses; PlannedStep also takes them one by one.
        average: False: losses of micro-batches are not divided by their number (``loss_fn`` does what is to be done).
        others: the examples of the micro-batches after the first, where they are of other shapes than it.
        autocast: the forward pass and the loss run within ``torch.autocast`` of this type.
        scaler: the loss is scaled, gradients are unscaled before they are clipped, and ``scaler.step(optimizer)`` and
            ``scaler.update()`` end the step. The program is that of a step which is not skipped; one that is leaves
            the parameters and the state as they were.
        bucket_bytes: an update of several parameters at once (``foreach``, ``fused``) is one kernel, for which all of
            them are in memory with their gradients and state; with this it is several, each of parameters of at most
            so many bytes (or of one). The results are the same to the bit. None: one.
        clip_norm: before the optimizer's step, ``clip_grad_norm_(model.parameters(), clip_norm)``; what that returns
            is ``PlannedStep.grad_norm``.
        keep_grads: gradients are there after the step, until the next one begins (``zero_grad`` comes first).
        as_cuda: of a model on the CPU, the operators that the machine's GPU would run (as_cuda.py); to be planned, not
            executed.
        check: run the step and its capture on few examples of the batch, and refuse it where they differ
            (executor/training/check.py); not of a model or a batch on the meta device, and not with ``as_cuda``.

    Raises:
        CaptureError: the step cannot be traced, or differs from its capture.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer | None) or not (
        loss_fn is None or callable(loss_fn)
    ):  # fmt: skip
        raise CaptureError(
            "capture takes a torch.nn.Module, a callable loss or None, an Optimizer or None, and a batch; capture_step "
            "takes a step of any form"
        )
    if accumulate < 1 or (optimizer is None and (accumulate > 1 or clip_norm is not None)):
        raise CaptureError("accumulate is at least 1; it and clip_norm are for a step with an optimizer")
    rest = (example_batch,) * (accumulate - 1) if others is None else others
    parts = [arguments(batch) for batch in (example_batch, *rest)]
    if loss_fn is not None and len(parts[0]) == 1 and isinstance(parts[0][0], Tensor):
        raise CaptureError("example_batch is a tensor, not a pair (x, y) or an object that has both")
    if len(parts) != accumulate or len(set(map(structure, parts))) > 1:
        raise CaptureError("others: expected accumulate - 1 batches of the structure of example_batch")

    norms: list[Tensor] = []
    device = next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")

    def part(batch: tuple[Any, ...]) -> tuple[Tensor, Any]:
        """The loss of a batch, after its backward pass, and what the loss function returned besides."""
        with torch.autocast(device, autocast) if autocast is not None else nullcontext():
            result = called(model, loss_fn, noted, *batch)
        loss, more = (result[0], tuple(result[1:])) if isinstance(result, tuple) and result else (result, ())
        del result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise CaptureError(f"the loss is {what}, not a tensor of one element")
        if more and accumulate > 1:
            raise CaptureError("loss_fn returns more than the loss, which a step of micro-batches does not pass on")
        if average and accumulate > 1:
            loss = loss / accumulate
        if optimizer is not None:
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        return loss, more

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
        loss, more = part(batch)
        update()
        return (loss, *more) if more else loss

    def several(*batches: tuple[Any, ...]) -> Generator[Tensor, None, Tensor]:
        total = loss = part(batches[0])[0].detach()
        yield loss
        for batch in batches[1:]:
            del loss  # it lives no longer than in a loop that only adds it
            loss = part(batch)[0].detach()
            total = total + loss
            yield loss
        del loss
        update()
        return total

    roots = [(model, ""), (loss_fn, "loss_fn"), (optimizer, "optimizer"), (scaler, "scaler")]
    captured_as = partial(
        _capture, roots=roots, machine=machine, name=name or type(model).__name__, algorithms=algorithms,
        bucket_bytes=bucket_bytes, outside="loss_fn", as_cuda=as_cuda, keep_grads=keep_grads, norms=norms,
    )  # fmt: skip
    if accumulate == 1:
        return _checked(captured_as(step, parts[0]), check and not as_cuda)
    # Micro-batches are different tensors, whatever the examples are; of each, the example that it stands for.
    copies = [copied(part) for part in parts]
    examples = {id(copy): original for _, pairs in copies for copy, original in pairs}
    batches = tuple(batch for batch, _ in copies)
    captured = captured_as(several, batches, several=True)
    captured = replace(captured, sources=tuple(examples.get(id(s), s) for s in captured.sources))
    return _checked(captured, check and not as_cuda)


def capture_step(
    step: Callable[..., Any], *args: Any, machine: Machine | None = None, name: str | None = None,
    algorithms: bool = False, bucket_bytes: int | None = BUCKET_BYTES, as_cuda: bool = False, keep_grads: bool = False,
    check: bool = True,
) -> Captured:  # fmt: skip
    """Captures one call ``step(*args)`` of any callable.

    Modules, optimizers and tensors that ``step`` reaches (closure, globals it names, ``self``) are found
    and become persistent, like the tensors in ``args``. What it returns may be any structure of tensors and None.

    Args:
        machine, name, algorithms, bucket_bytes, as_cuda, check: as in ``capture``.
        keep_grads: gradients that parameters have at the end of ``step`` are theirs until the next one begins.

    Raises:
        CaptureError: the step cannot be traced, returns something other than tensors, or differs from its capture.
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
    step: Callable[..., Any], args: tuple[Any, ...], roots: list[tuple[Any, str]], machine: Machine | None, name: str,
    algorithms: bool, bucket_bytes: int | None, outside: str, several: bool = False, as_capturable: bool = False,
    as_cuda: bool = False, keep_grads: bool = False, norms: list[Tensor] | None = None,
) -> Captured:  # fmt: skip
    """``outside``: the place of what runs in no module. ``several``: the step yields at the end of each micro-batch.
    ``norms``: the last of them, at the end of the step, is that of the gradients."""
    given = dict(locals())
    again = partial(_capture, **{**given, "as_capturable": True})

    def with_args(other: Any) -> Captured:
        return _capture(**{**given, "args": other, "roots": [(other if v is args else v, label) for v, label in roots]})

    # Sizes are those of the example; only numbers that an optimizer reads may be symbols.
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=False), static_shapes=True)
    assert mode.shape_env is not None
    machine = machine or Machine.load("gtx1080ti")
    state = StepState(mode, as_capturable, as_cuda)
    weights_cast_once = torch.is_autocast_cache_enabled()
    groups: dict[Optimizer, tuple[dict[str, Any], ...]] = {}

    def trace(batch: Any) -> _Trace:
        """Runs the step's Python once, on fake tensors."""
        assert mode.shape_env is not None
        numbers = Numbers(mode.shape_env)
        recorder = Recorder(numbers, as_cuda)
        found: list[tuple[Returned, Effects]] = []

        def traced(*flat: Tensor) -> tuple[Tensor, ...]:
            # `flat` are the entries' fake tensors themselves; the step reaches them through its own objects.
            places = Places(state.paths, {id(e.fake): e.owner for e in state.entries}, outside)
            example = {id(e.fake): e.real for e in state.entries if e.kind == "input" and e.real is not None}
            recorder.begin(flat, places, example)
            torch.set_autocast_cache_enabled(weights_cast_once)  # the tracer turns it off
            with recorder, operators_of_cuda(machine.capability) if as_cuda else nullcontext():
                result = step(*batch)
                if several:
                    result = _parts(result, recorder)
                leaves, spec = flatten(result)
                effects = state.effects(recorder.used)
                rebind(effects, leaves)
            torch.clear_autocast_cache()
            for leaf in leaves:
                if leaf is not None and not isinstance(leaf, Tensor):
                    what = _article(type(leaf).__name__)
                    raise CaptureError(f"the step returns {what}, which would be the same each time: return tensors")
            outputs = [leaf for leaf in leaves if leaf is not None]
            parameters = [(i, e.fake) for i, e in enumerate(state.entries) if keep_grads and e.kind == "parameter"]
            kept = {i: p.grad for i, p in parameters if p.grad is not None}
            tensors = tuple(leaf is not None for leaf in leaves)
            place = {id(e.fake): i for i, e in enumerate(state.entries)}
            rebound = tuple(place[id(was)] for _, was, _ in effects.rebound)
            returned = Returned(spec, tensors, tuple(kept), bool(norms), tuple(effects.found), rebound)
            outputs += [*kept.values(), *(norms or ())[-1:], *effects.tensors]
            found.append((returned, effects))
            recorder.reap()
            return tuple(outputs)

        state.ran = lambda: len(recorder.ops)
        state.begin()
        with hooks.traced(recorder, groups, bucket_bytes, state.undone), mode:
            graph = make_fx(traced, tracing_mode="real")(*(e.fake for e in state.entries))
        return _Trace(graph, recorder, numbers, *found[0])

    try:
        with untouched() as drawn, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for value, label in roots:
                state.add(value, label)
            leaves, spec = flatten(args)
            inputs = [
                state.fake(v, f"input{i}" if len(leaves) > 1 else "input", "input") if isinstance(v, Tensor) else v
                for i, v in enumerate(leaves)
            ]
            batch = tree_unflatten(inputs, spec)
            groups.update((o, tuple(map(options, o.param_groups))) for o in state.optimizers)
            modules = tuple((m, m.training, tuple(m._modules.values())) for m in state.modules)
            hooked = hooks.count(state.modules)
            place = {id(e.fake): i for i, e in enumerate(state.entries)}
            flat = [(place[id(v)], None) if isinstance(v, Tensor) else (None, v) for v in inputs]
            del leaves, inputs
            with state.installed():
                made = trace(batch)
                changes = changed(state.watched)
                set_now = (*changes.now, *made.effects.added)
                if made.effects.found or set_now:  # would another run do the same?
                    made.effects.put_back()
                    made = made.steady(trace(batch))
                again = changed(set_now).first
                if again is None:
                    state.once = set_now
                else:
                    state.written = changes.first or again
            undone = _undone(state, drawn())
    except CaptureError:
        raise
    except Exception as error:
        if isinstance(error, GuardOnDataDependentSymNode) and state.optimizers and not as_capturable:
            return again()
        raise CaptureError(_sentence(error, state)) from error
    recorder, graph = made.recorder, made.graph
    made.effects.forget()
    if norms:
        norms.clear()
    if not recorder.ops:
        raise CaptureError("the step runs no tensor operation")
    undone = undone or next(iter(made.effects.refused), "") or recorder.leaked()
    made.numbers.close({node.target for node in graph.graph.nodes if isinstance(node.target, Option)})
    captured = recorder.build(graph, state.entries, name, (spec, flat))
    settings = tuple((o, tuple(map(fixed, was))) for o, was in groups.items())
    holds = recorder.user_holds(captured.values, captured.program)
    python = PythonValues(state.watched, undone, state.once)
    captured = replace(
        captured,
        settings=settings,
        modules=modules,
        holds=holds,
        python=python,
        hooks=hooked,
        returned=made.returned,
        source=Source(step, args, tuple((v, label) for v, label in roots if v is not args), with_args),
    )
    return captured.on(machine, algorithms=algorithms)


class _Trace(NamedTuple):
    """What one run of a step's Python gave."""

    graph: fx.GraphModule
    recorder: Recorder
    numbers: Numbers
    returned: Returned
    effects: Effects

    def steady(self, second: _Trace) -> _Trace:
        """This run, with the effects that a run after it shows."""
        runs = [_signature(trace.graph) for trace in (self, second)]
        ways = [{(id(e.owner.container), e.key): e.how for e in t.effects.found} for t in (self, second)]
        # What the second run leaves as it is, is a persistent tensor itself.
        kept = [e for e in self.effects.found if (id(e.owner.container), e.key) not in ways[1]]
        constant = all(self.effects.is_persistent(e) for e in kept)
        second.effects.forget()
        if runs[0] != runs[1] or not ways[1].keys() <= ways[0].keys() or not constant:
            what = [effect.owner.name(effect.key) for effect in self.effects.found] or ["a value of Python's"]
            self.effects.refused.append(
                f"the step does something else once {what[0]} is set: make one step without a plan first"
            )
            return self
        found = self.effects.found
        effects = tuple(replace(e, how=ways[1].get((id(e.owner.container), e.key), e.how)) for e in found)
        return self._replace(returned=self.returned._replace(effects=effects))


def _signature(graph: fx.GraphModule) -> list[tuple[Any, ...]]:
    """What a graph computes; equal for graphs that do the same, to the constants."""
    number: dict[fx.Node, int] = {}
    found = []
    for node in graph.graph.nodes:
        number[node] = len(number)
        args = fx.node.map_arg((node.args, dict(node.kwargs)), number.__getitem__)
        target = node.target.key if isinstance(node.target, Option) else str(node.target)
        value = getattr(graph, str(node.target)) if node.op == "get_attr" else None
        constant = value.tolist() if isinstance(value, Tensor) and type(value) is Tensor else str(type(value))
        found.append((node.op, "" if node.op in ("placeholder", "get_attr") else target, repr(args), constant))
    return found


def _undone(state: StepState, drawn: str) -> str:
    """What the step's Python did that its graph does not do again, as a sentence."""
    if drawn:
        return f"the step draws from {drawn}, and would draw the same each time: take torch's generator"
    if state.undone:
        return state.undone[0]
    if state.silent:
        return f"{state.silent[0]} runs no operator, and would not be called again: call it outside of the step"
    if state.written is not None:
        name, was, now = state.written
        return (
            f"the step changes {name} from {was!r} to {now!r}, which would not be done again: make it a buffer, change "
            "it outside of the step, or take a step without a plan first if it stays so after that"
        )
    return ""


def _parts(step: Generator[Tensor, None, Any], recorder: Recorder) -> Any:
    """Runs a step that yields at the end of each micro-batch; returns what it returns."""
    try:
        while True:
            recorder.end_micro_batch(next(step))
    except StopIteration as end:
        return end.value


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def _sentence(error: Exception, state: StepState) -> str:
    """What stopped the trace, and where in the user's code."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if users(file):
            where = f" ({Path(file).name}:{line})"
    text = " ".join(str(error).split())
    if isinstance(error, BatchError):
        return text
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        what = str(error.args[0]).splitlines()[0]
        return (
            f"the step's Python depends on the values of a tensor: {what}{where}; keep it a tensor (torch.where), or "
            "do this after the step, which may return what it needs"
        )
    if isinstance(error, DynamicOutputShapeException):
        if "ctc_loss" in str(error.args[0]):
            return (
                f"ctc_loss cannot be traced{where}, as PyTorch has no rule for its shapes: plan the model without it, "
                "with executor.compiled.compile(model, memory=...)"
            )
        return (
            f"the shape of a result depends on the values of a tensor: {error.args[0]}{where}; no plan knows its size: "
            "take a mask of fixed shape (torch.where), or do this before the step"
        )
    if "dynamo-optimized" in text:
        what = "a part of the step is compiled (torch.compile), and only what is not can be captured"
        return f"{what}{where}: give the function that was compiled"
    if "convert all Tensors to FakeTensors" in text:
        operator = text.partition("Found in ")[2].partition("(")[0]
        return (
            f"the step uses a tensor in {operator} that is not in its arguments, modules, optimizers or closure"
            f"{where}: make it a buffer (register_buffer), or pass it to the step"
        )
    if "SparseTensorImpl" in text:
        names = [state.paths[id(m)] for m in state.modules if getattr(m, "sparse", False)]
        of = " and ".join(names) or "an embedding"
        return f"the gradient of {of} is sparse, and no plan knows its size{where}: leave sparse=True out"
    return f"the step cannot be traced: {type(error).__name__}: {text[:300]}{where}"
