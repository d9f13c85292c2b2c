"""The vocabulary: Tensor, Kernel, Program. Every other file is written in these words.

Units: time is integer nanoseconds, size is integer bytes. Intervals over kernels are half-open.
Indices: a tensor is named by its position in ``Program.tensors``, a kernel by its position in
``Program.kernels``; program order is execution order.

One tensor is one storage: views of it and in-place results share it. A persistent tensor lives across
iterations. Any other tensor is born at its first write and dies after its last access.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from simulator.files import FormatError, fields, integers, load_json, no_collections, write_json

FORMAT = "program/1"

TensorKind = Literal["input", "parameter", "buffer", "optimizer_state", "gradient", "activation"]
KernelKind = Literal[
    "conv", "matmul", "norm", "activation", "pool", "lrn", "dropout", "rnn", "reduce", "elementwise",
    "copy", "optimizer", "other",
]  # fmt: skip
Phase = Literal["forward", "backward", "optimizer"]

TENSOR_KINDS: frozenset[str] = frozenset(get_args(TensorKind))
KERNEL_KINDS: frozenset[str] = frozenset(get_args(KernelKind))
PHASES: frozenset[str] = frozenset(get_args(Phase))
# One size or duration beyond LONGEST is a mistake in units; sums of 2**20 of them still fit 64 bits.
LONGEST = 2**43
UNTIMED = (
    "name",
    "tensors",
    "accesses",
    "writes",
    "available_until",
    "again_until",
    "live_bytes",
    "peak_bytes",
    "structure",
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One storage."""

    name: str
    nbytes: int
    kind: TensorKind = "activation"
    persistent: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch on the compute stream.

    A kernel that updates a tensor in place has it in both ``inputs`` and ``outputs``. A tensor that is
    updated without its old content mattering to the other outputs (batch-norm statistics) is in
    ``outputs`` alone, which is what lets the kernel be run twice.
    """

    name: str
    kind: KernelKind
    phase: Phase
    inputs: tuple[int, ...]  # tensors read
    outputs: tuple[int, ...]  # tensors written; the first write of a tensor allocates it
    duration_ns: int
    workspace: int = 0  # bytes held while the kernel runs
    flops: int = 0
    bytes: int = 0  # memory traffic
    recomputable: bool = True  # running it twice changes nothing but its outputs
    variants: tuple[tuple[int, int], ...] = ()  # (duration_ns, workspace) per algorithm

    @property
    def accesses(self) -> tuple[int, ...]:
        """Tensors read or written, each once, inputs first."""
        return tuple(dict.fromkeys(self.inputs + self.outputs))


class Gap(NamedTuple):
    """An interval in which a tensor is alive and unused: after kernel ``after``, until ``before``.

    ``after > before`` for a persistent tensor means that the gap wraps over the iteration boundary.
    """

    tensor: int
    after: int
    before: int


class Operation(NamedTuple):
    """One line of the iteration in the papers' terms (DQN paper, section 4.2)."""

    kind: Literal["malloc", "write", "read", "free"]
    tensor: int
    kernel: int
    time_ns: int


