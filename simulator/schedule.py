"""Schedule: everything that follows from a plan without a clock.

``lower`` converts a plan into the **steps** of one steady iteration: every kernel, preceded by the kernels that are
recomputed for it (its **pass**). The schedule lists the memory **blocks** that each step uses, allocates and frees,
the copies and gaps that begin at its end, and the planned residency of each kernel (``residency``).

A block is one copy of a tensor, or a workspace. It lives from the step that writes it first to the last that uses it.
A **version** of a tensor is the kernel that wrote it last, in program order (-1: the iteration before). Every step
reads the same version as in program order, so ``_Builder`` only tracks which block holds which version.
"""
# Points that ``_Builder`` implements:
# 1. A kernel writes in place. The first write of a tensor allocates a block.
# 2. A recomputed step writes to blocks of its pass, which all writers of a tensor in the pass share.
# 3. Recompute: a pass reads the resident block of a version, else its own; it keeps what it recovers (rule 7).
# 4. Rerun: a rewritten block replaces the previous one, except for persistent tensors and those on the host.
# 5. A tensor on the host that a pass reads is swapped in, and stays.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, assert_never

from simulator.machine import Machine
from simulator.plan import Plan, PlanError, Recompute, Rerun, Swap
from simulator.program import Program
from simulator.residency import is_available, reruns

StepKind = Literal["kernel", "recompute"]

MAX_ITERATIONS = 64  # most iterations of a simulation that does not become steady (rule 10)
NEVER = 2**62  # infinity, for times and numbers of kernels


class OutOfMemory(RuntimeError):
    """Raised if a kernel exceeds the limit although everything that the plan evicts is evicted."""

    def __init__(self, kernel: int, requested: int, used: int, limit: int, job: str = ""):
        prefix = f"job {job!r}: " if job else ""
        super().__init__(
            f"{prefix}kernel {kernel} needs {requested:,} bytes beside {used:,} in use, over the limit of {limit:,}"
        )
        self.kernel = kernel
        self.requested = requested
        self.used = used
        self.limit = limit


class Allocation(NamedTuple):
    """One copy of a tensor in device memory, or a workspace, from step ``first`` to step ``last``."""

    owner: int  # tensor, or -1 - k: the workspace of kernel k
    nbytes: int
    first: int  # allocated when this step starts; -1: a persistent tensor, resident before
    last: int  # freed when this step ends; the number of steps: a persistent tensor, never freed


class Step(NamedTuple):
    """One launch on the compute stream: a kernel, or a recomputed kernel."""

    kind: StepKind  # "kernel" or "recompute"
    subject: int  # a kernel
    duration_ns: int
    before: int  # the kernel whose pass it belongs to; for ``kernel``, itself
    waits: frozenset[int]  # tensors that must not be on the host or being swapped in
    uses: dict[int, int]  # tensor -> block that it reads or writes
    allocates: tuple[int, ...]  # blocks, at its start
    frees: tuple[int, ...]  # blocks, at its end
    copies: tuple[Swap, ...]  # swaps whose copies to the host are enqueued at its end, by tensor
    opens: tuple[Swap, ...]  # swaps whose gaps open at its end, by tensor

    @property
    def is_recomputation(self) -> bool:
        """Whether the step recomputes a kernel."""
        return self.kernel != self.before

    @property
    def kernel(self) -> int:
        """The kernel that the step executes."""
        if self.kind == "kernel" or self.kind == "recompute":
            return self.subject
        assert_never(self.kind)


