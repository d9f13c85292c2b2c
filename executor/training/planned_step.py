"""Training under a plan: a captured step run kernel by kernel, with its swaps and recomputations.

    captured = capture(model, loss_fn, optimizer, (x, y))
    step = PlannedStep(captured, agents.make("lp_round").plan(captured.program, machine, limit))
    for x, y in loader:
        loss = step(x, y)                   # forward, backward, optimizer.step(), zero_grad()

A step captured with ``accumulate=k`` takes k pairs in one call, or one pair in each of k calls (micro.py).

A step does to the bit what the eager step does: the same kernels, on the user's own parameters, buffers and optimizer
state, with the same random numbers. All is worked out beforehand; a step is one loop over a flat list of **work**, an
entry per step of the schedule (a kernel, or one run again): moves before it (order.py), its calls (calls.py), the slots
of the table to clear, moves after it. executor/training/README.md says what holds between steps, what becomes of a
step that fails, and the reasons for these choices:

1. ``Plan.variants`` have no meaning here: PyTorch chooses algorithms itself. They count in the simulated times.
2. When swap-ins are issued follows the simulated Timeline on ``machine`` at ``limit``; see order.py.
3. Forward kernels run in grad mode, as in eager; the random state is put back for kernels that run again.
4. State that the optimizer has not created yet is created by its own ``step``, on parameters of one element.
5. ``peak_bytes`` counts the program's storages and workspaces, not ``undo_bytes`` nor other tensors of the caller.
6. The batch's storages are the caller's; one that the plan swaps must have a storage of its own.
7. Model, mode, frozen parameters are the capture's. An optimizer's numbers (lr, betas, …) are read at each step.
8. The loss is returned without a graph: ``loss.backward()`` has been done.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from executor.capture.capture import Captured
from executor.training.bindings import (
    Binding,
    Known,
    StepError,
    check,
    check_settings,
    create_state,
    device_of,
    meant,
)
from executor.training.calls import Calls
from executor.training.engines import ALIGNMENT, TransferError, engines_for
from executor.training.graph import GraphStep
from executor.training.host import HostMemory
from executor.training.micro import Part, Progress, parts, taken
from executor.training.order import Move, order
from executor.training.process import BEGIN, NOW, UNDO, Interrupt, Random, generators
from executor.training.skipping import Skipping
from executor.training.storage import Block, Blocks, Place
from executor.training.watch import Allocator, Watch
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

Action = tuple[Callable[[Any], None], Any]


class PlannedStep:
    """One training step under a plan; calling it trains.

    Args:
        captured: the step.
        plan: for ``captured.program``.
        machine: whose times decide when swap-ins are issued; the plan's by default.
        limit: bytes; the plan's by default, and the program's peak where it has none.
        undo: keep a copy on the host of all that a step overwrites.
        graph: from the second step on, replay a graph of it (graph.py).

    Attributes:
        peak_bytes: largest number of bytes in use at any kernel of any step so far; at most ``limit``.
        undo_bytes: copies of buffers on the device that are kept beside, to undo a step.
        pinned_bytes: of host memory, for what the plan swaps.
        order: what is issued when.
        graph: of ``graph=True``: how often it was captured, and its pool.
        allocator: the first step by PyTorch's allocator; None where that keeps no figures.
        differing: name -> bytes of the first step's storage and of the program's tensor, where they differ (watch.py).

    Raises:
        PlanError: the plan is for another program, or needs more host memory than the machine has.
        OutOfMemory: the plan is infeasible at the limit.
        StepError: the captured tensors cannot be trained, or host memory cannot be had.
    """

    def __init__(
        self, captured: Captured, plan: Plan, machine: Machine | None = None, limit: int | None = None,
        undo: bool = False, graph: bool = False,
    ) -> None:  # fmt: skip
        plan.check(captured.program)
        self.captured, self.plan = captured, plan
        machine = machine or Machine.load(plan.machine or "gtx1080ti")
        self.limit = limit or plan.limit or captured.program.peak_bytes
        self.order = order(captured.program, plan, machine, self.limit)
        self.program: Program = self.order.program
        self.calls = Calls(captured, self.order.schedule)
        self.device = device_of(captured)
        self.peak_bytes = 0
        self.allocator: Allocator | None = None
        self.differing: dict[str, tuple[int, int]] = {}
        self._open = False
        self.graph: GraphStep | None = None
        self._meant = {node: meant(captured, i) for i, node in enumerate(captured.placeholders)}
        self._bindings = [Binding(captured, i) for i, node in enumerate(captured.placeholders)
                          if node in captured.values and node not in captured.leaves]  # fmt: skip
        self._inputs = {captured.values[leaf] for leaf in captured.leaves if leaf in captured.values}
        self._make_blocks(graph)
        self._work = self._compile(graph)
        self._numbers: list[Any] = []  # the optimizers', when they were last read, and their types
        self._types: list[type] = []
        self._known: Known | None = None
        self._bind()
        self._parameters = [b for b in self._bindings if isinstance(b.user, nn.Parameter)]
        self._make_undo(undo)
        self._host.take()
        self.graph = GraphStep(self) if graph else None

    # ------------------------------------------------------------------------------------ construction

    def _make_blocks(self, graph: bool) -> None:
        """A block for each tensor that the plan swaps."""
        tensors = self.program.tensors
        held = self.order.held(ALIGNMENT)
        at, self.pinned_bytes = dict(held.offsets), held.footprint
        for t in at if graph else ():
            if tensors[t].persistent:  # it is there between two replays, with the others
                at[t] = self.pinned_bytes
                self.pinned_bytes += -(-tensors[t].nbytes // ALIGNMENT) * ALIGNMENT
        known = {b.tensor for b in self._bindings} | self._inputs
        for t in at:
            if tensors[t].persistent and (t not in known or t in self.calls.read_first):
                raise StepError(f"the plan swaps {tensors[t].name}, which the step reads on the host")
        try:
            engines = engines_for(self.device) if at else None
        except TransferError as error:
            raise StepError(f"the plan cannot be run: {error}") from error
        blocks = {t: Block(tensors[t].name, tensors[t].nbytes, tensors[t].persistent) for t in at}
        for b in self._bindings:
            b.block = blocks.get(b.tensor)
        self._blocks = Blocks(engines, blocks, sum(t.nbytes for t in tensors if t.persistent))
        self._host = HostMemory(self._blocks, at, self.device)

    def _compile(self, graph: bool) -> list[tuple[Any, ...]]:
        """The work of a step; see the module."""
        order, calls, program = self.order, self.calls, self.program
        rerun = {item.step.kernel for item in order.items if item.step.rerun and calls.random(item.step.kernel)}
        self._random = Random(generators(self.captured, self.device))
        self._progress = Progress(self._blocks, self._random)
        self._skipping = Skipping(self._blocks)
        # Checkpoints of the model's own put random states back: of each, the state after a kernel, by a number below 0.
        draws, n = self.captured.draws, len(program.kernels)
        # Of micro-batches, too, which a graph takes in one call; and in a capture no state can be read.
        between = () if graph else (m.drawn for m in self.captured.micro)
        kept = {k: UNDO - 1 - k for k in (*draws.values(), *between) if k >= 0}
        starts = {k: kept.get(source, BEGIN) for k, source in draws.items() if k < n}
        end = kept.get(draws[n], BEGIN) if n in draws else None
        last = max((k for k in range(n) if calls.random(k)), default=-1)
        self._whole, self._parts = parts(self.captured, order, calls, kept)
        work: list[tuple[Any, ...]] = []
        grad_mode = False
        for item, (run_calls, clear) in zip(order.items, calls.steps, strict=True):
            kernel, again = item.step.kernel, item.step.rerun
            before, after = self._actions(item.before), self._actions(item.after)
            forward = program.kernels[kernel].phase == "forward"
            if forward is not grad_mode:
                grad_mode = forward
                before.append((torch._C._set_grad_enabled, forward))
            if not again:
                if kernel in starts:
                    before.append((self._random.restore, starts[kernel]))
                if kernel in kept:
                    after.insert(0, (self._random.save, kept[kernel]))
                if kernel == last and end is not None:
                    after.append((self._random.restore, end))
            if kernel in rerun:
                before.append((self._random.replay if again else self._random.save, kernel))
                if again:
                    after.insert(0, (self._random.restore, NOW))
            if not again and (asked := calls.asks.get(kernel)) is not None:
                after.insert(0, (self._skipping.ask, asked))
            if not (again or graph) and (loss := calls.losses.get(kernel)) is not None:  # the plan may free it at once
                run_calls = [*run_calls, (loss, self._progress.keep, itemgetter(slice(loss, loss + 1)), {})]
            if not again and kernel in calls.skipped:
                self._skipping.add(len(work), calls.skipped[kernel])
            work.append((tuple(before), item.charged, tuple(run_calls), clear, item.freed, tuple(after)))
        self._watch = Watch(order, calls, self._blocks, self.device)
        self._watch.install(work)
        self._skipping.work = work
        first_write = (i for i, item in enumerate(order.items) if program.kernels[item.step.kernel].phase == "optimizer"
                       and not item.step.rerun and any(program.tensors[t].persistent
                                                       for t in program.kernels[item.step.kernel].outputs))  # fmt: skip
        self._commit = next(first_write, len(work))
        return work

    def _actions(self, moves: tuple[Move, ...]) -> list[Action]:
        blocks, of, memory = self._blocks, self.calls.of, self.order.schedule.blocks
        found = {"out": blocks.leave, "release": blocks.release}
        acts = {"in": blocks.swap_in, "reclaim": blocks.reclaim, "wait": blocks.wait}
        progress, later = self._progress, set[int]().union(*(part.tensors for part in self._parts[1:]))

        def come(kind: str, act: Callable[[Any], None], t: int) -> Callable[[Any], None]:
            return lambda which: progress.count(kind, t) if t in progress.absent else act(which)

        actions: list[Action] = []
        for kind, b in moves:
            if memory[b].nbytes:
                t = memory[b].owner
                block = blocks.blocks[t]
                act, which = (found[kind], (block, of.get(b, ()))) if kind in found else (acts[kind], block)
                actions.append((come(kind, act, t) if t in later else act, which))
        return actions

    def _make_undo(self, everything: bool) -> None:
        """Where the content of what a step overwrites is kept: copies, by device and type, and their bindings."""
        early, late = set(), set()
        for i, item in enumerate(self.order.items):
            if not item.step.rerun:
                (early if i < self._commit else late).update(self.program.kernels[item.step.kernel].outputs)
        self._everything = everything
        self._written_inputs = self._inputs & early
        self._undo_batch: list[tuple[Tensor, Tensor]] = []
        pairs = [(torch.empty_like(b.own), b) for b in self._bindings if b.tensor in early]
        self.undo_bytes = sum(copy.nbytes for copy, _ in pairs)
        rest = [b for b in self._bindings if b.tensor in late - early] if everything else []
        self._host.kept, self._host.rest = pairs, rest
        self._undoes_away = any(b.tensor in self._blocks.blocks for b in (*(b for _, b in pairs), *rest))

    # ------------------------------------------------------------------------------------ what a step runs on

    def look(self) -> None:
        """Takes the user's tensors and numbers as they are now; raises StepError where they do not fit."""
        if self._known is None or not self._known.same():
            self._known = None
            self._bind()
            check(self.captured, self._parameters)
            self._known = Known(self.captured, self._bindings, self._parameters)
        check_settings(self.captured)
        self._read_numbers()
        if not self._host.taken:
            self._host.take()

    def _bind(self) -> None:
        """Finds the user's tensors, creates state that is missing, and takes what changed since the last step."""
        changed = [b for b in self._bindings if not b.found()]
        if not changed:
            return
        if self._blocks.engines:
            self._blocks.engines.synchronize()
        try:
            self._take_state(changed)
        except StepError:
            for b in changed:
                b.user = None  # type: ignore[assignment]  # the next step looks again
            raise
        self._table, self._types = self.calls.table.copy(), []
        for b in self._bindings:
            self._table[self.calls.slots[b.node]] = b.own
        with torch.no_grad():
            for out, function, get, options in self.calls.fixed:
                self._table[out] = function(*get(self._table), **options)

    def _read_numbers(self) -> None:
        """Learning rates and the like as they are now."""
        numbers = self.captured.numbers
        present = [option() for option in numbers.options]
        if list(map(type, present)) == self._types and present == self._numbers:
            return
        if wrong := numbers.broken(dict(zip(numbers.options, present, strict=True))):
            raise StepError(
                f"the optimizer's {wrong.key} was {wrong.was} at the capture and is {wrong()} now, with which its step "
                "does something else; capture the step again"
            )
        for out, function, get, options in self.calls.numbers:
            self._table[out] = function(*get(self._table), **options)
        for options, key, slot in self.calls.patches:
            options[key] = self._table[slot]
        self._numbers, self._types = present, list(map(type, present))

    def _take_state(self, changed: list[Binding]) -> None:
        for b in changed:
            if b.present() is None:
                create_state(b, self._bindings)
            b.take(self.program.tensors[b.tensor].nbytes)
        groups: dict[int, list[Binding]] = {}
        for b in self._bindings:
            groups.setdefault(b.tensor, []).append(b)
        for t in dict.fromkeys(b.tensor for b in changed):
            if len({b.own.untyped_storage()._cdata for b in groups[t]}) > 1:
                names = " and ".join(b.name for b in groups[t])
                raise StepError(f"{names} shared their memory when the step was captured; capture it again")
            if block := self._blocks.blocks.get(t):
                if block.place is Place.HOST:  # what was there is no longer the user's
                    self._blocks.used += block.nbytes
                block.place, block.shown, block.users = Place.DEVICE, False, groups[t]
                block.adopt()
        if self.graph:  # it will be captured again
            self.graph.close()
        self.finish()  # no view can be made of what is away

    # ------------------------------------------------------------------------------------ a step

    @property
    def done(self) -> int:
        """Micro-batches of the step under way that are done; 0 between steps."""
        return self._progress.done

    def __call__(self, *args: Any) -> Any:
        """One training step, or its next micro-batch where it was captured with several and ``args`` are one.

        Between two micro-batches the step is under way: what the plan swaps may not be looked at, gradients are the
        step's own, and memory stays within the limit. A call that fails undoes all of the step: the next one is its
        first micro-batch.

        Returns:
            What the captured step returns: a tensor (the loss), or a tuple of them; of a micro-batch its part of the
            loss.

        Raises:
            StepError: the batch or the model is not as at the capture (nothing has happened then), or the step failed.
        """
        part, batch = taken(self, args)
        blocks, progress, commit, peak = self._blocks, self._progress, self._commit, self.peak_bytes
        if progress.done:
            check(self.captured, self._parameters)
            check_settings(self.captured)
            self._read_numbers()
        else:
            self.look()
            if self.graph and part is not self._whole:
                raise StepError("a graph takes all micro-batches of a step in one call")
            if self.graph and self.graph.warm:
                return self.graph(self, batch)
            blocks.values = self._table.copy()
        table, at = blocks.values, part.begin - 1
        with Interrupt() as interrupt, torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            try:
                self._begin(part, batch, table)
                for at, (before, charged, calls, clear, freed, after) in enumerate(
                    islice(self._work, part.begin, part.end), part.begin
                ):
                    if at <= commit:
                        if interrupt.stop and at < commit:
                            raise KeyboardInterrupt
                        blocks.tolerant = at == commit
                    for act, t in before:
                        act(t)
                    blocks.used += charged
                    if blocks.used > peak:
                        peak = self.peak_bytes = blocks.used
                    for out, function, get, options in calls:
                        table[out] = function(*get(table), **options)
                    for slot in clear:
                        table[slot] = None
                    blocks.used -= freed
                    for act, t in after:
                        act(t)
                results = (progress.loss,) if progress.alone else tuple(table[slot] for slot in self.calls.outputs)
                if part.end < len(self._work):
                    progress.pause(part, self._parts[progress.done + 1])
                else:
                    blocks.back(t for t in self._inputs if t in blocks.blocks)
                    blocks.settle(wait=not self._open or self._undoes_away)
                    self._end()
            except BaseException as error:
                self._fail(at, part, error)
                raise
        if not (progress.done or self._watch.over):
            self.allocator, self.differing = self._watch.end(self._work, self.limit)
        self._report("the step went on to its end, and the model is as after it")
        if self.graph:
            self.graph.warm = True
        return results[0] if len(results) == 1 else results

    def _begin(self, part: Part, batch: dict[fx.Node, Tensor], table: list[Any]) -> None:
        """What can be undone is noted; the batch is in its place, and what the plan has away by then is."""
        blocks, progress = self._blocks.blocks, self._progress
        first = progress.done == 0
        if first:
            self._random.save(BEGIN)
            self._random.states[UNDO] = self._random.states[BEGIN]
            for into, bindings in self._host.undo:
                torch._foreach_copy_(into, [b.seen for b in bindings], non_blocking=True)
            progress.alone = part is not self._whole
            progress.absent = (self._inputs - part.tensors) & blocks.keys() if progress.alone else set()
        else:
            progress.resume(part)
            for out, *_ in self.calls.numbers:
                table[out] = self._table[out]
        for node, tensor in batch.items():
            t = self.captured.values.get(node, -1)
            if t in blocks:
                blocks[t].on(tensor)
                self._blocks.engines.borrow(tensor)  # type: ignore[union-attr]
            table[self.calls.slots[node]] = tensor.detach()
            if t in part.reads_on:
                progress.needed.append((tensor, tensor._version))
            if t in self._written_inputs:
                self._undo_batch.append((tensor, tensor.clone()))
        for out, function, get, options in part.first:
            table[out] = function(*get(table), **options)
        if first:
            progress.start(self.order.start)
            if not self._watch.over:
                tensors = self.program.tensors
                self._watch.begin((b.name, b.own, tensors[b.tensor].nbytes) for b in self._bindings if b.block is None)
        else:
            for t in part.tensors & blocks.keys():
                progress.arrive(t)

    def _end(self) -> None:
        """The step is over or undone."""
        self._skipping.end()
        self._progress.end()
        self._blocks.tolerant, self._blocks.values, self._undo_batch = False, [], []
        for t in self._inputs & self._blocks.blocks.keys():  # the caller's memory
            self._blocks.blocks[t].storage = self._blocks.blocks[t].bytes = None

    def _report(self, left: str) -> None:
        """Raises StepError where copies have failed although nothing is lost."""
        faults, self._blocks.faults = self._blocks.faults, []
        if faults:
            raise StepError(f"{faults[0]}; {left}")

    @torch.no_grad()
    def _fail(self, at: int, part: Part, error: BaseException) -> None:
        """A step has failed before its end: see Faults in the module. Raises StepError unless it was interrupted."""
        what = "the step"
        if at >= part.begin:
            k = self.order.items[at].step.kernel
            what = f"kernel {k} ({self.program.kernels[k].name})"
        if alone := self._progress.alone:
            what += f" in micro-batch {self._progress.done + 1} of {len(self._parts)}"
        reason = f"{type(error).__name__}: {error}".splitlines()[0] if not isinstance(error, TransferError) else error
        undone = at < self._commit or self._everything
        try:
            self._undo(at >= 0, undone)
        except Exception as second:
            raise StepError(f"{what} failed: {reason}; then the model could not be restored: {second}") from error
        left = "the optimizer had begun, and what it updated before this kernel is a step ahead of the rest"
        if undone:
            left = "the model is as before the step" + (", which begins anew with micro-batch 1" if alone else "")
        if isinstance(error, Exception):
            raise StepError(f"{what} failed: {reason}; {left}") from error
        if not undone:
            error.add_note(f"{what} was broken off; {left}")

    def _undo(self, began: bool, restore: bool) -> None:
        """The step under way is given up: copies end, memory is returned, and (``restore``) the model is as before."""
        self._blocks.values.clear()
        self._progress.end()
        try:
            self._blocks.tolerant, self._blocks.faults = False, []
            self._blocks.drain(self.order.start.keys() - self._inputs)
            self._blocks.settle()
            if restore:
                for copies, bindings in self._host.undo if began else ():  # before that nothing is written
                    torch._foreach_copy_([b.seen for b in bindings], copies)
                for tensor, copy in self._undo_batch:
                    tensor.copy_(copy)
                self._random.restore(UNDO)
        finally:
            self._end()

    # ------------------------------------------------------------------------------------ between steps

    def finish(self) -> None:
        """All of the user's tensors are on the device again, and no copy is under way. Steps may follow.

        Until then other steps may have its pinned memory. A step of which only some micro-batches are done is undone.
        """
        if self._progress.done:
            with torch.no_grad():
                self._undo(began=True, restore=True)
        self._blocks.tolerant = True
        if self._blocks.engines:
            self._blocks.engines.begin()
        try:
            self._blocks.back(t for t, block in self._blocks.blocks.items() if block.users)
        finally:
            self._blocks.tolerant = False
        if not (self.graph and self.graph.graph):  # its replays write where its capture did
            self._host.give()
        self._report("it was repeated, and everything is on the device")

    def __enter__(self) -> PlannedStep:
        """Until the end of the ``with``, copies run on over the boundary of steps."""
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self.finish()
