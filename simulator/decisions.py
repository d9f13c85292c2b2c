"""The kinds of decisions that a plan is made of: a class each, and the table of them, KINDS.

A Swap or a Recompute empties one gap of a tensor (simulator.program.Gap): the time between two consecutive uses.
A Rerun says which kernel runs again and when; which tensors are away meanwhile follows from all of them. What a kind
does to memory and time, simulator.schedule says.

A kind owns what else there is to say of it: is it possible (``claim``, ``check``, ``check_beside``), its entry in
JSON, its row for compiled code, and what becomes of it in another program (``moved``, ``renumbered``). What can take
only some kinds refuses the others by name (``Plan.only``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import product
from typing import Any, ClassVar, Literal, Self

from simulator import files
from simulator.program import Program

Row = tuple[int, int, int, int, int, int]  # kind, tensor, after, before, extra, when (columns of compiled/encoding)
Name = Literal["swap", "recompute", "rerun"]


class PlanError(ValueError):
    """A plan does not fit its program; the message gives the first reason."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What all kinds have. Their fields are the keys of their entries in JSON.

    Attributes:
        kind: its name.
        codes: what it has in the first column of rows.
        excludes: kinds that no plan has beside it.
        of_plan_1: keys that ``plan/1`` has; without any, it has not the kind.
    """

    kind: ClassVar[Name]
    codes: ClassVar[tuple[int, ...]] = ()
    excludes: ClassVar[tuple[Name, ...]] = ()
    of_plan_1: ClassVar[tuple[str, ...]] = ()

    def check(self, program: Program, where: str) -> None:
        """Raises PlanError where ``program`` cannot do it."""

    def check_beside(self, program: Program, i: int, back: Mapping[int, Sequence[int]]) -> None:
        """Raises PlanError where the others are against decision ``i``; ``back``: tensor -> kernels by which they have
        it back."""

    def entry(self) -> dict[str, Any]:
        """As in JSON: a key that is as by default is left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {"kind": self.kind, **values}

    @classmethod
    def of_entry(cls, entry: object, where: str, old: bool) -> Self:
        """Reads an entry; ``old``: of ``plan/1``.

        Raises:
            FormatError: it is malformed.
        """
        known = [f for f in fields(cls) if f.name in cls.of_plan_1 or not old]
        types = {f.name: bool if f.type == "bool" else int for f in known}
        optional = {f.name: (types.pop(f.name), f.default) for f in known if f.default is not MISSING}
        found = files.fields(entry, where, {"kind": str, **types}, optional)
        del found["kind"]
        return cls(**found)

    def row(self) -> Row:
        """For compiled code; ``of_row`` is its inverse.

        Raises:
            PlanError: that does not know the kind.
        """
        raise PlanError(f"the compiled simulator cannot take a {self.kind}")


