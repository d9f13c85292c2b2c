"""Differential check: refuses a captured step whose effects differ from those of the user's step.

The user's step runs twice eagerly, then the captured step under a plan with some swaps and recomputations (on CUDA the
second time as a graph), from equal states and on a small part of the batch. All reachable tensors and Python values,
results, batches and random states must then be bit-identical. The captured step runs once if the second eager step has
exactly its operators (operator_match.py), else twice. CUDA kernels that add in any order do not repeat their bits: the
tolerance is then four times the difference of two eager runs (``_judge``). The check runs on the user's own objects,
because functions cannot be copied, and restores them afterwards.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_unflatten

from executor.capture.batches import flatten, tensors_in
from executor.capture.capture import register_check
from executor.capture.captured import Captured
from executor.capture.operators import is_random
from executor.capture.optimizers import FLAGS
from executor.capture.python_values import is_scalar, preserve_random_states
from executor.capture.reach import CaptureError, Reach, Snapshot
from executor.capture.state import copy_batch
from executor.training.bindings import StepError, device_of
from executor.training.graph import beside_bytes
from executor.training.operator_match import OperatorMatch
from executor.training.planned_step import PlannedStep
from simulator.decisions import Recompute, Swap
from simulator.plan import Plan, PlanError
from simulator.schedule import lower

SMALL_FLOPS = 10**8  # smaller steps are checked on the whole batch
FEW_TOKENS = 16  # of a sequence
FEW_PIXELS = 64  # of the height and width of an image
LARGE_BYTES = 2**20  # of tensors that are hashed instead of copied
RANDOM_STATE = "the random state"
EVICTIONS = 2  # swaps and recomputations, each, in the plan of the checked step
# Attributes that a planned step does not update and that no result depends on.
_NOT_COMPARED = FLAGS | {"_step_count", "training"}


class CheckNotRun(UserWarning):
    """Warns that the differential check could not run; the message gives the reason."""


@register_check
def check(captured: Captured) -> None:
    """Compares the effects of a captured step with those of the user's step.

    Raises:
        CaptureError: the effects differ; the message names the first difference.
    """
    if captured.python.unrepeatable or any(d.type == "meta" for d in captured.devices):
        return
    source = captured.source
    args = source.args
    if any(isinstance(x, Tensor) and x.device.type == "meta" for x in (*captured.sources, *flatten(args)[0])):
        return
    if sum(kernel.flops for kernel in captured.program.kernels) > SMALL_FLOPS:
        examples = first_examples(args, _examples(captured))
        pair = first_examples(args, 2)  # one example needs other copies
        small = few_tokens(pair)
        if small is pair:
            small = few_pixels(pair)
        if small is not pair and _Comparison(captured, small).compare(is_small=True):
            return
        if examples is not args and _Comparison(captured, examples).compare():
            return
    _Comparison(captured, args).compare()


def _operators(captured: Captured) -> list[Any]:
    """Returns the operators of a captured step, in order."""
    return [node.target for node in captured.graph.graph.nodes if isinstance(node.target, OpOverload)]


def after_first_step(captured: Captured, action: Callable[[], object]) -> None:
    """Calls ``action`` with all objects as after the user's first step, and restores them.

    The step runs on a few examples of the batch, or on all if the action fails after that.

    Raises:
        CaptureError: the step fails on the example batch, or an object cannot be restored.
    """
    args = captured.source.args
    for batch in (first_examples(args, _examples(captured)), args):
        comparison = _Comparison(captured, batch)
        try:
            with comparison.restored():
                comparison.run_eagerly()
                action()
            return
        except (CaptureError, StepError):
            if batch is args:
                raise


def _examples(captured: Captured) -> int:
    """Returns the fewest examples that a batch needs; batch norm needs two."""
    return 2 if any(isinstance(m, _BatchNorm) for m, *_ in captured.modules) else 1


def first_examples(args: Any, examples: int) -> Any:
    """Returns the first examples of a batch whose tensors share their first dimension, else the batch itself."""
    leaves, spec = flatten(args)
    tensors = {id(x): x for x in leaves if isinstance(x, Tensor) and x.dim()}
    sizes = {len(x) for x in tensors.values()}
    are_unshared = len({x.untyped_storage()._cdata for x in tensors.values()}) == len(tensors)
    if len(sizes) != 1 or sizes.pop() <= examples or not are_unshared:
        return args
    cut_tensors = {key: x[:examples].clone() for key, x in tensors.items()}
    return tree_unflatten([cut_tensors.get(id(x), x) for x in leaves], spec)


def few_tokens(args: Any) -> Any:
    """Returns a few consecutive tokens of a batch of sequences, else the batch itself.

    A batch of sequences has only integers or booleans, in tensors of one or two dimensions, and one length. The tokens
    are those that differ most, since padding and ignored labels repeat.
    """
    leaves, spec = flatten(args)
    tensors = {id(x): x for x in leaves if isinstance(x, Tensor) and x.dim()}
    sequences = {key: x for key, x in tensors.items() if x.dim() == 2}
    lengths = {x.shape[1] for x in sequences.values()}
    has_values = any(x.dim() > 2 or x.is_floating_point() or x.is_complex() for x in tensors.values())
    if has_values or len(lengths) != 1 or (length := lengths.pop()) <= FEW_TOKENS:
        return args
    changes = torch.zeros(length - FEW_TOKENS + 1, dtype=torch.int64)
    for x in sequences.values():
        windows = x.long().cpu().unfold(1, FEW_TOKENS, 1).sort(-1).values
        changes += windows.diff().ne(0).sum((0, 2))
    begin = int(changes.argmax())
    cut_tensors = {key: x[:, begin : begin + FEW_TOKENS].clone() for key, x in sequences.items()}
    return tree_unflatten([cut_tensors.get(id(x), x) for x in leaves], spec)


def few_pixels(args: Any) -> Any:
    """Returns a corner of a batch of images and of their masks, else the batch itself."""
    leaves, spec = flatten(args)
    tensors = {id(x): x for x in leaves if isinstance(x, Tensor)}
    sizes = {x.shape[2:] for x in tensors.values() if x.dim() == 4 and x.is_floating_point()}
    if len(sizes) != 1 or min(size := sizes.pop()) < 2 * FEW_PIXELS:
        return args
    cut_tensors = {
        key: x[..., :FEW_PIXELS, :FEW_PIXELS].clone()
        for key, x in tensors.items()
        if x.dim() > 2 and x.shape[-2:] == size
    }
    return tree_unflatten([cut_tensors.get(id(x), x) for x in leaves], spec)


def evicting(captured: Captured) -> Plan:
    """Returns a plan that swaps and recomputes some of the largest activations, for the peak of the step."""
    program = captured.program
    returned = {captured.values[node] for node in captured.outputs if node in captured.values}
    gaps = [g for g in program.gaps() if g.tensor not in returned and not program.tensors[g.tensor].persistent]
    decisions: list[Swap | Recompute] = []
    for kind in (Swap, Recompute):
        count = 0
        for gap in sorted(gaps, key=lambda gap: program.tensors[gap.tensor].nbytes, reverse=True)[: 8 * EVICTIONS]:
            decision = kind(gap.tensor, gap.after, gap.before)
            if count == EVICTIONS or any(decision.tensor == other.tensor for other in decisions):
                continue
            plan = Plan((*decisions, decision), program.fingerprint)
            with suppress(PlanError):  # a tensor that cannot be recomputed
                plan.check(program)
                schedule = lower(program, plan)
                reruns = [captured.nodes[s.kernel] for s in schedule.steps if s.is_recomputation]
                draws = any(is_random(n[0]) for n in reruns if n)
                if not draws and schedule.required_bytes <= program.peak_bytes:  # a graph recomputes no random kernel
                    decisions.append(decision)
                    count += 1
    return Plan.of(program, tuple(decisions), "", program.peak_bytes, "")


@dataclass
class _Effects:
    """State and results after one or two steps."""

    state: dict[str, Any]
    results: list[Any]

    def max_abs(self) -> float:
        """Returns the largest absolute value of all floating-point tensors."""
        tensors = [x for x in (*self.state.values(), *self.results) if isinstance(x, Tensor) and x.is_floating_point()]
        return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)


class _Comparison:
    """The user's step and its captured counterpart, both on the user's objects.

    Attributes:
        captured: the captured step; one with the sizes of ``args`` once the user's step has run.
        peak_bytes: the eager step's peak by PyTorch's MemTracker; 0 if unknown.
    """

    def __init__(self, captured: Captured, args: Any) -> None:
        self.captured = captured
        self.args = args
        self.step = captured.source.step
        self.roots = (*captured.source.roots, (args, ""))
        self.device = device_of(captured)
        self.peak_bytes = 0
        self._memory: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def compare(self, is_small: bool = False) -> bool:
        """Raises CaptureError if the two steps differ; returns False if the step needs another batch.

        Args:
            is_small: whether the batch has only a few tokens or pixels, for which a step may choose other operators.
        """
        is_reduced = self.args is not self.captured.source.args
        try:
            with self.restored():
                eager, match, steps = self._run_eagerly(is_reduced)
        except CaptureError:  # the state could not be restored
            raise
        except Exception as error:  # includes out-of-memory errors
            if is_reduced:
                return False
            _warn(f"the step without a plan raises {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            return True
        if match is None and is_reduced:
            operators = _operators(self.captured)
            try:
                self.captured = self.captured.source.recapture(self.args)
            except CaptureError:  # the step needs more of its batch
                return False
            if is_small and _operators(self.captured) != operators:
                return False
        with match.resized() if match is not None else nullcontext(self.captured) as self.captured:
            try:
                with self.restored(), self.planned() as step:
                    differences = self._differences(eager, self.run(step, steps))
            except torch.OutOfMemoryError:
                _warn("the device has no memory for a copy of the step's state")
                return True
            self._judge(eager, differences, steps)
            expected = eager_peak(self.captured)
        if self.peak_bytes and abs(self.peak_bytes - expected) > max(0.01 * expected, 4096):
            warnings.warn(
                f"the step's peak is {self.peak_bytes:,} bytes by PyTorch's MemTracker and {expected:,} by the "
                "capture: a limit may not hold on the device",
                stacklevel=2,
            )
        return True

    def _run_eagerly(self, is_reduced: bool) -> tuple[_Effects, OperatorMatch | None, int]:
        """Runs the user's step twice.

        Returns:
            The effects; the match of the second step's operators with the captured ones, if it runs them on a part of
            the batch; and the number of steps that have these effects: one if the second step runs only operators.
        """
        returned = self.captured.returned
        has_effects = returned.effects or returned.rebound or self.captured.python.first_run_values
        match = OperatorMatch(self.captured) if is_reduced else None
        results = self.run(self.step, 1)
        is_one_enough = match is not None and not has_effects and repeats(self.device)
        first = _Effects(self.state(), results) if is_one_enough else None
        later = self.run(self.step, 1, match, track_memory=True)
        match = None if match is None or match.difference else match
        if first is not None and match is not None:
            values = {name: value for name, value in self.observe() if not isinstance(value, Tensor)}
            if all(equal(value, first.state.get(name)) for name, value in values.items()):
                return first, match, 1
        return _Effects(self.state(), results + later), match, 2

    def _differences(self, eager: _Effects, results: list[Any]) -> list[tuple[str | int, Any, Any]]:
        """Returns names of state and numbers of results that differ now, with their eager and current values."""
        state = dict(self.observe())
        state[RANDOM_STATE] = torch.get_rng_state()
        names = dict.fromkeys((*eager.state, *state))
        pairs: list[tuple[str | int, Any, Any]] = [(name, eager.state.get(name), state.get(name)) for name in names]
        pairs += [(i, a, b) for i, (a, b) in enumerate(zip(eager.results, results, strict=True))]
        return [(name, a, _clone(b)) for name, a, b in pairs if not equal(a, b)]

    def _judge(self, eager: _Effects, differences: list[tuple[str | int, Any, Any]], steps: int) -> None:
        """Raises CaptureError unless the differences are noise of kernels that do not repeat their results."""
        tolerance = 0.0
        if differences and not repeats(self.device):
            with self.restored():
                results = self.run(self.step, steps)
                repeated = _Effects(self.state(), results)
            pairs = [(x, repeated.state.get(name)) for name, x in eager.state.items()]
            spread = max(difference(x, y) for x, y in (*pairs, *zip(eager.results, repeated.results, strict=True)))
            # A multiple of the spread of two eager runs is tolerated, if the spread is noise, which is small beside
            # the largest value.
            tolerance = 4 * spread if spread <= 0.01 * eager.max_abs() else -1.0
        for name, a, b in differences:
            if self.captured.skippable and ".state." in str(name) and a is None:
                continue  # a GradScaler has skipped the update that would create it
            if difference(a, b) <= tolerance:
                continue
            if isinstance(name, str):
                raise CaptureError(
                    f"the captured step changes {name} differently from the eager step ({_diff(a, b)}): keep such "
                    "state in tensors that are written in place (copy_), pass it as an argument, or set check=False"
                )
            raise CaptureError(
                f"result {name} of the captured step differs from the eager step ({_diff(a, b)}): {self.cause()}, or "
                "set check=False"
            )

    def cause(self) -> str:
        """Returns the likely cause of a different result, and a way out."""
        attention = nn.TransformerEncoderLayer, nn.MultiheadAttention
        fused = [type(m) for m, training, _ in self.captured.modules if isinstance(m, attention) and not training]
        if fused and torch.backends.mha.get_fastpath_enabled():
            return (
                f"without gradients, {fused[0].__name__} in eval mode runs a fused kernel that a capture does not see; "
                "call torch.backends.mha.set_fastpath_enabled(False)"
            )
        return "the step reads a value that was not captured; pass it as an argument"

    def run(
        self, step: Callable[..., Any], steps: int, match: OperatorMatch | None = None, track_memory: bool = False
    ) -> list[Any]:
        """Runs steps and returns copies of their results and batches."""
        results: list[Any] = []
        for _ in range(steps):
            args, _ = copy_batch(self.args)
            leaves, _ = flatten(args)
            self.clear_gradients()
            torch.clear_autocast_cache()  # as if autocast began with this step
            if match is not None:
                match.begin(args)
            with _tracker(self, leaves) if track_memory else nullcontext() as tracker, match or nullcontext():
                result = step(*args)
                if hasattr(result, "send"):  # a step of micro-batches is a generator
                    result = _exhaust(result)
            if match is not None:
                match.end(result)
            if tracker is not None:
                self.peak_bytes = tracker.get_tracker_snapshot("peak")[self.device]["Total"]
            results += [_clone(x) for x in (*flatten(result)[0], *leaves)]
            del result
        return results

    def state(self) -> dict[str, Any]:
        """Returns copies or digests of all reachable tensors, Python values, and the random state."""
        copy = _digest if repeats(self.device) else _clone  # a tolerance needs values
        return {name: copy(value) for name, value in self.observe()} | {RANDOM_STATE: torch.get_rng_state()}

    def run_eagerly(self) -> None:
        """Runs the user's first step, whose later steps differ.

        Raises:
            CaptureError: the step fails.
        """
        try:
            self.run(self.step, 1)
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise CaptureError(
                "the step's first run differs from later ones, and it fails on the example batch "
                f"({type(error).__name__}: {text}): give one with valid values, or run one step without a plan first"
            ) from error

    @contextmanager
    def planned(self) -> Iterator[Callable[..., Any]]:
        """Yields the captured step under a plan; it is captured again after a first step."""
        step: PlannedStep | None = None

        def run(*args: Any) -> Any:
            nonlocal step
            if step is None or step.captured.is_first:
                captured = self.captured if step is None else self.captured.source.recapture(self.args)
                # A graph's holes and slots are beyond the peak, for which the plan is.
                limit = 2 * captured.program.peak_bytes + beside_bytes(captured)
                step = PlannedStep(captured, evicting(captured), limit=limit)
            return step(*args)

        try:
            yield run
        finally:
            if step is not None:
                step.finish()
                if step.graph:
                    step.graph.close()

    def reach(self) -> Reach:
        reach = Reach()
        for value, label in self.roots:
            reach.add(value, label)
        return reach

    def observe(self) -> Iterator[tuple[str, Any]]:
        """Yields every reachable tensor and Python value with its path."""
        reach = self.reach()
        seen = dict[str, int]()
        for owner in reach.owners.values():
            for key, value in owner.content().items():
                named = key in reach.code.names and key not in _NOT_COMPARED
                if not (isinstance(value, (Tensor, tuple)) or (named and is_scalar(value))):
                    continue
                name = owner.name(key)
                seen[name] = seen.get(name, 0) + 1
                name = name if seen[name] == 1 else f"{name} ({seen[name]})"
                if isinstance(value, tuple) and not is_scalar(value):
                    yield from ((f"{name}.{i}", x) for i, x in enumerate(tensors_in(value)))
                else:
                    yield name, value
        for i, generator in enumerate(reach.generators):
            yield f"generator {i}", generator.get_state()

    def clear_gradients(self) -> None:
        for module, *_ in self.captured.modules:
            for p in module._parameters.values():
                if p is not None:
                    p.grad = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restores all reachable state at the end of the ``with`` block."""
        reach = self.reach()
        snapshot = Snapshot(reach)
        if not self._memory:
            self._memory = [(t.untyped_storage(), t.untyped_storage().clone()) for t in tensors_of(reach)]
        parameters = {id(p): p for module, *_ in self.captured.modules for p in module.parameters()}
        gradients = [(p, p.grad) for p in parameters.values()]
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        try:
            with preserve_random_states(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.clear_autocast_cache()  # of the weights before they are restored
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self.device)
                torch.cuda.empty_cache()
            for p, gradient in gradients:
                p.grad = gradient
            for storage, copy in self._memory:
                storage.copy_(copy)
            snapshot.restore()


