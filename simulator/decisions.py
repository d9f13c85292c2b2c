"""Decision kinds of a plan, one class each, and their table KINDS.

A Swap or a Recompute evicts a tensor within one gap (simulator.program.Gap). A Rerun names the kernel to recompute; the
evictions follow from all reruns together. simulator.schedule derives the effects on memory.

A class checks its decisions (``claim``, ``check``, ``check_conflicts``), converts them to JSON and to rows for compiled
code, and transfers them to other programs (``mapped``, ``renumbered``). A component that supports only some kinds
refuses the others by name (``Plan.only``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, ClassVar, Literal, Self

from simulator import files
from simulator.program import Program

Row = tuple[int, int, int, int, int, int]  # kind, tensor, after, before, extra, when (columns of compiled/encoding)
Name = Literal["swap", "recompute", "rerun"]


class PlanError(ValueError):
    """Raised if a plan does not fit its program; the message gives the first reason."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Base class of all decisions; the fields of a subclass are the keys of its JSON entries."""

    kind: ClassVar[Name]  # in JSON
    codes: ClassVar[tuple[int, ...]] = ()  # values in the first column of rows
    excludes: ClassVar[tuple[Name, ...]] = ()  # kinds that may not be in the same plan
    plan_1_keys: ClassVar[tuple[str, ...]] = ()  # keys that ``plan/1`` has; empty if it does not have the kind

    def check(self, program: Program, where: str) -> None:
        """Raises PlanError if the decision is impossible in ``program``.

        Args:
            program: Program of the plan.
            where: Entry of the plan, with which the message begins.
        """

    def check_conflicts(self, program: Program, i: int, restored_before: Mapping[int, Sequence[int]]) -> None:
        """Raises PlanError if the plan's other decisions conflict with decision ``i``.

        Args:
            program: Program of the plan.
            i: Index of this decision in the plan.
            restored_before: Per tensor, the kernels before which a decision restores it.
        """

    def entry(self) -> dict[str, Any]:
        """Returns the JSON entry without keys that have their default."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {"kind": self.kind, **values}

    @classmethod
    def from_entry(cls, entry: object, where: str, is_plan_1: bool) -> Self:
        """Reads a JSON entry.

        Args:
            entry: Object of the plan file.
            where: Name of the entry in error messages.
            is_plan_1: Whether the entry is from ``plan/1``.

        Returns:
            The decision.

        Raises:
            FormatError: The entry is malformed.
        """
        required, optional = files.keys_of(cls)
        allowed = {name: key for name, key in optional.items() if name in cls.plan_1_keys or not is_plan_1}
        values = files.fields(entry, where, {"kind": str, **required}, allowed)
        del values["kind"]
        return cls(**values)

    def row(self) -> Row:
        """Returns the row for compiled code; ``from_row`` is its inverse.

        Raises:
            PlanError: The compiled simulator does not support the kind.
        """
        raise PlanError(
            f"the compiled simulator does not support {self.kind} decisions; simulate the plan with simulator.simulate"
        )


@dataclass(frozen=True, slots=True)
class Evict(Kind):
    """Base class of decisions that evict ``tensor`` from the end of kernel ``after`` until kernel ``before``.

    ``after`` is any kernel from the last use before the gap up to, not including, ``before``. For a persistent tensor
    the gap may wrap over the iteration boundary (``after >= before``), unless ``no_wrap`` gives a reason against it.
    """

    tensor: int
    after: int
    before: int

    no_wrap: ClassVar[str] = ""
    optional: ClassVar[tuple[str, ...]] = ()  # fields that are a kernel or None

    @property
    def restored_before(self) -> int:
        """Kernel before which the tensor is resident again."""
        return self.before

    def claim(self, program: Program, where: str) -> Hashable:
        """Returns the tensor and the index of the use that opens the gap, which only one decision may claim.

        Args:
            program: Program of the plan.
            where: Entry of the plan, with which the message begins.

        Raises:
            PlanError: An id is dangling or the decision does not lie within one gap.
        """
        t = self.tensor
        after = self.after
        before = self.before
        n = len(program.kernels)
        if not 0 <= t < len(program.tensors):
            raise PlanError(f"{where}: there is no tensor {t}; the program has {len(program.tensors)}")
        if not (0 <= after < n and 0 <= before < n):
            raise _missing_kernel(n, where, after=after, before=before)
        uses = program.accesses[t]
        if before not in uses:
            raise PlanError(f"{where}: kernel {before} does not use tensor {t}; a gap ends at a use")
        previous = bisect_right(uses, after) - 1  # the last use at or before `after`
        if after < before:
            if previous < 0 and not program.tensors[t].persistent:
                raise PlanError(
                    f"{where}: tensor {t} is not born yet when kernel {after} ends; its first write is kernel {uses[0]}"
                )
            # A persistent tensor's wrapping gap may be entered after the boundary.
            opens = previous if previous >= 0 else len(uses) - 1
            closes = uses[previous + 1]
        else:
            if not program.tensors[t].persistent:
                raise PlanError(
                    f"{where}: the gap wraps over the iteration boundary but tensor {t} is not persistent; `before` "
                    "must be above `after`"
                )
            if self.no_wrap:
                raise PlanError(f"{where}: {self.no_wrap}; swap it instead")
            opens = previous
            closes = uses[0]
            if previous != len(uses) - 1:
                closes = -1
        if closes != before:
            raise PlanError(
                f"{where}: tensor {t} is used between the end of kernel {after} and kernel {before}; "
                "a decision empties one gap"
            )
        self._check_optional_kernels(n, where)
        return t, opens

    def _check_optional_kernels(self, n: int, where: str) -> None:
        """Raises PlanError unless the decision's other kernels, of ``n``, lie in the gap."""

    def clash(self, other: int) -> str:
        """Returns the error message for a decision ``other`` with the same claim."""
        return f"tensor {self.tensor} is already evicted before kernel {self.before} by decisions[{other}]"

    def mapped(self, tensor: Mapping[int, int], kernel: Mapping[int, int], program: Program) -> Iterator[Self]:
        """Yields this decision in another program, from the most to the least specific variant.

        If kernel ``after`` has no counterpart, the gap opens after the previous use. Kernels within the gap may be left
        open.

        Args:
            tensor: Index of each tensor in the other program.
            kernel: Index of each kernel in the other program.
            program: The other program.

        Returns:
            The decisions that may replace this one; callers try them in order.
        """
        t = tensor.get(self.tensor)
        before = kernel.get(self.before)
        if t is None or before is None or not (uses := program.accesses[t]):
            return
        after = kernel.get(self.after, uses[bisect_left(uses, before) - 1])
        optional = self._optional_kernels()
        for targets in product(*((kernel.get(k), None) for k in optional.values())):
            yield replace(self, tensor=t, after=after, before=before, **dict(zip(optional, targets, strict=True)))

    def renumbered(self, tensor: Sequence[int], first: int, n: int, total: int) -> Self:
        """Returns this decision for a program that contains this iteration, and others like it before and after.

        Args:
            tensor: New index of each tensor.
            first: Index of the iteration's first kernel.
            n: Kernels of one iteration.
            total: Kernels of the program.

        Returns:
            A decision of the same kind with the new indices.
        """

        def shift(k: int) -> int:
            """Returns the first execution of kernel k after the gap opens."""
            return (first + self.after + 1 + (k - self.after - 1) % n) % total

        extras = {name: shift(k) for name, k in self._optional_kernels().items() if k >= 0}
        return replace(self, tensor=tensor[self.tensor], after=first + self.after, before=shift(self.before), **extras)

    def _optional_kernels(self) -> dict[str, int]:
        """Returns the optional kernels of the decision by name; -1: not given."""
        return {name: _encode(getattr(self, name)) for name in self.optional}