@dataclass(frozen=True, slots=True)
class OfGap(Kind):
    """A kind that empties one gap: ``tensor`` may be away from the end of kernel ``after`` until kernel ``before``.

    ``after`` is any kernel from the tensor's last use before the gap, up to (not including) ``before``. For a
    persistent tensor the gap may wrap over the iteration boundary (``after >= before``), unless ``no_wrap`` says why
    not.
    """

    tensor: int
    after: int
    before: int

    no_wrap: ClassVar[str] = ""

    @property
    def back(self) -> int:
        """The kernel before which it is there again."""
        return self.before

    def claim(self, program: Program, where: str) -> Hashable:
        """What no other decision may empty: the tensor, and the index of the use that opens the gap.

        Raises:
            PlanError: an id is dangling or the decision does not lie in one gap.
        """
        t, after, before, n = self.tensor, self.after, self.before, len(program.kernels)
        if not 0 <= t < len(program.tensors):
            raise PlanError(f"{where}: there is no tensor {t}")
        if not (0 <= after < n and 0 <= before < n):
            raise _no_kernel(n, where, after=after, before=before)
        uses = program.accesses[t]
        if before not in uses:
            raise PlanError(f"{where}: kernel {before} does not use tensor {t}")
        previous = bisect_right(uses, after) - 1  # the last use at or before `after`
        if after < before:
            if previous < 0 and not program.tensors[t].persistent:
                raise PlanError(f"{where}: tensor {t} is not born yet when kernel {after} ends")
            # A persistent tensor's wrapping gap may be entered after the boundary.
            opens = previous if previous >= 0 else len(uses) - 1
            closes = uses[previous + 1]
        else:
            if not program.tensors[t].persistent:
                raise PlanError(f"{where}: the gap wraps over the iteration boundary but tensor {t} is not persistent")
            if self.no_wrap:
                raise PlanError(f"{where}: {self.no_wrap}")
            opens, closes = previous, uses[0]
            if previous != len(uses) - 1:
                closes = -1
        if closes != before:
            raise PlanError(
                f"{where}: tensor {t} is used between the end of kernel {after} and kernel {before}; "
                "a decision empties one gap"
            )
        self._check_inside(n, where)
        return t, opens

    def _check_inside(self, n: int, where: str) -> None:
        """Raises PlanError unless the other kernels that it names, of ``n``, lie in the gap."""

    def clash(self, other: int) -> str:
        """What is wrong where decision ``other`` has the same claim."""
        return f"tensor {self.tensor} is already away before kernel {self.before} by decisions[{other}]"

    def moved(self, tensor: Mapping[int, int], kernel: Mapping[int, int], program: Program) -> Iterator[Self]:
        """The same in another program, which has these tensors and kernels; what says most first. Where ``after`` is
        missing, the gap opens after the use before; a kernel within it may be left open."""
        t, before = tensor.get(self.tensor), kernel.get(self.before)
        if t is None or before is None or not (uses := program.accesses[t]):
            return
        after = kernel.get(self.after, uses[bisect_left(uses, before) - 1])
        inside = self._inside()
        for known in product(*((kernel.get(k), None) for k in inside.values())):
            yield replace(self, tensor=t, after=after, before=before, **dict(zip(inside, known, strict=True)))

    def renumbered(self, tensor: Sequence[int], first: int, n: int, total: int) -> Self:
        """The same with these numbers of tensors, in a program of ``total`` kernels that has its ``n`` from ``first``
        on, and iterations like them before and after."""

        def ahead(k: int) -> int:
            """Of the kernels ``k`` the first after the gap opens."""
            return (first + self.after + 1 + (k - self.after - 1) % n) % total

        inside = {name: ahead(k) for name, k in self._inside().items() if k >= 0}
        return replace(self, tensor=tensor[self.tensor], after=first + self.after, before=ahead(self.before), **inside)

    def _inside(self) -> dict[str, int]:
        """The kernels that may be left open, by name; those that are: -1."""
        return {f.name: _number(getattr(self, f.name)) for f in fields(self) if f.type == "int | None"}


