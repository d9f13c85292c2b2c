"""Plan: the decisions to swap and recompute tensors in one program.

Kinds of decisions are defined in simulator.decisions. Plans are written as ``plan/2``; ``plan/1``, which lacks
``copy``, ``at`` and Rerun, can still be read.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from simulator.decisions import KINDS, Decision, Evict, Kind, Name, PlanError, Recompute, Rerun, Swap, cannot_recompute
from simulator.files import FormatError, fields, integers, load_json, write_json
from simulator.program import Program

__all__ = ["Decision", "Plan", "PlanError", "Recompute", "Rerun", "Swap", "cannot_recompute"]

FORMAT = "plan/2"
OneKind = TypeVar("OneKind", bound=Kind)


@dataclass(frozen=True)
class Plan:
    """Decisions for one program. Immutable; the order of the decisions has no meaning.

    Attributes:
        decisions: What is swapped, recomputed or rerun.
        fingerprint: Fingerprint of the program; "": any program with matching ids and gaps.
        planner: Key of the planner; "": unknown.
        limit: Memory limit in bytes that the plan was made for; 0: none.
        machine: Name of the machine that the plan was made for; "": unknown.
        variants: Pairs (kernel, index into its ``Kernel.variants``), ascending by kernel, that select algorithms. Other
            kernels use their own duration and workspace. Recomputed kernels use the selected variant, too. The ideal
            time remains that of the program as given.
        structure: ``Program.structure``; "": unknown, so that the plan cannot be ``retimed``.
    """

    decisions: tuple[Decision, ...] = ()
    fingerprint: str = ""
    planner: str = ""
    limit: int = 0
    machine: str = ""
    variants: tuple[tuple[int, int], ...] = ()
    structure: str = field(default="", compare=False)

    @classmethod
    def of(
        cls, program: Program, decisions: tuple[Decision, ...], planner: str = "", limit: int = 0, machine: str = ""
    ) -> Plan:
        """Returns a plan with the program's fingerprint and structure, so that it can be ``retimed``.

        Args:
            program: Program of the plan.
            decisions: Decisions, which are not checked.
            planner: Key of the planner.
            limit: Memory limit in bytes; 0: none.
            machine: Name of the machine.
        """
        return cls(decisions, program.fingerprint, planner, limit, machine, structure=program.structure)

    def retimed(self, program: Program) -> Plan:
        """Returns this plan for a program that differs only in times from the program it was made for.

        Raises:
            PlanError: The programs differ in more than times, or the plan does not record a structure.
        """
        if self.fingerprint in ("", program.fingerprint):
            self.check(program)
            return self
        if not self.structure:
            raise PlanError(f"{self._mismatch(program)}, and does not record whether only times differ; plan it again")
        retimed = replace(self, fingerprint=program.fingerprint)
        if self.structure != program.structure:
            try:
                replace(self, fingerprint="").check(program)
                reason = "its decisions would fit"
            except PlanError as error:
                reason = str(error)
            raise PlanError(
                f"the plan is for another program than {program.name!r}, and not only times differ: {reason}; "
                "plan it again"
            )
        retimed.check(program)
        return retimed

    def check(self, program: Program) -> None:
        """Raises PlanError with the first reason why this plan does not fit ``program``."""
        if self.fingerprint and self.fingerprint != program.fingerprint:
            differs_in_times = self.structure and self.structure == program.structure
            hint = "; only times differ: Plan.retimed, retime=true of experiments.evaluate" if differs_in_times else ""
            raise PlanError(self._mismatch(program) + hint)
        try:
            program.selected_variants(self.variants)
        except ValueError as error:
            raise PlanError(str(error)) from None
        claims: dict[Hashable, int] = {}
        restored_before: dict[int, list[int]] = {}  # tensor -> kernels before which a decision restores it
        for i, d in enumerate(self.decisions):
            where = f"decisions[{i}]"
            claim = d.claim(program, where)
            if (other := claims.setdefault(claim, i)) != i:
                raise PlanError(f"{where}: {d.clash(other)}; keep one of them")
            d.check(program, where)
            if isinstance(d, Evict):
                restored_before.setdefault(d.tensor, []).append(d.restored_before)
        kinds = {d.kind: type(d) for d in self.decisions}
        for kind in kinds.values():
            if conflict := next((kinds[name] for name in kind.excludes if name in kinds), None):
                raise PlanError(f"a plan has {kind.__name__} or {conflict.__name__} decisions, not both")
        for i, d in enumerate(self.decisions):
            d.check_conflicts(program, i, restored_before)

    def _mismatch(self, program: Program) -> str:
        expected = self.fingerprint[:12]
        actual = program.fingerprint[:12]
        return f"the plan is for another program (fingerprint {expected}, {program.name!r} has {actual})"

    def of_kind(self, kind: type[OneKind]) -> list[OneKind]:
        """Returns the decisions of one kind."""
        return [d for d in self.decisions if isinstance(d, kind)]

    def only(self, component: str, *kinds: Name) -> None:
        """Raises PlanError unless all decisions are of the given kinds.

        Args:
            component: Name of the component in the error message.
            kinds: Kinds that the component supports.
        """
        for i, d in enumerate(self.decisions):
            if d.kind not in kinds:
                raise PlanError(
                    f"decisions[{i}]: {component} does not support {d.kind} decisions; plan in another mode"
                )

    def to_dict(self) -> dict[str, Any]:
        """Returns the ``plan/2`` dictionary; ``structure`` and ``variants`` are left out if empty."""
        top = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "planner": self.planner,
            "limit": self.limit,
            "machine": self.machine,
            **({"structure": self.structure} if self.structure else {}),
            "decisions": [d.entry() for d in self.decisions],
        }
        return {**top, "variants": [list(pair) for pair in self.variants]} if self.variants else top

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """Reads a dictionary of ``plan/2`` or ``plan/1``.

        Raises:
            FormatError: An entry is malformed; the message names the first.
        """
        top = fields(
            data,
            "plan",
            {"format": str, "decisions": list},
            {
                "fingerprint": (str, ""),
                "planner": (str, ""),
                "limit": (int, 0),
                "machine": (str, ""),
                "variants": (list, []),
                "structure": (str, ""),
            },
        )
        if top["format"] not in ("plan/1", FORMAT):
            raise FormatError(f"plan.format: expected {FORMAT!r}, got {top['format']!r}")
        if top["limit"] < 0:
            raise FormatError(f"plan.limit: expected an integer of at least 0, got {top['limit']}")
        is_plan_1 = top["format"] != FORMAT
        kinds: dict[str, type[Decision]] = {kind.kind: kind for kind in KINDS if kind.plan_1_keys or not is_plan_1}
        decisions: list[Decision] = []
        for i, entry in enumerate(top["decisions"]):
            name = entry.get("kind") if isinstance(entry, dict) else None
            decision_class = kinds.get(name) if isinstance(name, str) else None
            decisions.append((decision_class or Swap).from_entry(entry, f"decisions[{i}]", is_plan_1))
            if not decision_class:
                *others, last = map(repr, kinds)
                raise FormatError(f"decisions[{i}].kind: expected {', '.join(others)} or {last}, got {name!r}")
        pairs = [integers(pair, f"variants[{i}]", length=2) for i, pair in enumerate(top["variants"])]
        variants = tuple((kernel, index) for kernel, index in pairs)
        metadata = {key: top[key] for key in ("fingerprint", "planner", "limit", "machine", "structure")}
        return cls(tuple(decisions), variants=variants, **metadata)

    def save(self, path: str | Path) -> None:
        """Writes ``plan/2`` JSON."""
        write_json(path, self.to_dict(), indent=1)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads JSON of ``plan/2`` or ``plan/1``.

        Raises:
            FormatError: The message names the file and its first malformed entry.
        """
        return load_json(path, cls.from_dict)