@dataclass(frozen=True)
class Schedule:
    """A plan lowered for a program."""

    program: Program  # with the plan's variants applied
    plan: Plan
    steps: tuple[Step, ...]  # in order of launch
    first: tuple[int, ...]  # (kernels + 1,) first step of each kernel's pass, or its own step; then number of steps
    blocks: tuple[Allocation, ...]  # those of persistent tensors first, by tensor
    # Kernel that ends each gap; an earlier one than planned if the pass of that kernel swaps the tensor in, or recovers
    # it and keeps it.
    returns: dict[Swap | Recompute, int]
    moved: dict[Swap, int]  # the block that is swapped out and in
    away_at_start: frozenset[int]  # tensors on the host at the iteration boundary
    resident: tuple[int, ...]  # (kernels,) bytes before a kernel's pass, with the tensors that the pass waits for
    residency: tuple[int, ...]  # (kernels,) planned residency: bytes that a kernel and its pass need at least
    on_host: tuple[int, ...]  # (kernels,) bytes that the host holds for the plan at a kernel

    def step_of(self, k: int) -> int:
        """Returns the index of kernel k's own step."""
        return self.first[k + 1] - 1

    @cached_property
    def issues(self) -> tuple[int, ...]:
        """Number of items that the host issues between the previous step and this one, per step (choice i).

        These are swap-outs that the previous kernel releases, swap-ins whose events the kernel waits for, and the step
        itself if it takes time.
        """
        n = len(self.program.kernels)
        outs = Counter((d.copied_at + 1) % n for d in self.moved)
        return tuple(
            (step.duration_ns > 0) + (0 if step.is_recomputation else outs[step.kernel] + self.waited[step.kernel])
            for step in self.steps
        )

    @cached_property
    def waited(self) -> tuple[int, ...]:
        """Number of swap-ins whose events each kernel waits for: the Swaps whose gaps it ends."""
        ends = Counter(self.returns[d] for d in self.moved)
        return tuple(ends[k] for k in range(len(self.program.kernels)))

    @cached_property
    def gaps_of_blocks(self) -> dict[int, list[Swap]]:
        """Gaps in which each block is not on the device, in order."""
        gaps: dict[int, list[Swap]] = {}
        for d in sorted(self.moved, key=lambda d: d.after):
            gaps.setdefault(self.moved[d], []).append(d)
        return gaps

    @cached_property
    def signals(self) -> frozenset[int]:
        """Kernels whose end releases a swap-out, or a swap-in with a ``prefetch`` kernel."""
        return frozenset(k for d in self.moved for k in (d.copied_at, d.prefetch) if k is not None)

    @cached_property
    def reruns(self) -> tuple[Rerun, ...]:
        """All recomputed kernels as Rerun decisions.

        A plan of these decisions recomputes the same kernels and needs no more memory. It may be invalid (PlanError) if
        a recomputed kernel continues to write a tensor.
        """
        return tuple(Rerun(s.kernel, s.before) for s in self.steps if s.is_recomputation)

    @cached_property
    def required_bytes(self) -> int:
        """Smallest limit at which the plan is feasible."""
        return max(self.residency)

    # For eviction on demand (J6).

    @cached_property
    def touched(self) -> tuple[frozenset[int], ...]:
        """Blocks that each step touches: those that it reads, writes or frees, or copies or evicts at its end."""
        return tuple(
            frozenset(step.uses.values())
            | {b for b in (*step.allocates, *step.frees) if self.blocks[b].owner >= 0}
            | {self.moved[d] for d in (*step.copies, *step.opens)}
            for step in self.steps
        )

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Start time of each step in ns without waits, followed by the total duration; shape (steps + 1,)."""
        return (0, *accumulate(step.duration_ns for step in self.steps))

    @cached_property
    def start_bytes(self) -> int:
        """Bytes in memory before the first iteration."""
        return sum(b.nbytes for b in self.blocks if b.first < 0 and b.owner not in self.away_at_start)

    @cached_property
    def admission_bytes(self) -> int:
        """Bytes that must be free to admit a job: initial residents, and the needs of its first step."""
        waits = sum(self.program.tensors[t].nbytes for t in self.steps[0].waits & self.away_at_start)
        return self.start_bytes + waits + sum(self.blocks[b].nbytes for b in self.steps[0].allocates)

    @cached_property
    def least_bytes(self) -> tuple[int, ...]:
        """Bytes that each step needs if everything else is evicted: blocks that it touches, allocates and waits for."""
        fetched: dict[tuple[int, int], int] = {(self.returns[d], d.tensor): b for d, b in self.moved.items()}
        needs = [
            touched | set(step.allocates) | {b for t in step.waits if (b := fetched.get((step.before, t))) is not None}
            for step, touched in zip(self.steps, self.touched, strict=True)
        ]
        return tuple(sum(self.blocks[b].nbytes for b in blocks) for blocks in needs)

    @cached_property
    def _touches(self) -> dict[int, list[int]]:
        """Steps that touch each block, ascending; blocks that no step touches are missing."""
        found: dict[int, list[int]] = {}
        for i, blocks in enumerate(self.touched):
            for b in blocks:
                found.setdefault(b, []).append(i)
        return found

    def next_touch(self, block: int, step: int) -> tuple[int, int]:
        """Returns (kernels, ns) from ``step`` to the next step that touches ``block``; NEVER if none does."""
        steps = self._touches.get(block, [])
        begins = self.begins
        next_step = next((i for i in steps if i >= step), None)
        if next_step is not None:
            return self.steps[next_step].before - self.steps[step].before, begins[next_step] - begins[step]
        if not steps or self.blocks[block].first >= 0:
            return NEVER, NEVER
        kernels = len(self.program.kernels) - self.steps[step].before + self.steps[steps[0]].before
        return kernels, begins[-1] - begins[step] + begins[steps[0]]


def lower(program: Program, plan: Plan) -> Schedule:
    """Lowers a plan that fits the program (``Plan.check``) to its schedule.

    Raises:
        PlanError: A recomputed kernel would not find an input with the content that it read.
    """
    program = program.with_variants(plan.variants)
    wrapping = {d.tensor: d for d in plan.of_kind(Swap) if d.after >= d.before}
    builder = _Builder(program, plan, wrapping)
    still_on_host = builder.on_host.keys()
    if still_on_host != wrapping.keys():  # a pass before the boundary has swapped some in
        builder = _Builder(program, plan, {t: wrapping[t] for t in still_on_host})
    return builder.schedule()


def check_room(schedule: Schedule, machine: Machine, limit: int, limit_until: int) -> None:
    """Checks that the planned residency fits under the limit, and the swapped tensors fit on the host.

    Raises:
        OutOfMemory: A kernel before ``limit_until`` does not fit; reports the first.
        PlanError: The plan holds more bytes on the host than the machine has.
    """
    for k in range(limit_until):
        if schedule.residency[k] > limit:
            used = schedule.resident[k]
            raise OutOfMemory(k, schedule.residency[k] - used, used, limit)
    peak = max(schedule.on_host)
    if peak > machine.host_bytes:
        raise PlanError(
            f"the plan has {peak:,} bytes on the host at a time; {machine.name} has {machine.host_bytes:,}: swap less"
        )


class _Builder:
    """Walks through one iteration, kernel by kernel, and records steps and blocks."""

    def __init__(self, program: Program, plan: Plan, away_at_start: dict[int, Swap]):
        self.program = program
        self.plan = plan
        self.away_at_start = frozenset(away_at_start)
        self.on_host: dict[int, Swap] = dict(away_at_start)  # tensor on the host -> its decision
        self.dropped: dict[int, Recompute] = {}
        self.returns: dict[Swap | Recompute, int] = {}  # of swaps
        self.recovered: dict[Swap | Recompute, int] = {}
        self.moved: dict[Swap, int] = {}
        self.owners: list[tuple[int, int]] = []  # per block: owner, bytes
        self.spans: list[list[int]] = []  # per block: first and last step
        self.holders: dict[tuple[int, int], int] = {}  # (tensor, version) -> the newest block that holds it
        self.steps: list[tuple[StepKind, int, int, Set[int], dict[int, int]]] = []
        self.first: list[int] = []
        for t, tensor in enumerate(program.tensors):
            if tensor.persistent:
                self.holders[t, -1] = self._new_block(t, tensor.nbytes, -1)
        # Decisions by kernel: recomputed in its pass; swapped out or dropped at its end; recovered before it.
        rerun_kernels: dict[int, list[int]] = {}
        self.swaps_after: dict[int, list[Swap]] = {}
        drops_after: dict[int, list[Recompute]] = {}
        self.recomputes_before: dict[int, list[Recompute]] = {}
        for d in plan.decisions:
            if isinstance(d, Swap):
                self.swaps_after.setdefault(d.after, []).append(d)
            elif isinstance(d, Recompute):
                drops_after.setdefault(d.after, []).append(d)
                self.recomputes_before.setdefault(d.restored_before, []).append(d)
            elif isinstance(d, Rerun):
                rerun_kernels.setdefault(d.before, []).append(d.kernel)
            else:
                assert_never(d)
        for k, kernel in enumerate(program.kernels):
            self.first.append(len(self.steps))
            fetched = self._rerun_pass(k, sorted(rerun_kernels[k])) if k in rerun_kernels else self._recompute_pass(k)
            for t in (fetched | set(kernel.accesses)) & self.on_host.keys():
                self.returns[self.on_host.pop(t)] = k
            self._add_kernel(k)
            for drop in drops_after.get(k, ()):
                self._extend(self.holders.pop((drop.tensor, program.version(drop.tensor, k + 1))))
                self.dropped[drop.tensor] = drop
            for swap in self.swaps_after.get(k, ()):
                self.moved[swap] = self.holders[swap.tensor, program.version(swap.tensor, k + 1)]
                self.on_host[swap.tensor] = swap
        self.first.append(len(self.steps))
        for t, tensor in enumerate(program.tensors):
            if tensor.persistent:
                self.spans[self.holders[t, program.version(t, len(program.kernels))]][1] = len(self.steps)

    def _new_block(self, owner: int, nbytes: int, first: int) -> int:
        self.owners.append((owner, nbytes))
        self.spans.append([first, first])
        return len(self.owners) - 1

    def _extend(self, block: int) -> int:
        """Extends the lifetime of a block to the current step."""
        self.spans[block][1] = len(self.steps) - 1
        return block

    def _begin_step(self, kind: StepKind, w: int, k: int, waits: Set[int]) -> dict[int, int]:
        """Begins a step; returns its ``uses``. Both ``uses`` and ``waits`` may be extended until the pass ends."""
        uses: dict[int, int] = {}
        self.steps.append((kind, w, k, waits, uses))
        if self.program.kernels[w].workspace:
            self._new_block(-1 - w, self.program.kernels[w].workspace, len(self.steps) - 1)
        return uses

    def _add_kernel(self, k: int) -> None:
        """Adds kernel k's own step (point 1)."""
        kernel = self.program.kernels[k]
        program = self.program
        uses = self._begin_step("kernel", k, k, frozenset(kernel.accesses))
        for x in kernel.inputs:
            uses[x] = self._extend(self.holders[x, program.version(x, k)])
        for x in dict.fromkeys(kernel.outputs):
            if not program.tensors[x].persistent and program.accesses[x][0] == k:
                uses[x] = self._new_block(x, program.tensors[x].nbytes, len(self.steps) - 1)
            else:
                uses[x] = self._extend(self.holders.pop((x, program.version(x, k))))
            self.holders[x, k] = uses[x]

    def _recompute_pass(self, k: int) -> Set[int]:
        """Adds the pass of kernel k by Recompute decisions (points 2, 3); returns tensors on the host that it reads."""
        program = self.program
        dropped = self.dropped
        targets = {d.tensor for d in self.recomputes_before.get(k, ()) if dropped.get(d.tensor) is d}
        if not targets:
            return frozenset()
        rerun = reruns(program, targets, k, dropped.keys())
        fetched = {
            x
            for w in rerun
            for x in program.kernels[w].inputs
            if x in self.on_host and is_available(program, x, w, k, dropped.keys())
        }
        recovered = set(targets)
        if any(dropped[t].keep for t in targets):
            outputs = {x for w in rerun for x in program.kernels[w].outputs if x in dropped}
            recovered |= {x for x in outputs if all(u in rerun for u in program.writes[x] if u < k)}
        pass_blocks: dict[int, int] = {}
        for w in rerun:
            uses = self._begin_step("recompute", w, k, fetched)
            for x in program.kernels[w].inputs:
                is_resident = is_available(program, x, w, k, dropped.keys())
                uses[x] = self._extend(self.holders[x, program.version(x, w)] if is_resident else pass_blocks[x])
            self._add_outputs(w, uses, pass_blocks)
        for x in recovered:
            self.holders[x, program.version(x, k)] = pass_blocks[x]
            self.recovered[dropped.pop(x)] = k
        return fetched

    def _add_outputs(self, w: int, uses: dict[int, int], pass_blocks: dict[int, int]) -> None:
        """Adds the outputs of a recomputed step, in blocks of its pass (point 2)."""
        for x in dict.fromkeys(self.program.kernels[w].outputs):
            if x in pass_blocks:
                self._extend(pass_blocks[x])
            else:
                pass_blocks[x] = self._new_block(x, self.program.tensors[x].nbytes, len(self.steps) - 1)
            uses[x] = pass_blocks[x]

    def _rerun_pass(self, k: int, rerun: list[int]) -> Set[int]:
        """Adds the pass of kernel k by Rerun decisions (points 2, 4); returns tensors on the host that it reads."""
        program = self.program
        tensors = self.program.tensors
        copied = {d.tensor for swaps in self.swaps_after.values() for d in swaps if self._has_host_copy(d, k)}
        pass_blocks: dict[int, int] = {}
        versions: dict[int, int] = {}  # tensor -> the version of it in ``pass_blocks``
        fetched: set[int] = set()
        for w in rerun:
            uses = self._begin_step("recompute", w, k, fetched)
            for x in program.kernels[w].inputs:
                version = program.version(x, w)
                is_own = versions.get(x) == version
                block = self.holders.get((x, version))
                if block is not None and (tensors[x].persistent or not is_own):
                    uses[x] = self._extend(block)
                    if x in self.on_host and version == program.version(x, k):
                        fetched.add(x)
                elif is_own:
                    uses[x] = self._extend(pass_blocks[x])
                else:
                    raise PlanError(
                        f"kernel {w} cannot be recomputed before kernel {k}: its input {x} is freed or overwritten; "
                        "recompute that first, or swap"
                    )
            for x in program.kernels[w].outputs:
                previous = program.version(x, w)
                if not tensors[x].persistent and previous >= 0 and versions.get(x) != previous:
                    raise PlanError(
                        f"kernel {w} cannot be recomputed before kernel {k}: it updates tensor {x}, and kernel "
                        f"{previous} is not recomputed just before it; recompute that, too, or swap"
                    )
            self._add_outputs(w, uses, pass_blocks)
            for x in program.kernels[w].outputs:
                replaced = not tensors[x].persistent and x not in copied
                if replaced and self.holders.get((x, versions.get(x, -1))) == pass_blocks[x]:
                    del self.holders[x, versions[x]]
                versions[x] = w
                if replaced:
                    self.holders[x, w] = pass_blocks[x]
        return fetched

    def _has_host_copy(self, d: Swap, k: int) -> bool:
        """Returns whether the copy of d is enqueued before the pass of kernel k and the tensor is still on the host."""
        copy = d.copied_at
        return self.on_host.get(d.tensor) == d or (copy < k <= d.after if copy <= d.after else not d.after < k <= copy)

    def schedule(self) -> Schedule:
        """Returns the schedule of the walked iteration."""
        program = self.program
        n_steps = len(self.steps)
        n = len(program.kernels)
        size = [t.nbytes for t in program.tensors]
        blocks = tuple(Allocation(*owner, *span) for owner, span in zip(self.owners, self.spans, strict=True))
        allocs: list[list[int]] = [[] for _ in range(n_steps)]
        frees: list[list[int]] = [[] for _ in range(n_steps)]
        used = 0
        for b, block in enumerate(blocks):
            if block.first >= 0:
                allocs[block.first].append(b)
            else:
                used += block.nbytes
            if block.last < n_steps:
                frees[block.last].append(b)
        # Bytes evicted from a kernel on, and swapped in for a kernel.
        evicted = [0] * (n + 1)
        restored = [0] * (n + 1)
        evicted[0] = sum(size[t] for t in self.away_at_start)
        for d, k in self.returns.items():
            evicted[d.after + 1] += size[d.tensor]
            restored[k] += size[d.tensor]
        resident = []
        residency = []
        for k in range(n):
            used += restored[k] - evicted[k]
            resident.append(used)
            peak = 0
            for i in range(self.first[k], self.first[k + 1]):
                used += sum(blocks[b].nbytes for b in allocs[i])
                peak = max(peak, used)
                used -= sum(blocks[b].nbytes for b in frees[i])
            residency.append(peak)
        copies: dict[int, list[Swap]] = {}
        opens: dict[int, list[Swap]] = {}
        for d in sorted(self.moved, key=lambda d: d.tensor):
            copies.setdefault(d.copied_at, []).append(d)
            opens.setdefault(d.after, []).append(d)
        steps = tuple(
            Step(
                kind,
                w,
                program.kernels[w].duration_ns,
                k,
                frozenset(waits),
                uses,
                tuple(allocs[i]),
                tuple(frees[i]),
                *((tuple(copies.get(w, ())), tuple(opens.get(w, ()))) if kind == "kernel" else ((), ())),
            )
            for i, (kind, w, k, waits, uses) in enumerate(self.steps)
        )
        on_host = _host_bytes(program, self.moved, self.returns)
        return Schedule(
            program,
            self.plan,
            steps,
            tuple(self.first),
            blocks,
            self.returns | self.recovered,
            self.moved,
            self.away_at_start,
            tuple(resident),
            tuple(residency),
            tuple(on_host),
        )


def _host_bytes(program: Program, swaps: Iterable[Swap], returns: Mapping[Swap | Recompute, int]) -> list[int]:
    """Returns the bytes that the host holds at each kernel (choice h)."""
    n = len(program.kernels)
    change = [0] * (2 * n + 1)  # kernels of this iteration, then of the next
    by_tensor: dict[int, list[Swap]] = {}
    for d in sorted(swaps, key=lambda d: d.after):
        by_tensor.setdefault(d.tensor, []).append(d)
    for t, group in by_tensor.items():
        tensor = program.tensors[t]
        for d, later in zip(group, [*group[1:], group[0] if tensor.persistent else None], strict=True):
            kernels = (returns[d] - d.copied_at - 1) % n + 1
            if later:
                until_next = (later.copied_at - d.copied_at - 1) % n + 1
                valid = all((w - d.copied_at - 1) % n >= until_next for w in program.writes[t])
                kernels = max(kernels, until_next if valid else 0)
            change[d.copied_at + 1] += tensor.nbytes
            change[d.copied_at + 1 + kernels] -= tensor.nbytes
    nbytes = list(accumulate(change))
    return [nbytes[k] + nbytes[k + n] for k in range(n)]