def eager_peak(captured: Captured) -> int:
    """Returns the eager step's peak in bytes, in which gradients live until ``zero_grad`` or the step's end."""
    program = captured.program
    live = np.array(program.live_bytes)
    for t in captured.holds.gradients:
        last = program.accesses[t][-1]
        zero_grad = captured.holds.zero_grad
        live[last + 1 : zero_grad if zero_grad > last else None] += program.tensors[t].nbytes
    return int(live.max())


def tensors_of(reach: Reach) -> list[Tensor]:
    """Returns one tensor per reachable storage."""
    found = [t for owner in reach.owners.values() for t in tensors_in(tuple(owner.content().values()), 2)]
    found += [p for o in reach.optimizers for group in o.param_groups for p in group["params"]]
    return list({t.untyped_storage()._cdata: t for t in found if t.layout is torch.strided}.values())


class Digest(NamedTuple):
    """Form and hashes of a large tensor, which take less memory than a copy.

    Attributes:
        hashes: Products of its 64-bit words, and of their upper halves, with random numbers, for each chunk.
    """

    dtype: torch.dtype
    shape: torch.Size
    hashes: tuple[int, ...]

    @staticmethod
    def from_tensor(tensor: Tensor) -> Digest:
        """Returns the digest of a tensor on the host."""
        content = _bits(tensor, torch.uint8)
        words = (content if content.storage_offset() % 8 == 0 else content.clone())[: len(content) // 8 * 8]
        chunks = words.view(torch.int64).split(len(factors := _factors()))
        # A difference in the uppermost bits of two words may cancel in their products, but not in those of the halves.
        parts = (part for chunk in chunks for part in (chunk, chunk >> 32))
        products = [int(part @ factors[: len(part)]) for part in parts]
        return Digest(tensor.dtype, tensor.shape, (*products, *content[len(words) :].tolist()))


@functools.cache
def _factors() -> Tensor:
    """Returns the random numbers of digests."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (2**16,), generator=generator, dtype=torch.int64)


def _digest(value: Any) -> Any:
    """Returns the digest of a large tensor on the host, else a copy."""
    is_large = isinstance(value, Tensor) and value.device.type == "cpu" and value.nbytes > LARGE_BYTES
    return Digest.from_tensor(value) if is_large else _clone(value)


def _bits(tensor: Tensor, word: torch.dtype) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(word)


def equal(a: Any, b: Any) -> bool:
    """Returns True if two values are bit-identical, or if ``a`` is the digest of a tensor like ``b``."""
    if isinstance(a, Digest):
        return isinstance(b, Tensor) and b.device.type == "cpu" and a == Digest.from_tensor(b)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    word = _WORDS.get(a.element_size(), torch.uint8)
    return a.numel() == 0 or torch.equal(_bits(a, word), _bits(b, word))


_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # compared faster than bytes


def repeats(device: torch.device) -> bool:
    """Returns True if all kernels give the same bits each time; some CUDA kernels add in another order."""
    return device.type != "cuda"


def difference(a: Any, b: Any) -> float:
    """Returns the largest absolute difference.

    It is infinity if shapes or dtypes differ, or if unequal values are not both tensors.
    """
    if equal(a, b):
        return 0.0
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype):
        return math.inf
    wide = torch.complex128 if a.is_complex() else torch.float64
    x = a.to(wide)
    y = b.to(wide)
    gap = (x - y).abs().masked_fill((x == y) | (x.isnan() & y.isnan()), 0)
    return float(gap.nan_to_num(math.inf).max())


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _diff(a: Any, b: Any) -> str:
    if isinstance(a, Digest) and isinstance(b, Tensor):
        return (
            "in its values" if a.shape == b.shape and a.dtype == b.dtype else f"{tuple(b.shape)} for {tuple(a.shape)}"
        )
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return f"{_describe(b)} for {_describe(a)}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(b.shape)} for {tuple(a.shape)}"
    return f"by up to {float((a.to(torch.complex128) - b.to(torch.complex128)).abs().max()):.3g}"


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]


def _warn(reason: str) -> None:
    warnings.warn(f"the captured step was not compared with the eager step: {reason}", CheckNotRun, stacklevel=3)


def _exhaust(step: Any) -> Any:
    try:
        while True:
            next(step)
    except StopIteration as end:
        return end.value


def memory_tracker() -> Any:
    """Returns PyTorch's MemTracker without its module hooks, which would count as the user's."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker._mod_tracker = _NoModules()  # type: ignore[assignment]
    return tracker


@contextmanager
def _tracker(comparison: _Comparison, batch: list[Any]) -> Iterator[Any]:
    """Yields a memory tracker that covers the models, their optimizers and the batch."""
    tracker = memory_tracker()
    reach = comparison.reach()
    owned = [t for owner in reach.owners.values() for t in owner.content().values() if isinstance(t, Tensor)]
    submodules = {id(m) for module in reach.modules for m in module.children()}
    tracker.track_external(
        *(m for m in reach.modules if id(m) not in submodules),
        *reach.optimizers,
        *(t for t in (*owned, *batch) if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)),
    )
    with tracker:
        yield tracker


class _NoModules(nullcontext[None]):
    """Placeholder for MemTracker's hooks."""

    is_bw = False
    parents = frozenset({"Global"})

    def register_user_hooks(self, *_: Any) -> None: ...

    def clear_user_hooks(self) -> None: ...