@dataclass(frozen=True, slots=True)
class Swap(OfGap):
    """Swap ``tensor`` out when kernel ``after`` ends; have it back for kernel ``before``.

    ``prefetch`` is the kernel at whose end the swap-in is issued; None leaves it to the simulator's rule 5.
    ``sync``: compute waits; no kernel starts between the end of ``after`` and the completion of this
    swap-out (vDNN's layer-wise synchronisation, PyTorch's save_on_cpu).
    ``copy`` is the kernel at whose end the copy to the host is issued, from the last write of the present content
    up to ``after``: reads do not change it. None: ``after``. The memory is free when the copy is complete and
    ``after`` has ended.
    """

    prefetch: int | None = None
    sync: bool = False
    copy: int | None = None

    kind: ClassVar[Name] = "swap"
    codes: ClassVar[tuple[int, ...]] = (0, 2)  # 2: sync
    of_plan_1: ClassVar[tuple[str, ...]] = ("tensor", "after", "before", "prefetch", "sync")

    @property
    def copied_at(self) -> int:
        """The kernel at whose end the copy to the host is issued."""
        return self.after if self.copy is None else self.copy

    def _check_inside(self, n: int, where: str) -> None:
        p, after, before = self.prefetch, self.after, self.before
        if p is not None and not (after <= p < before if after < before else (after <= p < n or 0 <= p < before)):
            raise PlanError(f"{where}.prefetch: kernel {p} is not from {after} up to {before}")

    def check_beside(self, program: Program, i: int, back: Mapping[int, Sequence[int]]) -> None:
        """A copy is made of what is there: after the last write and the tensor's earlier gaps; raises PlanError."""
        t, copy, after, n = self.tensor, self.copy, self.after, len(program.kernels)
        if copy is None or copy == after:
            return
        where = f"decisions[{i}].copy"
        if not 0 <= copy < n:
            raise PlanError(f"{where}: there is no kernel {copy}")
        if not program.tensors[t].persistent and not program.accesses[t][0] <= copy <= after:
            raise PlanError(f"{where}: kernel {copy} is not from the birth of tensor {t} up to kernel {after}")
        early = (after - copy) % n
        if any((after - w) % n < early for w in program.writes[t]):
            raise PlanError(f"{where}: tensor {t} is written between the end of kernel {copy} and that of {after}")
        if any((after - k) % n < early for k in back[t]):
            raise PlanError(f"{where}: tensor {t} is away between the end of kernel {copy} and that of {after}")

    def row(self) -> Row:
        """int64[6]; see ``Decision.row``."""
        prefetch, copy = _number(self.prefetch), _number(self.copy)
        return self.codes[self.sync], self.tensor, self.after, self.before, prefetch, copy

    @classmethod
    def of_row(cls, row: Sequence[int]) -> Swap:
        """The swap of such a row."""
        code, t, after, before, prefetch, copy = row
        return cls(t, after, before, _or_none(prefetch), code == cls.codes[True], _or_none(copy))

    def renumbered(self, tensor: Sequence[int], first: int, n: int, total: int) -> Swap:
        """See ``OfGap.renumbered``: its copy and its prefetch move with the gap."""
        out: Swap = OfGap.renumbered(self, tensor, first, n, total)
        # A prefetch may be issued as the gap opens, a copy before.
        prefetch = out.after if self.prefetch == self.after else out.prefetch
        copy = None if self.copy is None else (out.after - (self.after - self.copy) % n) % total
        return replace(out, prefetch=prefetch, copy=copy)


@dataclass(frozen=True, slots=True)
class Recompute(OfGap):
    """Drop ``tensor`` when kernel ``after`` ends; run its producers again just before kernel ``at`` (None: ``before``).

    It stays from then on; ``before`` is its next use.

    ``keep`` keeps the dropped tensors that are recovered on the way for their own later uses
    (SuperNeurons' speed-centric recomputation); without it they are freed at once (memory-centric).
    """

    keep: bool = False
    at: int | None = None

    kind: ClassVar[Name] = "recompute"
    codes: ClassVar[tuple[int, ...]] = (1,)
    excludes: ClassVar[tuple[Name, ...]] = ("rerun",)
    of_plan_1: ClassVar[tuple[str, ...]] = ("tensor", "after", "before", "keep")
    no_wrap: ClassVar[str] = "a persistent tensor cannot be recomputed over the iteration boundary"

    @property
    def back(self) -> int:
        """The kernel before which the tensor is recovered."""
        return self.before if self.at is None else self.at

    def _check_inside(self, n: int, where: str) -> None:
        if not self.after < self.back <= self.before:
            raise PlanError(f"{where}.at: kernel {self.at} is not after {self.after} and up to {self.before}")

    def check(self, program: Program, where: str) -> None:
        """Raises PlanError where the gap is none, or its chain of kernels cannot run again."""
        if reason := cannot_recompute(program, self.tensor, self.after, self.back):
            raise PlanError(f"{where}: {reason}")

    def row(self) -> Row:
        """int64[6]; see ``Decision.row``."""
        return self.codes[0], self.tensor, self.after, self.before, int(self.keep), _number(self.at)

    @classmethod
    def of_row(cls, row: Sequence[int]) -> Recompute:
        """The recomputation of such a row."""
        _, t, after, before, keep, at = row
        return cls(t, after, before, bool(keep), _or_none(at))


