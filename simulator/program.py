"""Tensor, Kernel and Program: one iteration of a GPU workload.

Units: time is integer nanoseconds, size is integer bytes. Intervals over kernels are half-open.
A tensor is identified by its index in ``Program.tensors``, a kernel by its index in ``Program.kernels``. Program order
is execution order.

A tensor is one storage: its views and in-place results share it. A persistent tensor lives across iterations. Any other
tensor is allocated at its first write and freed after its last access.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from simulator.files import FormatError, fields, integers, load_json, no_collections, write_json

FORMAT = "program/1"

TensorKind = Literal["input", "parameter", "buffer", "optimizer_state", "gradient", "activation"]
KernelKind = Literal[
    "conv",
    "matmul",
    "norm",
    "activation",
    "pool",
    "lrn",
    "dropout",
    "rnn",
    "reduce",
    "elementwise",
    "copy",
    "optimizer",
    "other",
]
Phase = Literal["forward", "backward", "optimizer"]

TENSOR_KINDS: frozenset[str] = frozenset(get_args(TensorKind))
KERNEL_KINDS: frozenset[str] = frozenset(get_args(KernelKind))
# A size or duration above MAX_AMOUNT is a unit error. Sums of 2**20 such values still fit 64 bits.
MAX_AMOUNT = 2**43


@dataclass(frozen=True, slots=True)
class Tensor:
    """One storage with all its views.

    Attributes:
        name: Name in reports and traces.
        nbytes: Size in bytes.
        kind: What the tensor holds.
        persistent: Whether it lives across iterations.
    """

    name: str
    nbytes: int
    kind: TensorKind = "activation"
    persistent: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch on the compute stream.

    A kernel that updates a tensor in place lists it in both ``inputs`` and ``outputs``. If the old content does not
    affect the other outputs (batch-norm statistics), the tensor is in ``outputs`` only, so that the kernel can be
    recomputed.

    Attributes:
        name: Name of the operator.
        kind: Class of the operator, by which times and recomputation are modeled.
        phase: Part of the step that launches it.
        inputs: Indices of the tensors read.
        outputs: Indices of the tensors written; the first write of a tensor allocates it.
        duration_ns: Time on the compute stream alone, in ns.
        workspace: Bytes held while the kernel runs.
        flops: Floating-point operations.
        bytes: Memory traffic in bytes.
        recomputable: Whether running it twice has no side effects besides its outputs.
        variants: Pairs (duration_ns, workspace), one per algorithm.
        module: Dotted path of the module that runs it, in a backward pass of its forward operator's; "": unknown.
    """

    name: str
    kind: KernelKind
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    duration_ns: int
    workspace: int = 0
    flops: int = 0
    bytes: int = 0
    recomputable: bool = True
    variants: tuple[tuple[int, int], ...] = ()
    module: str = field(default="", repr=False, compare=False)

    @property
    def accesses(self) -> tuple[int, ...]:
        """Tensors read or written, each once, inputs first."""
        return tuple(dict.fromkeys(self.inputs + self.outputs))


class Gap(NamedTuple):
    """Interval between two consecutive uses of a tensor: after kernel ``after``, until kernel ``before``.

    ``after >= before`` for a persistent tensor means that the gap wraps over the iteration boundary.
    """

    tensor: int
    after: int
    before: int


class Operation(NamedTuple):
    """One memory operation of the iteration in the terms of the DQN paper (section 4.2).

    Attributes:
        kind: What is done to the tensor.
        tensor: Index of the tensor.
        kernel: Index of the kernel at whose start or end it is done.
        time_ns: Time since the start of the iteration, with unlimited memory.
    """

    kind: Literal["malloc", "write", "read", "free"]
    tensor: int
    kernel: int
    time_ns: int


