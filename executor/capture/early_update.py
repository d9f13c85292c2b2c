"""Moves the optimizer's update into the backward pass: each weight is updated once its gradient is final.

The kernels of a captured step stay the same and so do the trained bits. Only their order changes: each *bucket* of the
update follows the last kernel before it that accesses one of the bucket's tensors. Gradients and optimizer state are
then needed at once only for a bucket. Others call this fused backward (LOMO, Lv et al., 2024, section 3.1) or
optimizer in backward (torchtune).

A bucket is a set of the update's kernels that cannot be separated, because one of them writes a tensor that another
one accesses. A norm of all gradients makes one bucket of the whole update. The planned step frees temporaries of the
update after their last use, where eager mode holds some of them until Python reuses the variable.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

from torch import fx

from executor.capture.captured import Captured
from executor.capture.operators import NUMBER, is_random
from executor.capture.reach import CaptureError
from simulator.program import Kernel, Program

InBackward = bool | Literal["auto"]

MAX_JOINT_BYTES = 4096  # of a norm, scale or count, by which the updates of several weights may be connected


class EarlyUpdate(NamedTuple):
    """Result of ``early_update``."""

    captured: Captured | None = None  # the step with its update in the backward pass; None if the update cannot move
    cause: str = ""  # why it cannot, and what to change; "" if it can, or if the step has no update to move
    changed: Program | None = None  # the program that the step would be after that change; None if unknown


def with_early_update(captured: Captured, wanted: InBackward = True) -> Captured:
    """Returns the step with each bucket of its update directly after the last kernel that uses the bucket's tensors.

    With several micro-batches, the update stays in the last one. A first step that differs from later ones stays as it
    is.

    Args:
        captured: The captured step.
        wanted: False returns the step as it is; "auto" does, too, if its update needs all gradients at once, which
            True refuses.

    Returns:
        The changed step, or ``captured`` itself if it stays as it is.

    Raises:
        CaptureError: If the update cannot be moved and ``wanted`` is True.
    """
    if not wanted or captured.is_first:
        return captured
    found = early_update(captured)
    if wanted is True and found.captured is None:
        gain = ""
        if found.changed is not None:
            before, after = (program.peak_bytes / 1e9 for program in (captured.program, found.changed))
            gain = f"; the step's peak would then be {after:,.3g} instead of {before:,.3g} GB"
        raise CaptureError(
            f"optimizer_in_backward: the update cannot move into the backward pass: {found.cause}{gain}; leave it out"
        )
    return found.captured or captured


def early_update(captured: Captured) -> EarlyUpdate:
    """Returns the step with its update in the backward pass, or why it cannot be there and what a change would give."""
    if cause := _fixed_order(captured):
        return EarlyUpdate(None, cause, None if captured.returned.gradients else _Update(captured).changed())
    update = _Update(captured)
    if cause := update.joint_cause():
        return EarlyUpdate(None, cause, update.changed())
    order = update.order()
    cause = update.late_reader()
    if order == sorted(order):
        cause = cause or "its parts already follow the kernels before them (a lower bucket_bytes divides it further)"
    return EarlyUpdate(None, cause) if cause else EarlyUpdate(_reordered(captured, order))


def _fixed_order(captured: Captured) -> str:
    """Returns why the kernels of this step's update cannot move at all, or ""."""
    if not any(kernel.phase == "optimizer" for kernel in captured.program.kernels):
        return "the step has no update"
    if captured.skippable or any(kernel.name.startswith("aten._amp_") for kernel in captured.program.kernels):
        return (
            "a GradScaler decides after the last gradient whether to skip it; train in bfloat16 without a scaler "
            "(autocast=torch.bfloat16)"
        )
    if captured.returned.gradients:
        return "keep_grads keeps all gradients beyond it; leave keep_grads out"
    return ""