@dataclass(frozen=True, slots=True)
class Swap(Evict):
    """Swaps ``tensor`` out when kernel ``after`` ends, and in before kernel ``before``.

    ``sync`` is vDNN's layer-wise synchronization, and PyTorch's save_on_cpu. The memory is freed when the copy is
    complete and ``after`` has ended.
    """

    prefetch: int | None = None  # kernel at whose end the swap-in is issued; None: chosen by rule 5
    sync: bool = False  # no kernel starts between the end of ``after`` and the completion of the swap-out
    copy: int | None = None  # kernel at whose end the copy is issued, after the last write; None: ``after``

    kind: ClassVar[Name] = "swap"
    codes: ClassVar[tuple[int, ...]] = (0, 2)  # 2: with sync
    optional: ClassVar[tuple[str, ...]] = ("prefetch", "copy")
    plan_1_keys: ClassVar[tuple[str, ...]] = ("tensor", "after", "before", "prefetch", "sync")

    @property
    def copied_at(self) -> int:
        """Kernel at whose end the copy to the host is issued."""
        return self.after if self.copy is None else self.copy

    def _check_optional_kernels(self, n: int, where: str) -> None:
        p = self.prefetch
        after = self.after
        before = self.before
        if p is not None and not (after <= p < before if after < before else (after <= p < n or 0 <= p < before)):
            raise PlanError(f"{where}.prefetch: expected a kernel from {after} up to before {before}, got {p}")

    def check_conflicts(self, program: Program, i: int, restored_before: Mapping[int, Sequence[int]]) -> None:
        """Raises PlanError unless the copy is issued after the last write and while the tensor is resident."""
        t = self.tensor
        copy = self.copy
        after = self.after
        n = len(program.kernels)
        if copy is None or copy == after:
            return
        where = f"decisions[{i}].copy"
        if not 0 <= copy < n:
            raise PlanError(f"{where}: there is no kernel {copy}; the program has {n}")
        if not program.tensors[t].persistent and not program.accesses[t][0] <= copy <= after:
            raise PlanError(
                f"{where}: expected a kernel from the first write of tensor {t} ({program.accesses[t][0]}) up to "
                f"{after}, got {copy}"
            )
        lead = (after - copy) % n
        if any((after - w) % n < lead for w in program.writes[t]):
            raise PlanError(
                f"{where}: tensor {t} is written between the end of kernel {copy} and that of {after}; copy it later"
            )
        if any((after - k) % n < lead for k in restored_before[t]):
            raise PlanError(
                f"{where}: tensor {t} is evicted between the end of kernel {copy} and that of {after}; copy it later"
            )

    def row(self) -> Row:
        """Returns the row; see ``Kind.row``."""
        prefetch = _encode(self.prefetch)
        copy = _encode(self.copy)
        return self.codes[self.sync], self.tensor, self.after, self.before, prefetch, copy

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Swap:
        """Returns the swap of a row."""
        code, t, after, before, prefetch, copy = row
        return cls(t, after, before, _decode(prefetch), code == cls.codes[True], _decode(copy))

    def renumbered(self, tensor: Sequence[int], first: int, n: int, total: int) -> Swap:
        """Returns the swap with its copy and prefetch shifted with the gap; see ``Evict.renumbered``."""
        out: Swap = Evict.renumbered(self, tensor, first, n, total)
        # A prefetch may be issued when the gap opens, a copy earlier.
        prefetch = out.after if self.prefetch == self.after else out.prefetch
        copy = None if self.copy is None else (out.after - (self.after - self.copy) % n) % total
        return replace(out, prefetch=prefetch, copy=copy)