@dataclass(frozen=True, slots=True)
class Rerun(Kind):
    """Run ``kernel`` again just before kernel ``before``, which is later.

    A copy of a tensor then lives from the run that writes it to the last one that reads it before its writer's next
    run: the schedules of Checkmate (MLSys 2020, section 4: R, from which S follows) and of MOCCASIN's intervals.
    """

    kernel: int
    before: int

    kind: ClassVar[Name] = "rerun"
    codes: ClassVar[tuple[int, ...]] = (3,)

    def claim(self, program: Program, where: str) -> Hashable:
        """Itself. What is to be seen without the others is checked; simulator.schedule sees the rest."""
        n = len(program.kernels)
        if not (0 <= self.kernel < n and 0 <= self.before < n):
            raise _no_kernel(n, where, kernel=self.kernel, before=self.before)
        if self.kernel >= self.before:
            raise PlanError(f"{where}: kernel {self.kernel} has not run before kernel {self.before}")
        kernel = program.kernels[self.kernel]
        if not kernel.recomputable:
            raise PlanError(f"{where}: kernel {self.kernel} ({kernel.name}) cannot be run twice")
        return self

    def clash(self, other: int) -> str:
        """Two reruns of a kernel before the same kernel."""
        return f"the same as decisions[{other}]"

    def row(self) -> Row:
        """int64[6]; see ``Decision.row``."""
        return self.codes[0], -1, self.kernel, self.before, 0, -1

    @classmethod
    def of_row(cls, row: Sequence[int]) -> Rerun:
        """The rerun of such a row."""
        return cls(row[2], row[3])

    def moved(self, tensor: Mapping[int, int], kernel: Mapping[int, int], program: Program) -> Iterator[Rerun]:
        """See ``Decision.moved``: nothing where one of its two kernels has none there."""
        if self.kernel in kernel and self.before in kernel:
            yield Rerun(kernel[self.kernel], kernel[self.before])

    def renumbered(self, tensor: Sequence[int], first: int, n: int, total: int) -> Rerun:
        """Both kernels are counted from ``first``."""
        return Rerun(first + self.kernel, first + self.before)


Decision = Swap | Recompute | Rerun
KINDS: tuple[type[Decision], ...] = (Swap, Recompute, Rerun)


def _number(kernel: int | None) -> int:
    return -1 if kernel is None else kernel


def _or_none(kernel: int) -> int | None:
    return None if kernel < 0 else kernel


def _no_kernel(n: int, where: str, **kernels: int) -> PlanError:
    """The first of these is none of ``n``."""
    label, k = next((label, k) for label, k in kernels.items() if not 0 <= k < n)
    return PlanError(f"{where}.{label}: there is no kernel {k}")


def cannot_recompute(program: Program, tensor: int, after: int, before: int) -> str | None:
    """Why ``tensor`` cannot be recovered for kernel ``before`` by running kernels again; None if it can.

    Running the writers of the tensor again needs their inputs as they were. A non-persistent input that
    is gone or has changed is recovered in turn, from its own writers. A persistent one must still have
    the content it had, because nothing in the iteration can restore it.
    """
    if program.tensors[tensor].persistent:
        return f"tensor {tensor} is persistent; only tensors born in the iteration can be recomputed"
    if can_recompute(program, tensor, before):
        return None
    pending = [k for k in program.writes[tensor] if k < before]
    seen = set(pending)
    while pending:
        w = pending.pop()
        kernel = program.kernels[w]
        if not kernel.recomputable:
            return f"tensor {tensor} needs kernel {w} ({kernel.name}), which cannot be run twice"
        for x, until in program.available_until[w].items():
            if before <= until and x != tensor:
                continue  # present (or away by its own decision, which is checked on its own)
            if program.tensors[x].persistent:
                return (
                    f"tensor {tensor} needs kernel {w} ({kernel.name}), whose input {x} is overwritten "
                    f"before kernel {before}"
                )
            more = [k for k in program.writes[x] if k < w and k not in seen]
            seen.update(more)
            pending += more
    raise AssertionError(f"tensor {tensor} can be recomputed for kernel {before}")


def can_recompute(program: Program, tensor: int, before: int) -> bool:
    """Whether ``cannot_recompute`` finds no reason, without looking for one."""
    writers = program.writes[tensor]
    return not program.tensors[tensor].persistent and all(
        before <= program.again_until[w] for w in writers[: bisect_left(writers, before)]
    )