class _Update:
    """The kernels of a step's update, with the tensors that each needs.

    Attributes:
        accesses: Kernel of the update -> the tensors that it reads or writes, and those from which the host computes
            its numbers.
        runs: The same kernels, divided where the step runs other kernels between them.
    """

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        numbers = _tensors_of_numbers(captured)
        self.accesses: dict[int, tuple[int, ...]] = {}
        self.runs: list[list[int]] = []
        is_open = False
        for k, kernel in enumerate(captured.program.kernels):
            if not captured.nodes[k]:  # a marker
                continue
            if kernel.phase == "optimizer":
                read = [t for node in captured.nodes[k] for a in node.all_input_nodes for t in numbers.get(a, ())]
                self.accesses[k] = tuple(dict.fromkeys((*kernel.accesses, *read)))
                if not is_open:
                    self.runs.append([])
                self.runs[-1].append(k)
            is_open = kernel.phase == "optimizer"

    def order(self) -> list[int]:
        """Returns the kernels in their new order."""
        captured = self.captured
        uses = captured.program.accesses
        first = captured.micro[-2].end - 1 if len(captured.micro) > 1 else -1
        place: dict[int, int] = {}  # kernel of the update -> the kernel of another phase that it follows
        for run in self.runs:
            for bucket in self.buckets(run):
                tensors = {t for k in bucket for t in self.accesses[k]}
                before = (uses[t][i - 1] for t in tensors if (i := bisect_left(uses[t], run[0])))
                last = max((place.get(k, k) for k in before), default=-1)
                draws = any(is_random(node) for k in bucket for node in captured.nodes[k])
                place.update(dict.fromkeys(bucket, run[0] - 1 if draws else max(first, last)))
        kernels = range(len(captured.program.kernels))
        return sorted(kernels, key=lambda k: (place.get(k, k), k in place, k))

    def buckets(self, run: list[int], joins: Callable[[int], bool] = lambda _: True) -> list[list[int]]:
        """Returns the buckets of a run; a written tensor connects the kernels that access it if it ``joins``."""
        kernels = self.captured.program.kernels
        written = {t for k in run for t in kernels[k].outputs if joins(t)}
        root = {k: k for k in run}

        def find(k: int) -> int:
            while root[k] != k:
                k = root[k]
            return k

        first: dict[int, int] = {}
        for k in run:
            for t in self.accesses[k]:
                if t in written:
                    root[find(k)] = find(first.setdefault(t, k))
        groups: dict[int, list[int]] = {}
        for k in run:
            groups.setdefault(find(k), []).append(k)
        return list(groups.values())

    def is_joint(self, t: int) -> bool:
        """Returns whether a tensor may be a norm, scale or count."""
        tensor = self.captured.program.tensors[t]
        return tensor.kind != "parameter" and tensor.nbytes <= MAX_JOINT_BYTES

    def changed(self) -> Program | None:
        """Returns the early program without the results that several parts of the update share, as norms; or None.

        Kernels that compute only such results, or that look for infinite gradients, are left out.
        """
        captured = self.captured
        kernels = captured.program.kernels
        parts: dict[int, set[int]] = {}  # joint tensor -> parts that access it
        for run in self.runs:
            for i, part in enumerate(self.buckets(run, lambda t: not self.is_joint(t))):
                for t in filter(self.is_joint, (t for k in part for t in self.accesses[k])):
                    parts.setdefault(t, set()).add(run[0] + i)
        shared = {t for t, users in parts.items() if len(users) > 1 and not captured.program.tensors[t].persistent}
        dropped = {
            k
            for k in self.accesses
            if kernels[k].name.startswith("aten._amp_") or shared.issuperset(kernels[k].outputs)
        }
        if not dropped:
            return None

        def without_shared(k: int) -> Kernel:
            kernel = kernels[k]
            inputs = () if k in dropped else tuple(t for t in kernel.inputs if t not in shared)
            return replace(kernel, inputs=inputs, outputs=() if k in dropped else kernel.outputs)

        changed = replace(
            captured,
            program=replace(captured.program, kernels=tuple(without_shared(k) for k in range(len(kernels)))),
            nodes=tuple(() if k in dropped else nodes for k, nodes in enumerate(captured.nodes)),
        )
        return _reordered(changed, _Update(changed).order()).program

    def joint_cause(self) -> str:
        """Returns a sentence about a norm, scale or count that the updates of several weights share, or ""."""
        captured = self.captured
        kernels = captured.program.kernels
        tensors = captured.program.tensors
        is_joint = self.is_joint
        for run in self.runs:
            part = {k: i for i, part in enumerate(self.buckets(run, lambda t: not is_joint(t))) for k in part}
            for bucket in self.buckets(run):
                if (
                    len({part[k] for k in bucket if any(tensors[t].kind == "parameter" for t in kernels[k].outputs)})
                    < 2
                ):
                    continue
                users: dict[int, set[int]] = {}  # joint tensor -> parts
                for k in bucket:
                    for t in filter(is_joint, self.accesses[k]):
                        users.setdefault(t, set()).add(part[k])
                shared = max(users, key=lambda t: len(users[t]))
                if captured.returned.norm:
                    return (
                        "clip_norm needs the norm of all gradients first; clip by value or each weight by its own norm"
                    )
                writer = max(k for k in bucket if shared in kernels[k].outputs)
                return (
                    f"the updates of several weights share a result of {self._described(writer)}; where it clips, clip "
                    "by value (torch.nn.utils.clip_grad_value_) or each weight by its own norm"
                )
        return ""

    def late_reader(self) -> str:
        """Returns a sentence about a kernel that reads gradients but is no part of their update, or ""."""
        captured = self.captured
        program = captured.program
        updating = {
            k
            for run in self.runs
            for bucket in self.buckets(run)
            if any(program.tensors[t].persistent for k in bucket for t in program.kernels[k].outputs)
            for k in bucket
        }
        gradients = set(captured.holds.gradients)
        for k, kernel in enumerate(program.kernels):
            if captured.nodes[k] and kernel.phase != "backward" and k not in updating and gradients & {*kernel.inputs}:
                return (
                    f"{self._described(k)} reads gradients and is no part of it, so that they live until then; "
                    "leave it out of the step"
                )
        return ""

    def _described(self, k: int) -> str:
        """Returns a kernel with the line of the user's code that runs it."""
        line = self.captured.places[k].line
        return f"{self.captured.program.kernels[k].name}{f' ({line})' if line else ''}"