@dataclass(frozen=True, slots=True)
class Recompute(Evict):
    """Drops ``tensor`` when kernel ``after`` ends and recomputes it just before kernel ``at`` (None: ``before``).

    The tensor is resident from then on; ``before`` is its next use. With ``keep``, dropped tensors that are recovered
    on the way stay for their own later uses (SuperNeurons' speed-centric recomputation). Without it they are freed at
    once (memory-centric).
    """

    keep: bool = False
    at: int | None = None

    kind: ClassVar[Name] = "recompute"
    codes: ClassVar[tuple[int, ...]] = (1,)
    optional: ClassVar[tuple[str, ...]] = ("at",)
    excludes: ClassVar[tuple[Name, ...]] = ("rerun",)
    plan_1_keys: ClassVar[tuple[str, ...]] = ("tensor", "after", "before", "keep")
    no_wrap: ClassVar[str] = "a persistent tensor cannot be recomputed over the iteration boundary"

    @property
    def restored_before(self) -> int:
        """Kernel before which the tensor is recomputed."""
        return self.before if self.at is None else self.at

    def _check_optional_kernels(self, n: int, where: str) -> None:
        if not self.after < self.restored_before <= self.before:
            raise PlanError(f"{where}.at: expected a kernel after {self.after} and up to {self.before}, got {self.at}")

    def check(self, program: Program, where: str) -> None:
        """Raises PlanError if the decision does not lie in one gap, or its chain of kernels cannot be recomputed."""
        if reason := cannot_recompute(program, self.tensor, self.after, self.restored_before):
            raise PlanError(f"{where}: {reason}; swap it instead")

    def row(self) -> Row:
        """Returns the row; see ``Kind.row``."""
        return self.codes[0], self.tensor, self.after, self.before, int(self.keep), _encode(self.at)

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Recompute:
        """Returns the recomputation of a row."""
        _, t, after, before, keep, at = row
        return cls(t, after, before, bool(keep), _decode(at))


