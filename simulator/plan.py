"""Plan: what to swap, what to recompute, and when. A plan is data.

A Swap or a Recompute empties one gap of a tensor (simulator.program.Gap): the time between two consecutive uses.
A Rerun says which kernel runs again and when; which tensors are away meanwhile follows from all of them
(simulator.schedule). ``plan/2`` is written; ``plan/1``, which has neither ``copy`` nor ``at`` nor Rerun, is read, too.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simulator.files import FormatError, fields, integers, load_json, write_json
from simulator.program import Program

FORMAT = "plan/2"
READS = ("plan/1", FORMAT)


class PlanError(ValueError):
    """A plan does not fit its program; the message gives the first reason."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Swap ``tensor`` out when kernel ``after`` ends; have it back for kernel ``before``.

    ``after`` is any kernel from the tensor's last use before the gap, up to (not including) ``before``.
    ``prefetch`` is the kernel at whose end the swap-in is issued; None leaves it to the simulator's
    rule 5. For a persistent tensor the gap may wrap over the iteration boundary (``after >= before``).
    ``sync``: compute waits; no kernel starts between the end of ``after`` and the completion of this
    swap-out (vDNN's layer-wise synchronisation, PyTorch's save_on_cpu).
    ``copy`` is the kernel at whose end the copy to the host is issued, from the last write of the present content
    up to ``after``: reads do not change it. None: ``after``. The memory is free when the copy is complete and
    ``after`` has ended.
    """

    tensor: int
    after: int
    before: int
    prefetch: int | None = None
    sync: bool = False
    copy: int | None = None


@dataclass(frozen=True, slots=True)
class Recompute:
    """Drop ``tensor`` when kernel ``after`` ends; run its producers again just before kernel ``at`` (None: ``before``).

    It stays from then on; ``before`` is its next use.

    ``keep`` keeps the dropped tensors that are recovered on the way for their own later uses
    (SuperNeurons' speed-centric recomputation); without it they are freed at once (memory-centric).
    """

    tensor: int
    after: int
    before: int
    keep: bool = False
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Rerun:
    """Run ``kernel`` again just before kernel ``before``, which is later.

    A copy of a tensor then lives from the run that writes it to the last one that reads it before its writer's next
    run: the schedules of Checkmate (MLSys 2020, section 4: R, from which S follows) and of MOCCASIN's intervals.
    """

    kernel: int
    before: int


Decision = Swap | Recompute | Rerun


@dataclass(frozen=True)
class Plan:
    """Decisions for one program. Immutable; the order of the decisions has no meaning.

    ``variants``: pairs (kernel, index into its ``Kernel.variants``), ascending by kernel: the algorithms to run with.
    A kernel that is not named runs with its own duration and workspace. Times of recomputation are those of the
    chosen algorithms, too; the ideal time remains that of the program as given.
    """

    decisions: tuple[Decision, ...] = ()
    fingerprint: str = ""  # of the program; "" fits any program whose ids and gaps fit
    planner: str = ""
    limit: int = 0  # bytes the plan was made for; 0: none
    machine: str = ""
    variants: tuple[tuple[int, int], ...] = ()
    # Of the program; "": not known, and the plan cannot be ``retimed``. The fingerprint tells plans apart without it.
    structure: str = field(default="", compare=False)

    @classmethod
    def of(
        cls, program: Program, decisions: tuple[Decision, ...], planner: str = "", limit: int = 0, machine: str = ""
    ) -> Plan:  # fmt: skip
        """A plan that names its program, whose times may change later (``retimed``)."""
        return cls(decisions, program.fingerprint, planner, limit, machine, structure=program.structure)

    def retimed(self, program: Program) -> Plan:
        """This plan for ``program``, which is the one that it was made for, but for its times.

        Raises:
            PlanError: they differ in more, or the plan does not say which structure it was made for.
        """
        if self.fingerprint in ("", program.fingerprint):
            self.check(program)
            return self
        if not self.structure:
            raise PlanError(
                f"the plan is for another program (fingerprint {self.fingerprint[:12]}, {program.name!r} has "
                f"{program.fingerprint[:12]}), and was saved without what tells whether only times differ"
            )
        out = replace(self, fingerprint=program.fingerprint)
        if self.structure != program.structure:
            try:
                replace(self, fingerprint="").check(program)
                first = "its decisions would fit"
            except PlanError as error:
                first = str(error)
            raise PlanError(f"the plan is for another program than {program.name!r}, not only for other times: {first}")
        out.check(program)
        return out

    def check(self, program: Program) -> None:
        """Raises PlanError with the first reason why this plan does not fit ``program``."""
        if self.fingerprint and self.fingerprint != program.fingerprint:
            raise PlanError(
                f"the plan is for another program (fingerprint {self.fingerprint[:12]}, "
                f"{program.name!r} has {program.fingerprint[:12]})"
                + (
                    "; only times differ: Plan.retimed, retime=true of experiments.evaluate"
                    if self.structure and self.structure == program.structure
                    else ""
                )
            )
        try:
            program.chosen(self.variants)
        except ValueError as error:
            raise PlanError(str(error)) from None
        taken: dict[tuple[int, int], int] = {}
        reruns: dict[Rerun, int] = {}
        for i, decision in enumerate(self.decisions):
            where = f"decisions[{i}]"
            if isinstance(decision, Rerun):
                _check_rerun(program, decision, where)
                if decision in reruns:
                    raise PlanError(f"{where}: the same as decisions[{reruns[decision]}]")
                reruns[decision] = i
                continue
            gap = _gap_index(program, decision, where)
            if (decision.tensor, gap) in taken:
                raise PlanError(
                    f"{where}: tensor {decision.tensor} is already away before kernel {decision.before} "
                    f"by decisions[{taken[decision.tensor, gap]}]"
                )
            taken[decision.tensor, gap] = i
            if isinstance(decision, Recompute):
                reason = cannot_recompute(program, decision.tensor, decision.after, recovered_at(decision))
                if reason:
                    raise PlanError(f"{where}: {reason}")
        if reruns and any(isinstance(d, Recompute) for d in self.decisions):
            raise PlanError("a plan has Recompute or Rerun decisions, not both")
        self._check_copies(program)

    def _check_copies(self, program: Program) -> None:
        """A copy is made of what is there: after the last write and after the tensor's earlier gaps."""
        n = len(program.kernels)
        ends: dict[int, list[int]] = {}  # tensor: kernels by which it is back
        for d in self.decisions:
            if not isinstance(d, Rerun):
                ends.setdefault(d.tensor, []).append(d.before if isinstance(d, Swap) else recovered_at(d))
        for i, d in enumerate(self.decisions):
            if not isinstance(d, Swap) or d.copy is None or d.copy == d.after:
                continue
            where, t = f"decisions[{i}].copy", d.tensor
            if not 0 <= d.copy < n:
                raise PlanError(f"{where}: there is no kernel {d.copy}")
            if not program.tensors[t].persistent and not program.accesses[t][0] <= d.copy <= d.after:
                raise PlanError(f"{where}: kernel {d.copy} is not from the birth of tensor {t} up to kernel {d.after}")
            back = (d.after - d.copy) % n
            if any((d.after - w) % n < back for w in program.writes[t]):
                raise PlanError(
                    f"{where}: tensor {t} is written between the end of kernel {d.copy} and that of {d.after}"
                )
            if any((d.after - k) % n < back for k in ends[t]):
                raise PlanError(f"{where}: tensor {t} is away between the end of kernel {d.copy} and that of {d.after}")

    def to_dict(self) -> dict[str, Any]:
        """The ``plan/2`` dictionary; ``structure`` and ``variants`` stand in it where there are any."""
        out: list[dict[str, Any]] = []
        for d in self.decisions:
            entry: dict[str, Any]
            if isinstance(d, Rerun):
                out.append({"kind": "rerun", "kernel": d.kernel, "before": d.before})
                continue
            entry = {"kind": "swap" if isinstance(d, Swap) else "recompute",
                     "tensor": d.tensor, "after": d.after, "before": d.before}  # fmt: skip
            if isinstance(d, Swap):
                if d.prefetch is not None:
                    entry["prefetch"] = d.prefetch
                if d.sync:
                    entry["sync"] = True
                if d.copy is not None:
                    entry["copy"] = d.copy
            else:
                if d.keep:
                    entry["keep"] = True
                if d.at is not None:
                    entry["at"] = d.at
            out.append(entry)
        top = {"format": FORMAT, "fingerprint": self.fingerprint, "planner": self.planner,
               "limit": self.limit, "machine": self.machine,
               **({"structure": self.structure} if self.structure else {}), "decisions": out}  # fmt: skip
        return {**top, "variants": [list(pair) for pair in self.variants]} if self.variants else top

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """Reads a dictionary of ``plan/2`` or ``plan/1``.

        Raises:
            FormatError: naming the first malformed entry.
        """
        top = fields(
            data, "plan", {"format": str, "decisions": list},
            {"fingerprint": (str, ""), "planner": (str, ""), "limit": (int, 0), "machine": (str, ""),
             "variants": (list, []), "structure": (str, "")},
        )  # fmt: skip
        if top["format"] not in READS:
            raise FormatError(f"plan.format: expected {FORMAT!r}, got {top['format']!r}")
        new = top["format"] == FORMAT
        if top["limit"] < 0:
            raise FormatError(f"plan.limit: expected an integer of at least 0, got {top['limit']}")
        decisions: list[Decision] = []
        for i, entry in enumerate(top["decisions"]):
            where = f"decisions[{i}]"
            kind = entry.get("kind") if isinstance(entry, dict) else None
            gap = {"kind": str, "tensor": int, "after": int, "before": int}
            if kind == "recompute":
                got = fields(entry, where, gap, {"keep": (bool, False), **({"at": (int, None)} if new else {})})
                decisions.append(Recompute(got["tensor"], got["after"], got["before"], got["keep"], got.get("at")))
            elif kind == "rerun" and new:
                got = fields(entry, where, {"kind": str, "kernel": int, "before": int}, {})
                decisions.append(Rerun(got["kernel"], got["before"]))
            else:
                more = {"copy": (int, None)} if new else {}
                got = fields(entry, where, gap, {"prefetch": (int, None), "sync": (bool, False), **more})
                pinned, copy = got["prefetch"], got.get("copy")
                if kind != "swap":
                    known = "'swap', 'recompute' or 'rerun'" if new else "'swap' or 'recompute'"
                    raise FormatError(f"{where}.kind: expected {known}, got {kind!r}")
                decisions.append(Swap(got["tensor"], got["after"], got["before"], pinned, got["sync"], copy))
        pairs = [integers(pair, f"variants[{i}]", length=2) for i, pair in enumerate(top["variants"])]
        variants = tuple((kernel, index) for kernel, index in pairs)
        return cls(
            tuple(decisions),
            top["fingerprint"],
            top["planner"],
            top["limit"],
            top["machine"],
            variants,
            top["structure"],
        )

    def save(self, path: str | Path) -> None:
        """Writes ``plan/2`` JSON."""
        write_json(path, self.to_dict(), indent=1)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads JSON of ``plan/2`` or ``plan/1``.

        Raises:
            FormatError: naming the file and its first malformed entry.
        """
        return load_json(path, cls.from_dict)


def copied_at(d: Swap) -> int:
    """The kernel at whose end the copy to the host is issued."""
    return d.after if d.copy is None else d.copy


def recovered_at(d: Recompute) -> int:
    """The kernel before which the tensor is recovered."""
    return d.before if d.at is None else d.at


def _check_rerun(program: Program, d: Rerun, where: str) -> None:
    """What of a Rerun can be seen without the others; simulator.schedule sees the rest.

    Raises:
        PlanError: an id is dangling, the kernel cannot run twice or has not run yet.
    """
    for label, k in (("kernel", d.kernel), ("before", d.before)):
        if not 0 <= k < len(program.kernels):
            raise PlanError(f"{where}.{label}: there is no kernel {k}")
    if d.kernel >= d.before:
        raise PlanError(f"{where}: kernel {d.kernel} has not run before kernel {d.before}")
    if not program.kernels[d.kernel].recomputable:
        raise PlanError(f"{where}: kernel {d.kernel} ({program.kernels[d.kernel].name}) cannot be run twice")


def _gap_index(program: Program, decision: Swap | Recompute, where: str) -> int:
    """Which gap of its tensor a decision empties: the index of the use that opens it.

    Raises:
        PlanError: an id is dangling or the decision does not lie in one gap.
    """
    t, after, before = decision.tensor, decision.after, decision.before
    n = len(program.kernels)
    if not 0 <= t < len(program.tensors):
        raise PlanError(f"{where}: there is no tensor {t}")
    for label, k in (("after", after), ("before", before)):
        if not 0 <= k < n:
            raise PlanError(f"{where}.{label}: there is no kernel {k}")
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
        if isinstance(decision, Recompute):
            raise PlanError(f"{where}: a persistent tensor cannot be recomputed over the iteration boundary")
        opens, closes = previous, uses[0]
        if previous != len(uses) - 1:
            closes = -1
    if closes != before:
        raise PlanError(
            f"{where}: tensor {t} is used between the end of kernel {after} and kernel {before}; "
            "a decision empties one gap"
        )
    if isinstance(decision, Recompute) and not after < recovered_at(decision) <= before:
        raise PlanError(f"{where}.at: kernel {decision.at} is not after {after} and up to {before}")
    if isinstance(decision, Swap) and decision.prefetch is not None:
        p = decision.prefetch
        inside = after <= p < before if after < before else (after <= p < n or 0 <= p < before)
        if not inside:
            raise PlanError(f"{where}.prefetch: kernel {p} is not from {after} up to {before}")
    return opens


def cannot_recompute(program: Program, tensor: int, after: int, before: int) -> str | None:
    """Why ``tensor`` cannot be recovered for kernel ``before`` by running kernels again; None if it can.

    Running the writers of the tensor again needs their inputs as they were. A non-persistent input that
    is gone or has changed is recovered in turn, from its own writers. A persistent one must still have
    the content it had, because nothing in the iteration can restore it.
    """
    if program.tensors[tensor].persistent:
        return f"tensor {tensor} is persistent; only tensors born in the iteration can be recomputed"
    pending = [k for k in program.writes[tensor] if k < before]
    seen = set(pending)
    while pending:
        w = pending.pop()
        kernel = program.kernels[w]
        if not kernel.recomputable:
            return f"tensor {tensor} needs kernel {w} ({kernel.name}), which cannot be run twice"
        for x in kernel.inputs:
            writers = program.writes[x]
            if program.tensors[x].persistent:
                if any(w <= k < before for k in writers):
                    return (
                        f"tensor {tensor} needs kernel {w} ({kernel.name}), whose input {x} is overwritten "
                        f"before kernel {before}"
                    )
                continue
            alive = program.accesses[x][-1] >= before and x != tensor
            if alive and not any(w <= k < before for k in writers):
                continue  # present (or away by its own decision, which is checked on its own)
            for k in writers:
                if k < w and k not in seen:
                    seen.add(k)
                    pending.append(k)
    return None