def _tensors_of_numbers(captured: Captured) -> dict[fx.Node, set[int]]:
    """Returns the tensors from which the host computes each of the graph's numbers."""
    numbers: dict[fx.Node, set[int]] = {}
    in_kernel = {node for nodes in captured.nodes for node in nodes}
    for node in captured.graph.graph.nodes:
        inputs = node.all_input_nodes
        if node.target is NUMBER:
            numbers[node] = {captured.values[a] for a in inputs if a in captured.values}
        elif node not in in_kernel and any(a in numbers for a in inputs):
            numbers[node] = set[int]().union(*(numbers.get(a, ()) for a in inputs))
    return numbers


def _reordered(captured: Captured, order: list[int]) -> Captured:
    """Returns the step with its kernels in this order; temporaries of the update are freed at once."""
    program = captured.program
    outputs = {captured.values[node] for node in captured.outputs if node in captured.values}
    born = {t: k for k in reversed(range(len(program.kernels))) for t in program.kernels[k].outputs}
    freed = {
        t for t, k in born.items() if program.kernels[k].phase == "optimizer" and not program.tensors[t].persistent
    }
    kernels = {}
    for k in order:
        kernel = program.kernels[k]
        if captured.nodes[k]:
            kernels[k] = kernel
        elif kept := tuple(t for t in kernel.inputs if t not in freed - outputs):
            kernels[k] = replace(kernel, inputs=kept)
    count = len(program.kernels)
    position = {-1: -1, **{k: i for i, k in enumerate(kernels)}, count: len(kernels)}

    def boundary(end: int) -> int:
        """Returns the new index of a boundary between kernels; parts of the update do not count."""
        if end in (-1, count):
            return position[end]
        before = (position[k] for k in range(end) if k in kernels and program.kernels[k].phase != "optimizer")
        return max(before, default=-1) + 1

    holds = captured.holds
    return replace(
        captured,
        program=replace(program, kernels=tuple(kernels.values())),
        nodes=tuple(captured.nodes[k] for k in kernels),
        places=tuple(captured.places[k] for k in kernels),
        draws={position[k]: position[source] for k, source in captured.draws.items()},
        micro=tuple(
            micro._replace(end=boundary(micro.end), draw_kernel=position[micro.draw_kernel]) for micro in captured.micro
        ),
        early_update=True,
        holds=holds._replace(outputs_end=boundary(holds.outputs_end), zero_grad=boundary(holds.zero_grad)),
    )