@dataclass(frozen=True, slots=True)
class Rerun(Kind):
    """Recomputes ``kernel`` just before the later kernel ``before``.

    A copy of a tensor lives from the execution that writes it to its last reader before the writer's next execution.

    Source: Checkmate (MLSys 2020), section 4: R, from which S follows; MOCCASIN's intervals.
    """

    kernel: int
    before: int

    kind: ClassVar[Name] = "rerun"
    codes: ClassVar[tuple[int, ...]] = (3,)

    def claim(self, program: Program, where: str) -> Hashable:
        """Returns the decision itself after the checks that need no other decision; ``lower`` makes the others.

        Raises:
            PlanError: A kernel does not exist or cannot run twice, or ``kernel`` is not earlier than ``before``.
        """
        n = len(program.kernels)
        if not (0 <= self.kernel < n and 0 <= self.before < n):
            raise _missing_kernel(n, where, kernel=self.kernel, before=self.before)
        if self.kernel >= self.before:
            raise PlanError(
                f"{where}: kernel {self.kernel} has not run before kernel {self.before}; `before` must be above it"
            )
        kernel = program.kernels[self.kernel]
        if not kernel.recomputable:
            raise PlanError(
                f"{where}: kernel {self.kernel} ({kernel.name}) cannot be run twice; choose a recomputable kernel"
            )
        return self

    def clash(self, other: int) -> str:
        """Returns the error message for a second rerun of the same kernel before the same kernel."""
        return f"the same as decisions[{other}]"

    def row(self) -> Row:
        """Returns the row; see ``Kind.row``."""
        return self.codes[0], -1, self.kernel, self.before, 0, -1

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Rerun:
        """Returns the rerun of a row."""
        return cls(row[2], row[3])

    def mapped(self, tensor: Mapping[int, int], kernel: Mapping[int, int], program: Program) -> Iterator[Rerun]:
        """Yields the rerun in another program, or nothing if one of its two kernels has no counterpart."""
        if self.kernel in kernel and self.before in kernel:
            yield Rerun(kernel[self.kernel], kernel[self.before])

    def renumbered(self, tensor: Sequence[int], first: int, n: int, total: int) -> Rerun:
        """Returns the rerun with both kernels counted from ``first``."""
        return Rerun(first + self.kernel, first + self.before)


Decision = Swap | Recompute | Rerun
KINDS: tuple[type[Decision], ...] = (Swap, Recompute, Rerun)


def _encode(kernel: int | None) -> int:
    return -1 if kernel is None else kernel


def _decode(kernel: int) -> int | None:
    return None if kernel < 0 else kernel


def _missing_kernel(n: int, where: str, **kernels: int) -> PlanError:
    """Returns the error for the first of ``kernels`` that is not in range(n)."""
    label, k = next((label, k) for label, k in kernels.items() if not 0 <= k < n)
    return PlanError(f"{where}.{label}: there is no kernel {k}")


def cannot_recompute(program: Program, tensor: int, after: int, before: int) -> str | None:
    """Returns why ``tensor`` cannot be recomputed for kernel ``before``, or None if it can.

    To recompute the writers of the tensor, their inputs must be unchanged. A non-persistent input that was freed or
    overwritten is recomputed recursively. A persistent input must still have its content, because no kernel can restore
    it.
    """
    if program.tensors[tensor].persistent:
        return f"tensor {tensor} is persistent; only tensors born in the iteration can be recomputed"
    if can_recompute(program, tensor, before):
        return None
    pending = [k for k in program.writes[tensor] if k < before]
    visited = set(pending)
    while pending:
        w = pending.pop()
        kernel = program.kernels[w]
        if not kernel.recomputable:
            return f"tensor {tensor} needs kernel {w} ({kernel.name}), which cannot be run twice"
        for x, until in program.available_until[w].items():
            if before <= until and x != tensor:
                continue  # resident, or evicted by a decision that is checked itself
            if program.tensors[x].persistent:
                return (
                    f"tensor {tensor} needs kernel {w} ({kernel.name}), whose input {x} is overwritten "
                    f"before kernel {before}"
                )
            writers = [k for k in program.writes[x] if k < w and k not in visited]
            visited.update(writers)
            pending += writers
    raise AssertionError(f"tensor {tensor} can be recomputed for kernel {before}; report it")


def can_recompute(program: Program, tensor: int, before: int) -> bool:
    """Returns whether ``cannot_recompute`` finds no reason, without formatting one."""
    writers = program.writes[tensor]
    return not program.tensors[tensor].persistent and all(
        before <= program.recomputable_until[w] for w in writers[: bisect_left(writers, before)]
    )