@dataclass(frozen=True)
class Program:
    """One iteration of an iterative GPU job: a straight line of kernels over tensors.

    Raises:
        FormatError: an entry breaks a rule of the format (dangling id, negative size, a read before any
            write of a non-persistent tensor, …).
    """

    name: str
    tensors: tuple[Tensor, ...]
    kernels: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        _check(self)

    def __deepcopy__(self, memo: object) -> Program:
        """Itself: nothing of it changes (``gymnasium.make`` copies all that it is given)."""
        return self

    def __getstate__(self) -> dict[str, object]:
        """A copy, since what is cached may grow while another thread pickles this."""
        return dict(self.__dict__)

    @cached_property
    def accesses(self) -> tuple[tuple[int, ...], ...]:
        """Per tensor: the kernels that read or write it, ascending."""
        table: list[list[int]] = [[] for _ in self.tensors]
        for k, kernel in enumerate(self.kernels):
            for t in kernel.accesses:
                table[t].append(k)
        return tuple(map(tuple, table))

    @cached_property
    def writes(self) -> tuple[tuple[int, ...], ...]:
        """Per tensor: the kernels that write it, ascending."""
        table: list[list[int]] = [[] for _ in self.tensors]
        for k, kernel in enumerate(self.kernels):
            for t in dict.fromkeys(kernel.outputs):
                table[t].append(k)
        return tuple(map(tuple, table))

    def version(self, tensor: int, kernel: int) -> int:
        """Returns the kernel that wrote ``tensor`` last before ``kernel``; -1: none in this iteration."""
        i = bisect_left(self.writes[tensor], kernel)
        return self.writes[tensor][i - 1] if i else -1

    @cached_property
    def available_until(self) -> tuple[dict[int, int], ...]:
        """Per kernel, by input: the last kernel at which the input is as it was read, unless a plan has it away: the
        next writer, or the last use of a tensor that is not persistent."""
        found = []
        for k, kernel in enumerate(self.kernels):
            until = {}
            for x in kernel.inputs:
                writes = self.writes[x]
                i = bisect_left(writes, k)
                end = len(self.kernels) if self.tensors[x].persistent else self.accesses[x][-1]
                until[x] = min(writes[i], end) if i < len(writes) else end
            found.append(until)
        return tuple(found)

    @cached_property
    def again_until(self) -> tuple[int, ...]:
        """Per kernel: the last one before which it can run again, where nothing that lives is away; -1: it may not. It
        needs its inputs as they were: there still, or from kernels that can run again, too."""
        until: list[int] = []
        for k, kernel in enumerate(self.kernels):
            last = len(self.kernels) if kernel.recomputable else -1
            for x, there in self.available_until[k].items():
                if not self.tensors[x].persistent:
                    there = max(there, min(until[w] for w in self.writes[x] if w < k))
                last = min(last, there)
            until.append(last)
        return tuple(until)

    @cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """Per kernel: bytes in use while it runs with unlimited memory, its workspace included."""
        change = [0] * (len(self.kernels) + 1)
        for t, tensor in enumerate(self.tensors):
            if tensor.persistent:
                change[0] += tensor.nbytes
            elif self.accesses[t]:
                change[self.accesses[t][0]] += tensor.nbytes
                change[self.accesses[t][-1] + 1] -= tensor.nbytes
        resident, out = 0, []
        for k, kernel in enumerate(self.kernels):
            resident += change[k]
            out.append(resident + kernel.workspace)
        return tuple(out)

    @cached_property
    def peak_bytes(self) -> int:
        """Peak load: the smallest limit at which the program runs without a plan."""
        return max(self.live_bytes)

    @cached_property
    def ideal_ns(self) -> int:
        """Duration of one iteration with unlimited memory."""
        return sum(k.duration_ns for k in self.kernels)

    @cached_property
    def start_ns(self) -> tuple[int, ...]:
        """Per kernel, and one past the last: when it starts with unlimited memory."""
        times = [0]
        for kernel in self.kernels:
            times.append(times[-1] + kernel.duration_ns)
        return tuple(times)

    @cached_property
    @no_collections()
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON: plans name the program that they were made for."""
        return _sha256(self.to_dict())

    @cached_property
    @no_collections()
    def structure(self) -> str:
        """sha256 of the canonical JSON without any times: the same for a program whose times are others."""
        data = self.to_dict()
        for kernel in data["kernels"]:
            del kernel["duration_ns"]
            kernel["variants"] = [workspace for _, workspace in kernel["variants"]]
        return _sha256(data)

    def gaps(self, min_bytes: int = 0) -> list[Gap]:
        """Every interval between consecutive accesses of a tensor of at least ``min_bytes`` in which at
        least one other kernel runs. Persistent tensors have one more, over the iteration boundary."""
        found = []
        for t, tensor in enumerate(self.tensors):
            if tensor.nbytes < max(min_bytes, 1):
                continue
            uses = self.accesses[t]
            found += [Gap(t, a, b) for a, b in zip(uses, uses[1:], strict=False) if b - a > 1]
            if tensor.persistent and uses and len(self.kernels) - uses[-1] + uses[0] > 1:
                found.append(Gap(t, uses[-1], uses[0]))
        return found

    def gap_ns(self, gap: Gap) -> int:
        """Time from the end of ``after`` to the start of ``before``, with unlimited memory."""
        between = self.start_ns[gap.before] - self.start_ns[gap.after + 1]
        return between + self.ideal_ns if gap.after >= gap.before else between

    def operations(self) -> list[Operation]:
        """The iteration as malloc, write, read and free lines in time order.

        A malloc, the writes and the reads of a kernel carry its start time, its frees its end time.
        Persistent tensors have no malloc and no free.
        """
        lines = []
        for k, kernel in enumerate(self.kernels):
            begin, end = self.start_ns[k], self.start_ns[k + 1]
            fresh = [t for t in dict.fromkeys(kernel.outputs)
                     if not self.tensors[t].persistent and self.accesses[t][0] == k]  # fmt: skip
            lines += [Operation("malloc", t, k, begin) for t in fresh]
            lines += [Operation("read", t, k, begin) for t in dict.fromkeys(kernel.inputs)]
            lines += [Operation("write", t, k, begin) for t in dict.fromkeys(kernel.outputs)]
            lines += [Operation("free", t, k, end) for t in kernel.accesses
                      if not self.tensors[t].persistent and self.accesses[t][-1] == k]  # fmt: skip
        return lines

    def with_durations(self, durations_ns: Sequence[int]) -> Program:
        """The same program with other kernel durations (one per kernel); those of variants change in proportion.

        Raises:
            ValueError: a kernel with variants has no duration, so that there is no proportion.
        """
        kernels = []
        for i, (kernel, new) in enumerate(zip(self.kernels, map(int, durations_ns), strict=True)):
            old, variants = kernel.duration_ns, kernel.variants
            if variants and new != old:
                if not old:
                    raise ValueError(f"kernels[{i}]: its variants cannot be scaled from a duration of 0")
                variants = tuple((round(Fraction(ns * new, old)), workspace) for ns, workspace in variants)
            kernels.append(replace(kernel, duration_ns=new, variants=variants))
        if any(k.variants or not 0 <= k.duration_ns <= LONGEST for k in kernels):
            return Program(self.name, self.tensors, tuple(kernels))
        out = object.__new__(Program)  # what was checked, and what is known of it beside times, is as it was
        out.__dict__.update(
            {key: self.__dict__[key] for key in UNTIMED if key in self.__dict__}, kernels=tuple(kernels)
        )
        return out

    def chosen(self, variants: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """(duration_ns, workspace) of every kernel that ``variants`` names.

        Args:
            variants: pairs (kernel, index into its ``variants``), ascending by kernel.

        Raises:
            ValueError: with the first pair that is dangling, repeated or out of order.
        """
        out: dict[int, tuple[int, int]] = {}
        last = -1
        for i, (k, index) in enumerate(variants):
            if not 0 <= k < len(self.kernels):
                raise ValueError(f"variants[{i}]: there is no kernel {k}")
            if k <= last:
                raise ValueError(f"variants[{i}]: kernel {k} after kernel {last}; each comes once, ascending")
            if not 0 <= index < len(self.kernels[k].variants):
                count = len(self.kernels[k].variants)
                raise ValueError(f"variants[{i}]: kernel {k} has no variant {index}; it has {count}")
            out[k], last = self.kernels[k].variants[index], k
        return out

    def with_variants(self, variants: Sequence[tuple[int, int]]) -> Program:
        """The program as it runs under ``variants``: their durations and workspaces in the place of the kernels' own.

        Args, Raises: as ``chosen``.
        """
        if not variants:
            return self
        kernels = list(self.kernels)
        for k, (duration, workspace) in self.chosen(variants).items():
            kernels[k] = replace(kernels[k], duration_ns=duration, workspace=workspace)
        return Program(self.name, self.tensors, tuple(kernels))

    def to_dict(self) -> dict[str, Any]:
        """The ``program/1`` dictionary, every field present."""
        return {
            "format": FORMAT,
            "name": self.name,
            "tensors": [
                {"name": t.name, "nbytes": t.nbytes, "kind": t.kind, "persistent": t.persistent}
                for t in self.tensors
            ],
            "kernels": [
                {"name": k.name, "kind": k.kind, "phase": k.phase, "inputs": list(k.inputs),
                 "outputs": list(k.outputs), "duration_ns": k.duration_ns, "workspace": k.workspace,
                 "flops": k.flops, "bytes": k.bytes, "recomputable": k.recomputable,
                 "variants": [list(v) for v in k.variants]}
                for k in self.kernels
            ],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: object) -> Program:
        """Reads a ``program/1`` dictionary.

        Raises:
            FormatError: naming the first malformed entry.
        """
        top = fields(data, "program", {"format": str, "name": str, "tensors": list, "kernels": list}, {})
        if top["format"] != FORMAT:
            raise FormatError(f"program.format: expected {FORMAT!r}, got {top['format']!r}")
        _printable(top["name"], "program.name")
        tensors = [
            Tensor(**fields(entry, f"tensors[{i}]", _TENSOR_REQUIRED, {})) for i, entry in enumerate(top["tensors"])
        ]
        kernels = []
        for i, entry in enumerate(top["kernels"]):
            where = f"kernels[{i}]"
            got = fields(entry, where, _KERNEL_REQUIRED, _KERNEL_OPTIONAL)
            for side in ("inputs", "outputs"):
                got[side] = integers(got[side], f"{where}.{side}")
            got["variants"] = tuple(
                integers(v, f"{where}.variants[{j}]", length=2) for j, v in enumerate(got["variants"])
            )
            _printable(got["name"], f"{where}.name")
            kernels.append(Kernel(**got))
        for i, tensor in enumerate(tensors):
            _printable(tensor.name, f"tensors[{i}].name")
        return cls(top["name"], tuple(tensors), tuple(kernels))

    def save(self, path: str | Path) -> None:
        """Writes ``program/1`` JSON (gzip when the name ends in .gz)."""
        write_json(path, self.to_dict())

    @classmethod
    @no_collections()
    def load(cls, path: str | Path) -> Program:
        """Reads ``program/1`` JSON (.json or .json.gz).

        Raises:
            FormatError: naming the file and its first malformed entry.
        """
        return load_json(path, cls.from_dict)


def _sha256(data: dict[str, Any]) -> str:
    """That of the canonical JSON."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _printable(name: str, where: str) -> None:
    """A terminal does as it is told by other characters; raises FormatError."""
    if not name.isprintable():
        raise FormatError(f"{where}: {name[:40]!r} has characters that cannot be printed")


