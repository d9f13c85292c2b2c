"""Runs a captured training step under a plan, kernel by kernel, with its swaps and recomputations.

    captured = capture(model, loss_fn, optimizer, (x, y))
    step = PlannedStep(captured, agents.make("lp_round").plan(captured.program, machine, limit))
    for x, y in loader:
        loss = step(x, y)                   # forward, backward, optimizer.step(), zero_grad()

A step captured with ``accumulate=k`` takes k pairs in one call, or one pair in each of k calls (progress.py).
A step is bit-identical to the eager step: it runs the same kernels with the same random numbers on the user's own
parameters, buffers and optimizer state. executor/training/README.md describes the state between steps, failures and
design choices.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx, nn

from executor.capture.ambient import STALE_WEIGHTS
from executor.capture.captured import Captured
from executor.capture.python_values import Change
from executor.memory.engines import TransferError, line
from executor.training.bindings import (
    Binding,
    ChangeDetector,
    ReboundSlots,
    StepError,
    cast_weights,
    check_model,
    check_settings,
    create_state,
)
from executor.training.graph import GraphStep, NoGraph, beside_bytes, graph_refusal, not_by_default
from executor.training.issue_order import order
from executor.training.memory_check import Allocator, FirstStepObserver
from executor.training.memory_source import Place
from executor.training.node_calls import Calls, run_calls
from executor.training.progress import Interrupt, Part, RandomKey
from executor.training.work import StepState
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.pool.packed import DoesNotPack, first_that_packs
from simulator.program import Program
from simulator.schedule import OutOfMemory, Schedule, lower
from simulator.timeline import Timeline


def _timeline_of_graph(captured: Captured, plan: Plan, schedule: Schedule, machine: Machine, limit: int) -> Timeline:
    """Simulates a plan at a limit reduced so far that its packing and a graph's other memory fit into ``limit``.

    If no packing fits, the simulation uses the fewest bytes that the plan needs, and the capture decides.
    """
    machine = machine.in_graph()
    max_bytes = min(limit, plan.limit or limit)

    def attempt(nbytes: int) -> tuple[Timeline, Timeline]:
        timeline = simulate(captured.program, plan, machine, min(nbytes, max_bytes), schedule=schedule)
        return timeline, timeline

    try:
        return first_that_packs(max(limit - beside_bytes(captured), 1), attempt, machine.alignment)[0]
    except (DoesNotPack, OutOfMemory):
        return simulate(captured.program, plan, machine, min(limit, schedule.required_bytes), schedule=schedule)


class PlannedStep:
    """A training step under a plan; call it to train.

    Args:
        captured: the captured step.
        plan: plan for ``captured.program``.
        machine: machine whose simulated times determine when swap-ins are issued; the plan's by default.
        limit: memory limit in bytes; the plan's by default, or the program's peak if the plan has none.
        undo: whether to keep host copies of all tensors that a step overwrites.
        graph: True replays a CUDA graph from the second step on (graph.py), or raises StepError if that is impossible;
            None does so on CUDA if possible. A plan below the limit leaves room for holes in the packing.

    Attributes:
        peak_bytes: peak bytes in use at any kernel of any step so far; at most ``limit``.
        pinned_bytes: bytes of pinned host memory for swapped tensors.
        order: issue order of the plan.
        state: compiled step (work.py), for benchmarks and tests.
        graph: the CUDA graph with its memory and number of captures, or None if the step runs kernel by kernel.
        not_graph: why the step runs kernel by kernel, or None if it does not.
        allocator: allocator statistics of the first step, or None if the allocator keeps none.
        grad_norm: result of ``clip_grad_norm_`` in the last step, or None without gradient clipping.
        differing: name -> bytes of the first step's storage and of the program's tensor, where they differ.

    Raises:
        PlanError: the plan is for another program, or needs more host memory than the machine has.
        OutOfMemory: the plan is infeasible at the limit.
        StepError: the captured tensors cannot be trained, or host memory cannot be allocated.
    """

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        machine: Machine | None = None,
        limit: int | None = None,
        undo: bool = False,
        graph: bool | None = None,
    ) -> None:
        if captured.python.unrepeatable:
            raise StepError(captured.python.unrepeatable)
        self.captured = captured
        self.plan = plan
        machine = machine or Machine.load(plan.machine or "gtx1080ti")
        self.limit = limit or plan.limit or captured.program.peak_bytes
        self.not_graph = "graph=False" if graph is False else None if graph else not_by_default(captured, undo)
        plan.check(captured.program)
        schedule = lower(captured.program, plan)
        calls = Calls(captured, schedule)
        self.not_graph = self.not_graph or graph_refusal(captured, calls, undo)
        if self.not_graph and graph:
            raise StepError(
                f"the step cannot be a graph: {self.not_graph}; leave out graph=True to run its kernels one by one"
            )
        if self.not_graph is None:
            timeline = _timeline_of_graph(captured, plan, schedule, machine, self.limit)
        else:
            timeline = simulate(captured.program, plan, machine, self.limit, schedule=schedule)
        self.order = order(schedule, timeline, self.not_graph is None)
        self.state = StepState(captured, self.order, calls, graph=self.not_graph is None)
        self.program: Program = self.order.program
        self.calls = self.state.calls
        self.device = self.state.device
        self.pinned_bytes = self.state.pinned_bytes

        # Results of the steps so far.
        self.peak_bytes = 0
        self.grad_norm: Tensor | None = None
        self.allocator: Allocator | None = None
        self.differing: dict[str, tuple[int, int]] = {}
        self._observer = FirstStepObserver(self.state)
        self._open = False
        self._is_over = False  # the first step, to which the capture is limited, has run

        # The user's tensors and numbers, as last seen.
        self._numbers: list[Any] = []  # the optimizers' numbers, each with its type
        self._detector: ChangeDetector | None = None
        self._cast_weights = cast_weights(captured)
        self.graph: GraphStep | None = None
        self._with_grad: list[Binding] = []  # parameters whose gradients are kept
        self.kept_gradients: list[Binding] = []  # those that the last step, of any shape, has kept
        self._bind()
        self._parameters = [b for b in self.state.bindings if isinstance(b.user, nn.Parameter)]
        owners = {captured.placeholders[i] for i in captured.returned.gradients}
        self._with_grad = [b for b in self._parameters if b.node in owners]
        self._moves = captured.python.moves
        self._rebound = self._rebound_slots()

        self._prepare_undo(undo)
        self.state.host.allocate()
        if self.not_graph is None:
            self.graph = GraphStep(self.state, self.limit, bool(graph))

    def _prepare_undo(self, undo_all: bool) -> None:
        """Prepares undo copies of overwritten tensors, on the device or in the step's host memory."""
        state = self.state
        state.undoes_all = undo_all
        late = {t for kernel in self.program.kernels for t in kernel.outputs} - state.early if undo_all else set()
        early = [b for b in state.bindings if b.tensor in state.early]
        later = [b for b in state.bindings if b.tensor in late]
        state.host.copies = [(torch.empty_like(b.device_tensor), b) for b in early]
        state.host.bindings = list(later)
        self._undoes_swapped = any(b.block for b in (*early, *later))

    # ------------------------------------------------------------------------------------ binding

    def _rebound_slots(self) -> ReboundSlots:
        rebound = self.captured.returned.rebound
        return ReboundSlots([b.home for b in self.state.bindings if b.index in rebound and b.home])

    def _python_change(self) -> Change | None:
        """Returns the first changed Python value; finds the tensors of objects that equal ones have replaced."""
        change = self.captured.python.change()
        if self._moves != self.captured.python.moves:
            self._moves = self.captured.python.moves
            for b in self.state.bindings:
                b.home = self.captured.homes[b.index]
            self._rebound = self._rebound_slots()
            self._detector = None
        return change

    def look(self) -> None:
        """Binds the user's current tensors and numbers; raises StepError if they do not match the capture.

        It also detaches the gradients that the last step kept.
        """
        if self._is_over:
            raise StepError("later steps differ from the captured first one: capture the step again, as fit does")
        for b in (*self.kept_gradients, *self._with_grad):
            b.user.grad = None
        change = self._python_change()
        self.kept_gradients = []
        self._rebound.separate()
        if self._detector is None or not self._detector.is_unchanged():
            self._detector = None
            self._bind()
            check_model(self.captured, self._parameters)
            self._detector = ChangeDetector(self.captured, self.state.bindings, self._parameters)
        check_settings(self.captured, change)
        if self._cast_weights is not None and self._cast_weights.are_stale():
            raise StepError(STALE_WEIGHTS)
        self._read_numbers()
        self.state.checked = self._detector, self._numbers
        if not self.state.host.is_allocated:
            self.state.host.allocate()

    def _bind(self) -> None:
        """Binds the user's tensors that have changed since the last step, and creates missing optimizer state."""
        state = self.state
        changed = [b for b in state.bindings if not b.is_unchanged()]
        if not changed and state.table:
            return
        state.blocks.engines.synchronize()
        previous = [(b.user, b.device_tensor, b.visible) for b in changed]
        try:
            self._bind_tensors(changed)
        except StepError:  # the next step binds them again, and what is on the host belongs to the previous tensors
            for b, tensors in zip(changed, previous, strict=True):
                b.user, b.device_tensor, b.visible = tensors
            raise
        state.table = self.calls.table.copy()
        self._numbers = []
        for b in state.bindings:
            state.table[self.calls.slots[b.node]] = b.device_tensor
        with torch.no_grad():
            run_calls(self.calls.fixed, state.table)

    def _read_numbers(self) -> None:
        """Reads the current optimizer numbers, such as learning rates."""
        numbers = self.captured.numbers
        table = self.state.table
        current = {option: option() for option in numbers.options}
        typed_values = [(type(value), value) for value in current.values()]
        if typed_values == self._numbers:
            return
        if stale := numbers.first_violation(current):
            raise StepError(
                f"the optimizer's {stale.key} was {stale.captured} at the capture and is {stale()} now, which changes "
                "the operations of its step; capture the step again"
            )
        run_calls(self.calls.numbers, table)
        for options, key, slot in self.calls.patches:
            options[key] = table[slot]
        self._numbers = typed_values

    def _bind_tensors(self, changed: list[Binding]) -> None:
        blocks = self.state.blocks
        bindings = self.state.bindings
        for b in changed:
            if b.current() is None:
                create_state(b, bindings)
            b.bind(self.program.tensors[b.tensor].nbytes)
        groups: dict[int, list[Binding]] = {}
        for b in bindings:
            groups.setdefault(b.tensor, []).append(b)
        for t in dict.fromkeys(b.tensor for b in changed):
            if len({b.device_tensor.untyped_storage()._cdata for b in groups[t]}) > 1:
                names = " and ".join(b.name for b in groups[t])
                raise StepError(f"{names} shared their memory when the step was captured; capture it again")
            if block := blocks.blocks.get(t):
                if block.place is Place.HOST:  # the host copy is no longer the user's
                    blocks.used += block.nbytes
                block.place = Place.DEVICE
                block.is_shown = False
                block.users = groups[t]
                block.adopt()
        if self.graph:  # the step will be captured again
            self.graph.close()
        self.finish()  # no view can be created of a swapped-out storage

    # ------------------------------------------------------------------------------------ a step

    @property
    def done(self) -> int:
        """Number of finished micro-batches of the current step; 0 between steps."""
        return self.state.progress.done

    def __call__(self, *args: Any) -> Any:
        """Runs one training step, or its next micro-batch if the step has several and ``args`` is one of them.

        Between two micro-batches, swapped tensors must not be read, gradients belong to the step, and memory stays
        within the limit. A failed call undoes the whole step, and the next call is its first micro-batch.

        Args:
            args: the batch, as at the capture.

        Returns:
            The captured step's result, detached: the loss, or tensors in the structure that the step returns. For a
            micro-batch, its part of the loss.

        Raises:
            StepError: the batch or the model differs from the capture (nothing has run then), or the step failed.
        """
        state = self.state
        part, batch = state.match_batch(args)
        blocks = state.blocks
        progress = state.progress
        commit = state.commit
        peak = self.peak_bytes
        if progress.done:
            check_model(self.captured, self._parameters)
            check_settings(self.captured, self._python_change())
            self._read_numbers()
        else:
            self.look()
            if self.graph and part is not state.whole:
                raise StepError("a graph needs all micro-batches of a step in one call")
            if self.graph and self.graph.is_warm:
                try:
                    outputs = self.graph(batch, wait=not self._open)
                    self.peak_bytes = max(self.peak_bytes, self.graph.peak_bytes)
                    return self._finish_step(outputs)
                except NoGraph as error:
                    if not self._falls_back(error):
                        raise
            blocks.values = state.table.copy()
        table = blocks.values
        index = part.begin - 1
        with Interrupt() as interrupt, torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            try:
                self._begin(part, batch, table)
                # Unpacked: reading six fields by name would cost 4 % of the host time around a kernel.
                for index, (before, charged, calls, clear, freed, after) in enumerate(
                    islice(state.work, part.begin, part.end), part.begin
                ):
                    if index <= commit:
                        if index == commit:
                            blocks.tolerant = True
                        elif interrupt.stop:
                            raise KeyboardInterrupt
                    for act, argument, _ in before:
                        act(argument)
                    blocks.used = used = blocks.used + charged
                    if used > peak:
                        peak = self.peak_bytes = used
                    for out, function, get, options in calls:  # an empty ``**options`` would cost time
                        table[out] = function(*get(table), **options) if options else function(*get(table))
                    for slot in clear:
                        table[slot] = None
                    blocks.used -= freed
                    for act, argument, _ in after:
                        act(argument)
                is_last = part.end == len(state.work)
                loss = progress.loss if progress.by_micro_batch else None
                outputs = [table[slot] for slot in self.calls.outputs] if is_last else []
                if not is_last:
                    progress.pause(part, state.parts[progress.done + 1])
                else:
                    blocks.swap_in_all(t for t in state.inputs if t in blocks.blocks)
                    blocks.settle(wait=not self._open or self._undoes_swapped)
                    state.end()
            except BaseException as error:
                self._fail(index, part, error)
                raise
        if not (progress.done or self._observer.is_done):
            self.allocator, self.differing = self._observer.end(self.limit)
        self._report("the step finished, and the model is as after it")
        if self.graph:
            self.graph.is_warm = True
        result = self._finish_step(outputs) if is_last else None
        return result if loss is None else loss

    def _falls_back(self, error: NoGraph) -> bool:
        """Switches to kernel-by-kernel execution after a failed capture; returns False if ``graph=True`` forbids it."""
        if self.graph is None or self.graph.always_recapture:
            return False
        self.graph.close()
        self.not_graph = str(error)
        self.graph = None
        warnings.warn(f"from now on the step runs kernel by kernel: {error}", stacklevel=3)
        return True

    @property
    def issued(self) -> str:
        """Execution mode of the step, with the reason if it is not a CUDA graph."""
        if self.graph is None:
            return f"kernel by kernel: {self.not_graph}"
        if self.graph.graph is None:
            return "kernel by kernel the first time, then as one CUDA graph"
        return f"as one CUDA graph, which takes {self.graph.peak_bytes:,} bytes"

    def _assign_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Assigns gradients to the parameters, on the device of each parameter."""
        for b, gradient in zip(self._with_grad, gradients, strict=True):
            b.user.grad = None if gradient is None else gradient.to(b.user.device)

    def _finish_step(self, outputs: Sequence[Tensor]) -> Any:
        """Finishes a step: assigns kept gradients, applies effects and returns the step's result."""
        self._is_over = self.captured.is_first
        returned = self.captured.returned
        first = sum(returned.tensors)
        end = first + len(self._with_grad)
        self._assign_gradients(outputs[first:end])
        self.kept_gradients = self._with_grad
        if returned.norm:
            self.grad_norm = outputs[end]
        for effect in returned.effects:
            effect.apply(outputs[end + returned.norm :])
        for values in self.captured.python.first_run_values:
            values.restore()
        self._rebound.remember()
        if self._cast_weights is not None:
            self._cast_weights.remember()
        for optimizer, _ in self.captured.settings:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # LR schedulers check whether it has stepped
        return returned.result(outputs)

    def _begin(self, part: Part, batch: dict[fx.Node, Tensor], table: list[Any]) -> None:
        """Snapshots undo state, binds the batch and applies the initial tensor placement."""
        state = self.state
        blocks = self.state.blocks.blocks
        progress = self.state.progress
        is_first = progress.done == 0
        if is_first:
            state.random.save(RandomKey.BEGIN)
            state.random.states[RandomKey.UNDO] = state.random.states[RandomKey.BEGIN]
            for copies, bindings in state.host.undo:
                torch._foreach_copy_(copies, [b.visible for b in bindings], non_blocking=True)
            progress.by_micro_batch = part is not state.whole
            progress.expect((state.inputs - part.tensors) & blocks.keys() if progress.by_micro_batch else set())
        else:
            progress.resume(part)
            for out, *_ in self.calls.numbers:
                table[out] = state.table[out]
        for node, tensor in batch.items():
            t = self.captured.values.get(node, -1)
            if t in blocks:
                blocks[t].attach(tensor)
            # Of a subclass of Tensor, as captured; autograd's gradients would be of the subclass else.
            table[self.calls.slots[node]] = tensor.detach().as_subclass(Tensor)
            if t in part.read_later:
                progress.needed_batches.append((tensor, tensor._version))
            if t in state.early:
                state.undo_batch.append((tensor, tensor.clone()))
        run_calls(part.first, table)
        if is_first:
            state.blocks.start(self.order.start)
            if not self._observer.is_done:
                self._observer.begin()
        else:
            for t in part.tensors & blocks.keys():
                progress.arrive(t)

    def _report(self, outcome: str) -> None:
        """Raises StepError if copies have failed without loss of content."""
        faults = self.state.blocks.faults
        self.state.blocks.faults = []
        if faults:
            raise StepError(f"{faults[0]}; {outcome}: continue, or plan with fewer swaps")

    @torch.no_grad()
    def _fail(self, index: int, part: Part, error: BaseException) -> None:
        """Undoes a failed step if possible; raises StepError unless the step was interrupted."""
        state = self.state
        subject = "the step"
        if index >= part.begin:
            k = self.order.items[index].step.kernel
            subject = f"kernel {k} ({self.program.kernels[k].name})"
        if is_split := state.progress.by_micro_batch:
            subject += f" in micro-batch {state.progress.done + 1} of {len(state.parts)}"
        reason = error if isinstance(error, TransferError) else line(error)
        is_undone = index < state.commit or state.undoes_all
        try:
            self._undo(index >= 0, is_undone)
        except Exception as failure:
            raise StepError(
                f"{subject} failed: {reason}; then the model could not be restored: {failure}; load a checkpoint"
            ) from error
        outcome = "the optimizer had begun: tensors that it updated before this kernel are one step ahead of the others"
        if is_undone:
            outcome = "the model is as before the step" + (", which restarts with micro-batch 1" if is_split else "")
        if isinstance(error, Exception):
            raise StepError(
                f"{subject} failed: {reason}; {outcome}, so {'call it again' if is_undone else 'load a checkpoint'}"
            ) from error
        if not is_undone:
            error.add_note(f"{subject} was interrupted; {outcome}")

    def _undo(self, has_begun: bool, restore: bool) -> None:
        """Abandons the current step: ends copies, frees memory and, with ``restore``, restores the model."""
        state = self.state
        blocks = self.state.blocks
        blocks.values.clear()
        state.progress.end()
        try:
            blocks.tolerant = False
            blocks.faults = []
            blocks.drain(self.order.start.keys() - state.inputs)
            blocks.settle()
            if restore:
                for copies, bindings in state.host.undo if has_begun else ():  # nothing is written before
                    torch._foreach_copy_([b.visible for b in bindings], copies)
                for tensor, copy in state.undo_batch:
                    tensor.copy_(copy)
                state.random.restore(RandomKey.UNDO)
        finally:
            state.end()

    # ------------------------------------------------------------------------------------ between steps

    def finish(self) -> None:
        """Returns all of the user's tensors to the device and waits for copies; more steps may follow.

        Other steps may use the pinned memory until the next step. A step with unfinished micro-batches is undone.
        """
        if self.done:
            with torch.no_grad():
                self._undo(has_begun=True, restore=True)
        blocks = self.state.blocks
        blocks.tolerant = True
        blocks.engines.begin()
        shown = [b for b in self.state.bindings if b.block and b.block.is_shown]
        replaced = [(b.user, b.user.data) for b in shown if not b.visible.is_set_to(b.user)]
        try:
            blocks.swap_in_all(t for t, block in blocks.blocks.items() if block.users)
        finally:
            blocks.tolerant = False
        for tensor, data in replaced:  # that the user has assigned since the last step
            tensor.data = data
        self._assign_gradients([b.user.grad for b in self._with_grad])
        if not (self.graph and self.graph.graph):  # a graph's replays keep using the captured addresses
            self.state.host.release()
        self._report("the copy was repeated, and all tensors are on the device")

    def __enter__(self) -> PlannedStep:
        """Lets copies continue across step boundaries until the end of the ``with`` block."""
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self.finish()