@dataclass(frozen=True)
class Program:
    """One training iteration: a sequence of kernels over tensors.

    Attributes:
        name: Name in reports.
        tensors: Storages; kernels refer to them by index.
        kernels: Launches in execution order.

    Raises:
        FormatError: An entry violates the format (dangling id, negative size, read before the first write, …).
    """

    name: str
    tensors: tuple[Tensor, ...]
    kernels: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        _check(self)

    def __deepcopy__(self, memo: object) -> Program:
        """Returns itself, because a program is immutable (``gymnasium.make`` deep-copies its arguments)."""
        return self

    def __getstate__(self) -> dict[str, object]:
        """Returns a copy of the attributes, because another thread may add cached properties during pickling."""
        return dict(self.__dict__)

    @cached_property
    def accesses(self) -> tuple[tuple[int, ...], ...]:
        """Kernels that read or write each tensor, ascending."""
        return self._kernels_by_tensor([kernel.accesses for kernel in self.kernels])

    @cached_property
    def writes(self) -> tuple[tuple[int, ...], ...]:
        """Kernels that write each tensor, ascending."""
        return self._kernels_by_tensor([dict.fromkeys(kernel.outputs) for kernel in self.kernels])

    def _kernels_by_tensor(self, tensors: Sequence[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
        table: list[list[int]] = [[] for _ in self.tensors]
        for k, accessed in enumerate(tensors):
            for t in accessed:
                table[t].append(k)
        return tuple(map(tuple, table))

    def version(self, tensor: int, kernel: int) -> int:
        """Returns the last kernel before ``kernel`` that writes ``tensor``, or -1 if none in this iteration does."""
        i = bisect_left(self.writes[tensor], kernel)
        return self.writes[tensor][i - 1] if i else -1

    @cached_property
    def available_until(self) -> tuple[dict[int, int], ...]:
        """Last kernel at which each input of each kernel still has the content that the kernel read.

        Per kernel, a dictionary from input to its next writer or, for a non-persistent tensor, its last use. Evictions
        by a plan are not considered.
        """
        found = []
        for k, kernel in enumerate(self.kernels):
            last_kernels = {}
            for x in kernel.inputs:
                writes = self.writes[x]
                i = bisect_left(writes, k)
                last_use = len(self.kernels) if self.tensors[x].persistent else self.accesses[x][-1]
                last_kernels[x] = min(writes[i], last_use) if i < len(writes) else last_use
            found.append(last_kernels)
        return tuple(found)

    @cached_property
    def recomputable_until(self) -> tuple[int, ...]:
        """Last kernel before which each kernel can be recomputed with no live tensor evicted; -1 if never.

        Its inputs must be unchanged, or be outputs of kernels that can be recomputed themselves.
        """
        bounds: list[int] = []
        for k, kernel in enumerate(self.kernels):
            bound = len(self.kernels) if kernel.recomputable else -1
            for x, input_bound in self.available_until[k].items():
                if not self.tensors[x].persistent:
                    input_bound = max(input_bound, min(bounds[w] for w in self.writes[x] if w < k))
                bound = min(bound, input_bound)
            bounds.append(bound)
        return tuple(bounds)

    @cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes in use during each kernel with unlimited memory, workspace included."""
        change = [0] * (len(self.kernels) + 1)
        for t, tensor in enumerate(self.tensors):
            if tensor.persistent:
                change[0] += tensor.nbytes
            elif self.accesses[t]:
                change[self.accesses[t][0]] += tensor.nbytes
                change[self.accesses[t][-1] + 1] -= tensor.nbytes
        return tuple(used + k.workspace for used, k in zip(accumulate(change), self.kernels, strict=False))

    @cached_property
    def peak_bytes(self) -> int:
        """Peak load: smallest limit at which the program runs without a plan."""
        return max(self.live_bytes)

    @cached_property
    def ideal_ns(self) -> int:
        """Duration of one iteration with unlimited memory."""
        return sum(k.duration_ns for k in self.kernels)

    @cached_property
    def start_ns(self) -> tuple[int, ...]:
        """Start time of each kernel with unlimited memory, then the end of the last kernel; (kernels + 1,)."""
        return (0, *accumulate(kernel.duration_ns for kernel in self.kernels))

    @cached_property
    @no_collections()
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON without modules; plans store it to identify their program."""
        return _sha256(self._unnamed())

    @cached_property
    @no_collections()
    def structure(self) -> str:
        """SHA-256 of the canonical JSON without times and modules; equal for programs that differ only in durations."""
        data = self._unnamed()
        for kernel in data["kernels"]:
            del kernel["duration_ns"]
            kernel["variants"] = [workspace for _, workspace in kernel["variants"]]
        return _sha256(data)

    def _unnamed(self) -> dict[str, Any]:
        """Returns the ``program/1`` dictionary without modules, which change no simulation."""
        data = self.to_dict()
        for kernel in data["kernels"]:
            kernel.pop("module", None)
        return data

    def gaps(self, min_bytes: int = 0) -> list[Gap]:
        """Returns the intervals between consecutive uses of tensors that contain at least one other kernel.

        Persistent tensors have one more gap, over the iteration boundary.

        Args:
            min_bytes: Smallest tensor to consider.

        Returns:
            Gaps by tensor, then by time.
        """
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
        """Returns the time from the end of ``after`` to the start of ``before`` with unlimited memory."""
        between = self.start_ns[gap.before] - self.start_ns[gap.after + 1]
        return between + self.ideal_ns if gap.after >= gap.before else between

    def operations(self) -> list[Operation]:
        """Returns the iteration as malloc, write, read and free operations in time order.

        The malloc, reads and writes of a kernel carry its start time, its frees its end time. Persistent tensors have
        neither malloc nor free.
        """
        operations = []
        for k, kernel in enumerate(self.kernels):
            begin = self.start_ns[k]
            end = self.start_ns[k + 1]
            allocated = [
                t for t in dict.fromkeys(kernel.outputs) if not self.tensors[t].persistent and self.accesses[t][0] == k
            ]
            operations += [Operation("malloc", t, k, begin) for t in allocated]
            operations += [Operation("read", t, k, begin) for t in dict.fromkeys(kernel.inputs)]
            operations += [Operation("write", t, k, begin) for t in dict.fromkeys(kernel.outputs)]
            operations += [
                Operation("free", t, k, end)
                for t in kernel.accesses
                if not self.tensors[t].persistent and self.accesses[t][-1] == k
            ]
        return operations

    def with_durations(self, durations_ns: Sequence[int]) -> Program:
        """Returns this program with other kernel durations; durations of variants are scaled in proportion.

        Args:
            durations_ns: (kernels,) new durations.

        Returns:
            A program with the same tensors and kernels otherwise.

        Raises:
            ValueError: A kernel with variants has duration 0, so its variants cannot be scaled.
        """
        kernels = []
        for i, (kernel, new_ns) in enumerate(zip(self.kernels, map(int, durations_ns), strict=True)):
            old = kernel.duration_ns
            variants = kernel.variants
            if variants and new_ns != old:
                if not old:
                    raise ValueError(f"kernels[{i}]: its variants cannot be scaled from a duration of 0; time it first")
                variants = tuple((round(Fraction(ns * new_ns, old)), workspace) for ns, workspace in variants)
            kernels.append(replace(kernel, duration_ns=new_ns, variants=variants))
        if any(k.variants or not 0 <= k.duration_ns <= MAX_AMOUNT for k in kernels):
            return Program(self.name, self.tensors, tuple(kernels))
        out = object.__new__(Program)  # skips the checks and keeps cached properties that do not depend on times
        timed = ("kernels", "ideal_ns", "start_ns", "fingerprint")
        out.__dict__.update({key: value for key, value in self.__getstate__().items() if key not in timed})
        out.__dict__["kernels"] = tuple(kernels)
        return out

    def selected_variants(self, variants: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Returns (duration_ns, workspace) of every kernel that ``variants`` names.

        Args:
            variants: Pairs (kernel, index into its ``variants``), ascending by kernel.

        Returns:
            Duration in ns and workspace in bytes by kernel index.

        Raises:
            ValueError: A pair is dangling, repeated or out of order; the message names the first.
        """
        out: dict[int, tuple[int, int]] = {}
        last = -1
        for i, (k, index) in enumerate(variants):
            if not 0 <= k < len(self.kernels):
                raise ValueError(f"variants[{i}]: there is no kernel {k}; the program has {len(self.kernels)}")
            if k <= last:
                raise ValueError(f"variants[{i}]: kernel {k} after kernel {last}; each comes once, ascending")
            if not 0 <= index < len(self.kernels[k].variants):
                count = len(self.kernels[k].variants)
                raise ValueError(f"variants[{i}]: kernel {k} has no variant {index}; it has {count}")
            out[k] = self.kernels[k].variants[index]
            last = k
        return out

    def with_variants(self, variants: Sequence[tuple[int, int]]) -> Program:
        """Returns this program with the durations and workspaces of the given variants.

        Arguments and errors are those of ``selected_variants``.
        """
        if not variants:
            return self
        kernels = list(self.kernels)
        for k, (duration, workspace) in self.selected_variants(variants).items():
            kernels[k] = replace(kernels[k], duration_ns=duration, workspace=workspace)
        return Program(self.name, self.tensors, tuple(kernels))

    def to_dict(self) -> dict[str, Any]:
        """Returns the ``program/1`` dictionary with every field; kernels without a module lack that key."""
        return {
            "format": FORMAT,
            "name": self.name,
            "tensors": [
                {"name": t.name, "nbytes": t.nbytes, "kind": t.kind, "persistent": t.persistent} for t in self.tensors
            ],
            "kernels": [
                {
                    "name": k.name,
                    "kind": k.kind,
                    "phase": k.phase,
                    "inputs": list(k.inputs),
                    "outputs": list(k.outputs),
                    "duration_ns": k.duration_ns,
                    "workspace": k.workspace,
                    "flops": k.flops,
                    "bytes": k.bytes,
                    "recomputable": k.recomputable,
                    "variants": [list(v) for v in k.variants],
                    **({"module": k.module} if k.module else {}),
                }
                for k in self.kernels
            ],
        }

    @classmethod
    def from_dict(cls, data: object) -> Program:
        """Reads a ``program/1`` dictionary.

        Raises:
            FormatError: An entry is malformed; the message names the first.
        """
        top = fields(data, "program", {"format": str, "name": str, "tensors": list, "kernels": list}, {})
        if top["format"] != FORMAT:
            raise FormatError(f"program.format: expected {FORMAT!r}, got {top['format']!r}")
        _printable(top["name"], "program.name")
        tensor_types = {"name": str, "nbytes": int, "kind": str, "persistent": bool}
        kernel_types = {"name": str, "kind": str, "inputs": list, "outputs": list}
        kernel_options: dict[str, tuple[type, Any]] = {
            "phase": (str, "forward"),
            "duration_ns": (int, 0),
            "workspace": (int, 0),
            "flops": (int, 0),
            "bytes": (int, 0),
            "recomputable": (bool, True),
            "variants": (list, []),
            "module": (str, ""),
        }
        tensors = [Tensor(**fields(entry, f"tensors[{i}]", tensor_types, {})) for i, entry in enumerate(top["tensors"])]
        kernels = []
        for i, entry in enumerate(top["kernels"]):
            where = f"kernels[{i}]"
            values = fields(entry, where, kernel_types, kernel_options)
            for key in ("inputs", "outputs"):
                values[key] = integers(values[key], f"{where}.{key}")
            pairs = enumerate(values["variants"])
            values["variants"] = tuple(integers(pair, f"{where}.variants[{j}]", length=2) for j, pair in pairs)
            for key in ("name", "module"):
                _printable(values[key], f"{where}.{key}")
            kernels.append(Kernel(**values))
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
            FormatError: The message names the file and its first malformed entry.
        """
        return load_json(path, cls.from_dict)


def _sha256(data: dict[str, Any]) -> str:
    """Returns the SHA-256 of the canonical JSON."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _printable(name: str, where: str) -> None:
    """Raises FormatError if ``name`` has non-printable characters, which may contain terminal escape sequences."""
    if not name.isprintable():
        raise FormatError(f"{where}: {name[:40]!r} has characters that cannot be printed; remove them")


def _check(program: Program) -> None:
    """Checks the invariants of every program; raises FormatError that names the entry."""

    def check_amount(value: int, where: str, bits: int = MAX_AMOUNT.bit_length() - 1) -> None:
        if not 0 <= value <= 2**bits:
            raise FormatError(f"{where}: expected an integer from 0 to 2**{bits}, got {value}")

    for i, tensor in enumerate(program.tensors):
        check_amount(tensor.nbytes, f"tensors[{i}].nbytes")
        if tensor.kind not in TENSOR_KINDS:
            raise FormatError(
                f"tensors[{i}].kind: unknown kind {tensor.kind!r}; expected one of {', '.join(TENSOR_KINDS)}"
            )
    if not program.kernels:
        raise FormatError("kernels: a program needs at least one")
    phases = get_args(Phase)
    written: set[int] = set()
    for i, kernel in enumerate(program.kernels):
        where = f"kernels[{i}]"
        if kernel.kind not in KERNEL_KINDS:
            raise FormatError(f"{where}.kind: unknown kind {kernel.kind!r}; expected one of {', '.join(KERNEL_KINDS)}")
        if kernel.phase not in phases:
            raise FormatError(f"{where}.phase: unknown phase {kernel.phase!r}; expected one of {', '.join(phases)}")
        for name in ("duration_ns", "workspace", "flops", "bytes"):
            check_amount(getattr(kernel, name), f"{where}.{name}", 62 if name in ("flops", "bytes") else 43)
        for j, (duration, workspace) in enumerate(kernel.variants):
            check_amount(duration, f"{where}.variants[{j}][0]")
            check_amount(workspace, f"{where}.variants[{j}][1]")
        for key in ("inputs", "outputs"):
            for j, t in enumerate(getattr(kernel, key)):
                if not 0 <= t < len(program.tensors):
                    raise FormatError(
                        f"{where}.{key}[{j}]: there is no tensor {t}; the program has {len(program.tensors)}"
                    )
        for j, t in enumerate(kernel.inputs):
            if t not in written and not program.tensors[t].persistent:
                raise FormatError(
                    f"{where}.inputs[{j}]: tensor {t} ({program.tensors[t].name!r}) is read before any "
                    "write and is not persistent; write it first, or make it persistent"
                )
        written.update(kernel.outputs)