_TENSOR_REQUIRED = {"name": str, "nbytes": int, "kind": str, "persistent": bool}
_KERNEL_REQUIRED = {"name": str, "kind": str, "inputs": list, "outputs": list}
_KERNEL_OPTIONAL: dict[str, tuple[type, Any]] = {
    "phase": (str, "forward"), "duration_ns": (int, 0), "workspace": (int, 0), "flops": (int, 0),
    "bytes": (int, 0), "recomputable": (bool, True), "variants": (list, []),
}  # fmt: skip


def _check(program: Program) -> None:
    """The rules a program obeys however it was made; raises FormatError naming the entry."""

    def amount(value: int, where: str, bits: int = LONGEST.bit_length() - 1) -> None:
        if not 0 <= value <= 2**bits:
            raise FormatError(f"{where}: expected an integer from 0 to 2**{bits}, got {value}")

    for i, tensor in enumerate(program.tensors):
        amount(tensor.nbytes, f"tensors[{i}].nbytes")
        if tensor.kind not in TENSOR_KINDS:
            raise FormatError(f"tensors[{i}].kind: unknown kind {tensor.kind!r}")
    if not program.kernels:
        raise FormatError("kernels: a program needs at least one")
    written: set[int] = set()
    for i, kernel in enumerate(program.kernels):
        where = f"kernels[{i}]"
        if kernel.kind not in KERNEL_KINDS:
            raise FormatError(f"{where}.kind: unknown kind {kernel.kind!r}")
        if kernel.phase not in PHASES:
            raise FormatError(f"{where}.phase: unknown phase {kernel.phase!r}")
        for name in ("duration_ns", "workspace", "flops", "bytes"):
            amount(getattr(kernel, name), f"{where}.{name}", 62 if name in ("flops", "bytes") else 43)
        for j, (duration, workspace) in enumerate(kernel.variants):
            amount(duration, f"{where}.variants[{j}][0]")
            amount(workspace, f"{where}.variants[{j}][1]")
        for side in ("inputs", "outputs"):
            for j, t in enumerate(getattr(kernel, side)):
                if not 0 <= t < len(program.tensors):
                    raise FormatError(f"{where}.{side}[{j}]: there is no tensor {t}")
        for j, t in enumerate(kernel.inputs):
            if t not in written and not program.tensors[t].persistent:
                raise FormatError(
                    f"{where}.inputs[{j}]: tensor {t} ({program.tensors[t].name!r}) is read before any "
                    "write and is not persistent"
                )
        written.update(kernel.outputs)
