"""Compiles a step into a flat list of work items, which a loop runs without consulting the plan.

StepState combines an issue order (issue_order.py) with calls (node_calls.py). PlannedStep runs the list at once
or by micro-batch (progress.py), and graph.py captures it as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from executor.capture.batches import constant_key, flatten, format_structure
from executor.capture.captured import Captured
from executor.capture.state import first_hook, view_memory
from executor.memory import ALIGNMENT
from executor.memory.engines import Engines, TransferError, engines_for
from executor.training.bindings import Binding, compare, device_of, inputs_of, layout_of
from executor.training.issue_order import Move, MoveKind, Order
from executor.training.memory_source import Block, Blocks, HostMemory, StepError, is_movable, is_shared
from executor.training.node_calls import Call, Calls
from executor.training.progress import Part, Progress, Random, RandomKey, parts
from simulator.schedule import Schedule

Action = tuple[Callable[[Any], None], Any, MoveKind | None]  # function, its argument, and which move it is, if any


class WorkItem(NamedTuple):
    """Work of one schedule step: a kernel or a recomputation.

    Attributes:
        before, after: actions: moves, and changes of the grad mode and of random states.
        charged: bytes allocated, workspace included.
        freed: bytes freed at its end.
        calls: calls of its operator and views.
        clear: table slots cleared after the calls.
    """

    before: tuple[Action, ...]
    charged: int
    calls: tuple[Call, ...]
    clear: tuple[int, ...]
    freed: int
    after: tuple[Action, ...]


class UpdateSkipper:
    """Skips the optimizer update if a GradScaler has found non-finite gradients.

    The plan's moves are made in any case. Skipped kernels that write no persistent tensor still run, because the plan
    may move their outputs; the others write nothing. The state therefore stays bit-identical, and later work (the
    scaler's update) continues.
    """

    def __init__(self, blocks: Blocks, work: list[WorkItem]) -> None:
        self._blocks = blocks
        self._work = work
        self.calls: dict[int, tuple[Call, ...]] = {}  # item -> its calls if the update is skipped
        self._normal: dict[int, WorkItem] = {}

    def decide(self, slot: int) -> None:
        """Decides before the update whether to skip it, by the number in this table slot."""
        if self._blocks.values[slot]:
            for i, calls in self.calls.items():
                self._normal[i] = self._work[i]
                self._work[i] = self._work[i]._replace(calls=calls)

    def end(self) -> None:
        """Resets the work list after the step."""
        for i, item in self._normal.items():
            self._work[i] = item
        self._normal.clear()


class StepState:
    """Compiled step and its progress.

    Args:
        captured: the captured step.
        order: the plan's issue order.
        calls: calls of each schedule step.
        graph: whether the step is captured as a CUDA graph; then each swapped persistent tensor gets its own host slot.

    Attributes:
        blocks: tensors that the plan swaps.
        host: their pinned memory, of ``pinned_bytes``.
        bindings: the user's tensors.
        inputs: tensors of the batch.
        layouts: expected layout of each placeholder.
        work: work items, one per schedule step.
        table: values that persist between steps: constants, the user's tensors and their views.
        commit: index of the first item whose writes cannot be undone.
        early: tensors that earlier items write.
        whole, parts: the whole step as one part, and its micro-batches.
        checked: results of the last check of the user's tensors and numbers; replaced by new objects after a change.
        undoes_all: whether tensors overwritten after ``commit`` are copied, too, so that the whole step can be undone.
        undo_batch: tensors of the batch that the step overwrites, with their copies.

    Raises:
        StepError: the captured tensors cannot be trained under this plan.
    """

    def __init__(self, captured: Captured, order: Order, calls: Calls, graph: bool) -> None:
        self.captured = captured
        self.order = order
        self.calls = calls
        self.device = device_of(captured)
        self.inputs = inputs_of(captured)
        tensors = order.program.tensors
        self.bindings = [
            Binding(captured, i)
            for i, node in enumerate(captured.placeholders)
            if node in captured.values and node not in captured.leaves
        ]
        self.layouts = {node: layout_of(captured, i) for i, node in enumerate(captured.placeholders)}
        self.commit, self.early = before_the_update(order.schedule)
        places, self.pinned_bytes = self._host_places(graph)
        try:
            engines = engines_for(self.device) if places else Engines()  # copies nothing
        except TransferError as error:
            raise StepError(f"the plan cannot be run: {error}") from error
        swapped = {t: Block(tensors[t].name, tensors[t].nbytes, tensors[t].persistent) for t in places}
        for b in self.bindings:
            b.block = swapped.get(b.tensor)
        self.blocks = Blocks(engines, swapped, sum(t.nbytes for t in tensors if t.persistent))
        self.host = HostMemory(self.blocks, places, self.device)
        self.random = Random(captured, self.device)
        self.progress = Progress(self.blocks, self.random)
        # Random states that the model's checkpoints restore, and those between micro-batches, under negative keys. A
        # graph takes all micro-batches in one call, and a capture cannot read random states.
        between = () if graph else (m.draw_kernel for m in captured.micro)
        random_keys = {k: RandomKey.UNDO - 1 - k for k in (*captured.draws.values(), *between) if k >= 0}
        self.whole, self.parts = parts(captured, order, calls, random_keys)
        self.work: list[WorkItem] = []
        self.skipping = UpdateSkipper(self.blocks, self.work)
        self._fill(graph, random_keys)
        self.table: list[Any] = []
        self.checked: tuple[Any, Any] = (None, None)
        self.undoes_all = False
        self.undo_batch: list[tuple[Tensor, Tensor]] = []

    def _host_places(self, graph: bool) -> tuple[dict[int, int], int]:
        """Returns the offset in host memory of each swapped tensor, and the bytes in total."""
        tensors = self.order.program.tensors
        slots = self.order.host_slots(ALIGNMENT)
        places = dict(slots.offsets)
        pinned = slots.footprint
        for t in places if graph else ():
            if tensors[t].persistent:
                places[t] = pinned
                pinned += -(-tensors[t].nbytes // ALIGNMENT) * ALIGNMENT
        swapped = [t for t in places if tensors[t].persistent]
        for t in map(self.captured.values.get, self.captured.outputs):
            if t in swapped and t not in self.inputs:
                raise StepError(f"the plan swaps {tensors[t].name}, which the step returns: return a clone of it")
        bound = {b.tensor for b in self.bindings} | self.inputs
        for t in swapped:
            if t not in bound or t in self.calls.read_first:
                raise StepError(
                    f"the plan swaps {tensors[t].name}, which the step reads on the host: plan this capture again"
                )
        return places, pinned

    def swapped_inputs(self) -> list[Block]:
        """Returns the swapped blocks that belong to the batch."""
        return [self.blocks.blocks[t] for t in self.inputs & self.blocks.blocks.keys()]

    def end(self) -> None:
        """Resets the state after a finished or undone step."""
        self.skipping.end()
        self.progress.end()
        self.blocks.tolerant = False
        self.blocks.values = []
        self.undo_batch = []
        for block in self.swapped_inputs():  # the caller's memory
            block.storage = block.bytes = None

    def match_batch(self, args: tuple[Any, ...]) -> tuple[Part, dict[fx.Node, Tensor]]:
        """Returns the part of the step to run and its batch by placeholder; raises StepError on a mismatch."""
        leaves, spec = flatten(args)
        done = self.progress.done
        captured = self.captured
        part = self.whole
        if captured.micro and spec == captured.spec.child(0):
            part = self.parts[done]
        elif spec != captured.spec:
            raise StepError(
                f"the batch is {format_structure(spec)}, but was {format_structure(captured.spec)} at the capture, "
                "where * stands for a tensor or another value; capture the step again for this batch"
            )
        elif done:
            raise StepError(f"{done} of the step's {len(self.parts)} micro-batches are done; pass the next one alone")
        if any(tensor._version != version for tensor, version in self.progress.needed_batches):
            raise StepError("a batch was changed before the end of the step, which needs it; undo it with finish()")
        batch: dict[fx.Node, Tensor] = {}
        seen: dict[fx.Node, Tensor] = {}
        memory_ids = {block: block.storage._cdata for block in self.swapped_inputs() if block.storage is not None}
        copies: dict[int, torch.UntypedStorage] = {}
        for i, leaf in zip(part.leaves, leaves, strict=True):
            expected = captured.leaves[i]
            if not isinstance(expected, fx.Node):
                if leaf is not expected and constant_key(leaf) != constant_key(expected):
                    raise StepError(
                        f"argument {i} of the step is {leaf!r}, but was {expected!r} at the capture: capture again"
                    )
                continue
            compare(f"tensor {i} of the batch", leaf, expected, self.layouts[expected])
            if leaf.requires_grad is not expected.meta["tensor_meta"].requires_grad:
                raise StepError(
                    f"tensor {i} of the batch has requires_grad {leaf.requires_grad}, but had {not leaf.requires_grad} "
                    "at the capture; call requires_grad_(), or capture the step again"
                )
            if hook := first_hook(leaf):
                raise StepError(f"tensor {i} of the batch has {hook}: remove it, or pass a detached tensor")
            if seen.setdefault(expected, leaf) is not leaf:
                raise StepError(
                    f"tensor {i} of the batch was the same as another one at the capture and now differs: capture the "
                    "step with two tensors"
                )
            block = self.blocks.blocks.get(captured.values.get(expected, -1))
            if block is not None and expected not in batch:
                leaf = self._movable(leaf, captured.values[expected], copies)
                memory = leaf.untyped_storage()
                memory_id = memory_ids.setdefault(block, memory._cdata)
                is_unshared = memory_id == memory._cdata and list(memory_ids.values()).count(memory_id) == 1
                if memory.nbytes() != block.nbytes or not is_movable(leaf) or not is_unshared:
                    raise StepError(f"the plan swaps tensor {i} of the batch, which has no memory of its own: clone it")
            batch.setdefault(expected, leaf)
        for read in captured.reads:
            if not read.inputs <= batch.keys():
                continue
            now = read.evaluate(batch)
            if constant_key(now) != constant_key(read.value):
                raise StepError(
                    f"a number of the batch, on which the step depends ({read.where}), was {read.value} at the capture "
                    f"and is {now} now: capture the step for this batch, too, as fit does"
                )
        return part, batch

    def _movable(self, leaf: Tensor, t: int, copies: dict[int, torch.UntypedStorage]) -> Tensor:
        """Returns a batch tensor, or a copy (of its storage in ``copies``) if a data loader's process shares it."""
        if not is_shared(leaf) or any(t in kernel.outputs for kernel in self.order.program.kernels):
            return leaf
        memory = leaf.untyped_storage()
        if memory._cdata not in copies:
            copies[memory._cdata] = memory.clone()
        return view_memory(copies[memory._cdata], leaf, leaf.device)

    def _fill(self, graph: bool, random_keys: dict[int, int]) -> None:
        """Fills the work list; ``random_keys`` maps a kernel to the key of the random state after it."""
        order = self.order
        calls = self.calls
        random = self.random
        kernels = self.order.program.kernels
        draws = self.captured.draws
        n = len(kernels)
        repeated = {
            item.step.kernel for item in order.items if item.step.is_recomputation and calls.is_random(item.step.kernel)
        }
        starts = {k: random_keys.get(source, RandomKey.BEGIN) for k, source in draws.items() if k < n}
        end = random_keys.get(draws[n], RandomKey.BEGIN) if n in draws else None
        last = max((k for k in range(n) if calls.is_random(k)), default=-1)
        grad_mode = False
        for item, (step_calls, clear) in zip(order.items, calls.steps, strict=True):
            kernel = item.step.kernel
            before = self._actions(item.before)
            first = list[Action]()
            after = self._actions(item.after)
            forward = kernels[kernel].phase == "forward"
            if forward is not grad_mode:
                grad_mode = forward
                before.append((torch._C._set_grad_enabled, forward, None))
            if item.step.is_recomputation:
                if kernel in repeated:
                    before.append((random.replay, kernel, None))
                    first.append((random.restore, RandomKey.NOW, None))
            else:
                if kernel in starts:
                    before.append((random.restore_defaults, starts[kernel], None))
                if kernel in repeated:
                    before.append((random.save, kernel, None))
                if (flag := calls.skip_flags.get(kernel)) is not None:
                    first.append((self.skipping.decide, flag, None))
                if kernel in random_keys:
                    first.append((random.save, random_keys[kernel], None))
                if kernel == last and end is not None:
                    after.append((random.restore_defaults, end, None))
                if not graph and (loss := calls.losses.get(kernel)) is not None:  # the plan may free it at once
                    step_calls = [*step_calls, (loss, self.progress.keep_loss, itemgetter(slice(loss, loss + 1)), {})]
                if kernel in calls.skipped:
                    self.skipping.calls[len(self.work)] = calls.skipped[kernel]
            self.work.append(
                WorkItem(tuple(before), item.charged, tuple(step_calls), clear, item.freed, (*first, *after))
            )

    def _actions(self, moves: tuple[Move, ...]) -> list[Action]:
        """Converts moves to actions."""
        blocks = self.blocks
        memory = self.order.schedule.blocks
        methods = {
            "out": blocks.start_swap_out,
            "release": blocks.release,
            "in": blocks.swap_in,
            "reclaim": blocks.reclaim,
            "wait": blocks.wait,
        }
        actions: list[Action] = []
        for kind, b in moves:
            if memory[b].nbytes:
                block = blocks.blocks[memory[b].owner]
                with_slots = block, self.calls.slots_of_block.get(b, ())
                actions.append((methods[kind], with_slots if kind in ("out", "release") else block, kind))
        return actions


def before_the_update(schedule: Schedule) -> tuple[int, set[int]]:
    """Returns the first schedule step whose writes cannot be undone, and the tensors written before it."""
    program = schedule.program
    written = set[int]()
    for i, step in enumerate(schedule.steps):
        kernel = program.kernels[step.kernel]
        outputs = () if step.is_recomputation else kernel.outputs
        if kernel.phase == "optimizer" and any(program.tensors[t].persistent for t in outputs):
            return i, written
        written.update(outputs)
    return len(schedule.steps), written
