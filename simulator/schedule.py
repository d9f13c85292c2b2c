"""Schedule: everything that follows from a plan without a clock.

``lower`` turns the decisions of a plan into the straight line of **steps** of a steady iteration: every kernel, and
before it what runs again for it (its **pass**). It says which **blocks** of memory each step uses, allocates and frees,
which copies are enqueued at its end, which gaps open there, and what each kernel needs at least (``residency``).

A block is one copy of a tensor, or a workspace. It lives from the step that writes it first to the last that uses it.
A **version** of a tensor is the kernel that wrote it last, in program order (-1: the iteration before). Every step
reads the version that program order gives it, so that the walk need only know which block holds which version:

1. A kernel writes in place, but a tensor's first write makes a block.
2. A step that runs again writes to blocks of its pass, which all writers of a tensor in the pass share.
3. Recompute: a pass reads what is there still, else what it wrote; it keeps what it recovers (``reruns``, rule 7).
4. Rerun: a block written again takes the place of the one before, but for persistent tensors and those on the host.
5. A tensor on the host that a pass reads is fetched, and stays.
"""

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
from simulator.residency import present, reruns

StepKind = Literal["kernel", "recompute"]

MAX_ITERATIONS = 64  # of a simulation that does not become steady (rule 10)
NEVER = 2**62  # a time, or a number of kernels, that does not come


class OutOfMemory(RuntimeError):
    """A kernel needs more than the limit even with everything away that the plan swaps out or drops."""

    def __init__(self, kernel: int, requested: int, used: int, limit: int, job: str = ""):
        of = f"job {job!r}: " if job else ""
        super().__init__(
            f"{of}kernel {kernel} needs {requested:,} bytes beside {used:,} in use, over the limit of {limit:,}"
        )
        self.kernel, self.requested, self.used, self.limit = kernel, requested, used, limit


class Block(NamedTuple):
    """One copy of a tensor in device memory, or a workspace, over the steps ``first`` to ``last``."""

    owner: int  # tensor, or -1 - k: the workspace of kernel k
    nbytes: int
    first: int  # allocated when this step starts; -1: a persistent tensor, there before
    last: int  # freed when this step ends; the number of steps: a persistent tensor, it stays


class Step(NamedTuple):
    """One launch on the compute stream: a kernel, or for ``recompute`` one that runs again."""

    kind: StepKind
    subject: int  # a kernel
    duration_ns: int
    before: int  # the kernel for which it runs: for ``kernel`` itself
    waits: frozenset[int]  # tensors that must not be on the host, or on the way
    uses: dict[int, int]  # tensor -> block that it reads or writes
    allocates: tuple[int, ...]  # blocks, at its start
    frees: tuple[int, ...]  # blocks, at its end
    copies: tuple[Swap, ...]  # whose copies to the host are enqueued at its end, by tensor
    opens: tuple[Swap, ...]  # whose gaps open at its end, by tensor

    @property
    def again(self) -> bool:
        """Has its kernel run before?"""
        return self.kernel != self.before

    @property
    def kernel(self) -> int:
        """Which runs, now or again; other kinds of steps have none."""
        if self.kind == "kernel" or self.kind == "recompute":
            return self.subject
        assert_never(self.kind)


@dataclass(frozen=True)
class Schedule:
    """A plan lowered for a program.

    Attributes:
        first: n + 1 integers, the first step of each kernel's pass, or its own; and the number of steps.
        returns: per Swap or Recompute, the kernel that ends its gap: an earlier one where its pass fetches the tensor,
            or recovers it and keeps it.
        moved: per Swap, the block that leaves and comes back.
        away_at_start: tensors on the host at the iteration boundary.
        blocks: those of persistent tensors first, by tensor.
        resident: n integers, bytes there before a kernel's pass, with what it fetches and waits for.
        residency: n integers, the planned residency: bytes that a kernel and its pass need at least.
        on_host: n integers, bytes that the host holds for the plan at a kernel.
    """

    program: Program  # under the plan's variants
    plan: Plan  # without them
    steps: tuple[Step, ...]
    first: tuple[int, ...]
    blocks: tuple[Block, ...]
    returns: dict[Swap | Recompute, int]
    moved: dict[Swap, int]
    away_at_start: frozenset[int]
    resident: tuple[int, ...]
    residency: tuple[int, ...]
    on_host: tuple[int, ...]

    def step_of(self, k: int) -> int:
        """The index of kernel k's own step."""
        return self.first[k + 1] - 1

    @cached_property
    def issues(self) -> tuple[int, ...]:
        """Per step, how many things the host issues from the step before to this one: swap-outs that the kernel before
        releases, swap-ins whose events the kernel waits for, and the step itself if it takes time."""
        n = len(self.program.kernels)
        outs = Counter((d.copied_at + 1) % n for d in self.moved)
        return tuple(
            (step.duration_ns > 0) + (0 if step.again else outs[step.kernel] + self.waited[step.kernel])
            for step in self.steps
        )

    @cached_property
    def waited(self) -> tuple[int, ...]:
        """Per kernel, how many swap-ins it waits for: the Swaps whose gaps it ends."""
        ends = Counter(self.returns[d] for d in self.moved)
        return tuple(ends[k] for k in range(len(self.program.kernels)))

    @cached_property
    def gaps_of_blocks(self) -> dict[int, list[Swap]]:
        """Block -> the gaps in which it is not on the device, in their order."""
        gaps: dict[int, list[Swap]] = {}
        for d in sorted(self.moved, key=lambda d: d.after):
            gaps.setdefault(self.moved[d], []).append(d)
        return gaps

    @cached_property
    def signals(self) -> frozenset[int]:
        """Kernels for whose end a swap-out, or a swap-in with a ``prefetch`` kernel, waits."""
        return frozenset(k for d in self.moved for k in (d.copied_at, d.prefetch) if k is not None)

    @cached_property
    def reruns(self) -> tuple[Rerun, ...]:
        """What runs again, as decisions. A plan of these runs the same kernels in no more memory; where some of them go
        on writing a tensor, there may be none (PlanError)."""
        return tuple(Rerun(s.kernel, s.before) for s in self.steps if s.again)

    @cached_property
    def required_bytes(self) -> int:
        """The smallest limit at which the plan is feasible."""
        return max(self.residency)

    # What eviction on demand (J6) has to know.

    @cached_property
    def touched(self) -> tuple[frozenset[int], ...]:
        """Per step: the blocks of tensors that must be in memory when it starts or that it makes: those that it reads,
        writes or frees, and those whose copy to the host is issued or whose gap opens at its end."""
        return tuple(
            frozenset(step.uses.values())
            | {b for b in (*step.allocates, *step.frees) if self.blocks[b].owner >= 0}
            | {self.moved[d] for d in (*step.copies, *step.opens)}
            for step in self.steps
        )

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Per step, and one past the last: ns of all steps before it."""
        return (0, *accumulate(step.duration_ns for step in self.steps))

    @cached_property
    def start_bytes(self) -> int:
        """What is in memory before the first iteration."""
        return sum(b.nbytes for b in self.blocks if b.first < 0 and b.owner not in self.away_at_start)

    @cached_property
    def admission_bytes(self) -> int:
        """What must be free when a job begins: its start, and what its first step allocates and waits for."""
        waits = sum(self.program.tensors[t].nbytes for t in self.steps[0].waits & self.away_at_start)
        return self.start_bytes + waits + sum(self.blocks[b].nbytes for b in self.steps[0].allocates)

    @cached_property
    def least_bytes(self) -> tuple[int, ...]:
        """Per step: what it needs with everything else away: what it touches, allocates and waits for."""
        fetched: dict[tuple[int, int], int] = {(self.returns[d], d.tensor): b for d, b in self.moved.items()}
        needs = [
            touched | set(step.allocates) | {b for t in step.waits if (b := fetched.get((step.before, t))) is not None}
            for step, touched in zip(self.steps, self.touched, strict=True)
        ]
        return tuple(sum(self.blocks[b].nbytes for b in blocks) for blocks in needs)

    @cached_property
    def _touches(self) -> dict[int, list[int]]:
        """Per block: the steps that touch it, ascending; one that no step touches is not there."""
        found: dict[int, list[int]] = {}
        for i, blocks in enumerate(self.touched):
            for b in blocks:
                found.setdefault(b, []).append(i)
        return found

    def next_touch(self, block: int, step: int) -> tuple[int, int]:
        """(kernels, ns) from this step to the next one that touches a block; NEVER where there is none."""
        steps, begins = self._touches.get(block, []), self.begins
        later = next((i for i in steps if i >= step), None)
        if later is not None:
            return self.steps[later].before - self.steps[step].before, begins[later] - begins[step]
        if not steps or self.blocks[block].first >= 0:
            return NEVER, NEVER
        kernels = len(self.program.kernels) - self.steps[step].before + self.steps[steps[0]].before
        return kernels, begins[-1] - begins[step] + begins[steps[0]]


def lower(program: Program, plan: Plan) -> Schedule:
    """The schedule of a plan that fits the program (``Plan.check``).

    Raises:
        PlanError: a kernel that is to run again would not find an input as it was.
    """
    program = program.with_variants(plan.variants)
    wrapping = {d.tensor: d for d in plan.of_kind(Swap) if d.after >= d.before}
    walk = _Walk(program, plan, wrapping)
    still_away = walk.away.keys()
    if still_away != wrapping.keys():  # a pass before the boundary has fetched some
        walk = _Walk(program, plan, {t: wrapping[t] for t in still_away})
    return walk.schedule()


def check_room(schedule: Schedule, machine: Machine, limit: int, limit_until: int) -> None:
    """Do a plan's planned residency fit under the limit, and its copies on the host?

    Raises:
        OutOfMemory: the first kernel that does not fit, of those before ``limit_until``.
        PlanError: more is on the host at one time than it holds.
    """
    for k in range(limit_until):
        if schedule.residency[k] > limit:
            used = schedule.resident[k]
            raise OutOfMemory(k, schedule.residency[k] - used, used, limit)
    most = max(schedule.on_host)
    if most > machine.host_bytes:
        raise PlanError(f"the plan has {most:,} bytes on the host at a time; {machine.name} has {machine.host_bytes:,}")


class _Walk:
    """One iteration, kernel by kernel."""

    def __init__(self, program: Program, plan: Plan, away_at_start: dict[int, Swap]):
        self.program, self.plan, self.away_at_start = program, plan, frozenset(away_at_start)
        self.away: dict[int, Swap] = dict(away_at_start)  # tensor -> the decision that has it on the host
        self.dropped: dict[int, Recompute] = {}
        self.returns: dict[Swap | Recompute, int] = {}  # of swaps
        self.recovered: dict[Swap | Recompute, int] = {}
        self.moved: dict[Swap, int] = {}
        self.owners: list[tuple[int, int]] = []  # per block: owner, bytes
        self.spans: list[list[int]] = []  # per block: first and last step
        self.holder: dict[tuple[int, int], int] = {}  # (tensor, version) -> the newest block that holds it
        self.steps: list[tuple[StepKind, int, int, Set[int], dict[int, int]]] = []
        self.first: list[int] = []
        for t, tensor in enumerate(program.tensors):
            if tensor.persistent:
                self.holder[t, -1] = self._block(t, tensor.nbytes, -1)
        # Decisions by kernel: which runs again for it; what leaves, or is dropped, at its end; what it has back.
        again: dict[int, list[int]] = {}
        self.leaves: dict[int, list[Swap]] = {}
        drops: dict[int, list[Recompute]] = {}
        self.due: dict[int, list[Recompute]] = {}
        for d in plan.decisions:
            if isinstance(d, Swap):
                self.leaves.setdefault(d.after, []).append(d)
            elif isinstance(d, Recompute):
                drops.setdefault(d.after, []).append(d)
                self.due.setdefault(d.back, []).append(d)
            elif isinstance(d, Rerun):
                again.setdefault(d.before, []).append(d.kernel)
            else:
                assert_never(d)
        for k, kernel in enumerate(program.kernels):
            self.first.append(len(self.steps))
            fetched = self._rerun(k, sorted(again[k])) if k in again else self._recompute(k)
            for t in (fetched | set(kernel.accesses)) & self.away.keys():
                self.returns[self.away.pop(t)] = k
            self._run(k)
            for drop in drops.get(k, ()):
                self._use(self.holder.pop((drop.tensor, program.version(drop.tensor, k + 1))))
                self.dropped[drop.tensor] = drop
            for swap in self.leaves.get(k, ()):
                self.moved[swap] = self.holder[swap.tensor, program.version(swap.tensor, k + 1)]
                self.away[swap.tensor] = swap
        self.first.append(len(self.steps))
        for t, tensor in enumerate(program.tensors):
            if tensor.persistent:
                self.spans[self.holder[t, program.version(t, len(program.kernels))]][1] = len(self.steps)

    def _block(self, owner: int, nbytes: int, first: int) -> int:
        self.owners.append((owner, nbytes))
        self.spans.append([first, first])
        return len(self.owners) - 1

    def _use(self, block: int) -> int:
        """The last step uses the block."""
        self.spans[block][1] = len(self.steps) - 1
        return block

    def _step(self, kind: StepKind, w: int, k: int, waits: Set[int]) -> dict[int, int]:
        """Begins a step; returns its ``uses``, to be filled, as ``waits`` may be until the pass is over."""
        uses: dict[int, int] = {}
        self.steps.append((kind, w, k, waits, uses))
        if self.program.kernels[w].workspace:
            self._block(-1 - w, self.program.kernels[w].workspace, len(self.steps) - 1)
        return uses

    def _run(self, k: int) -> None:
        """Kernel k itself (point 1)."""
        kernel, program = self.program.kernels[k], self.program
        uses = self._step("kernel", k, k, frozenset(kernel.accesses))
        for x in kernel.inputs:
            uses[x] = self._use(self.holder[x, program.version(x, k)])
        for x in dict.fromkeys(kernel.outputs):
            if not program.tensors[x].persistent and program.accesses[x][0] == k:
                uses[x] = self._block(x, program.tensors[x].nbytes, len(self.steps) - 1)
            else:
                uses[x] = self._use(self.holder.pop((x, program.version(x, k))))
            self.holder[x, k] = uses[x]

    def _recompute(self, k: int) -> Set[int]:
        """The pass of kernel k by Recompute decisions (points 2, 3); returns the tensors on the host that it reads."""
        program, dropped = self.program, self.dropped
        targets = {d.tensor for d in self.due.get(k, ()) if dropped.get(d.tensor) is d}
        if not targets:
            return frozenset()
        rerun = reruns(program, targets, k, dropped.keys())
        fetched = {
            x for w in rerun for x in program.kernels[w].inputs
            if x in self.away and present(program, x, w, k, dropped.keys())
        }  # fmt: skip
        recovered = set(targets)
        if any(dropped[t].keep for t in targets):
            made = {x for w in rerun for x in program.kernels[w].outputs if x in dropped}
            recovered |= {x for x in made if all(u in rerun for u in program.writes[x] if u < k)}
        own: dict[int, int] = {}
        for w in rerun:
            uses = self._step("recompute", w, k, fetched)
            for x in program.kernels[w].inputs:
                there = present(program, x, w, k, dropped.keys())
                uses[x] = self._use(self.holder[x, program.version(x, w)] if there else own[x])
            self._write(w, uses, own)
        for x in recovered:
            self.holder[x, program.version(x, k)] = own[x]
            self.recovered[dropped.pop(x)] = k
        return fetched

    def _write(self, w: int, uses: dict[int, int], own: dict[int, int]) -> None:
        """What a step that runs again writes, in blocks of its pass (point 2)."""
        for x in dict.fromkeys(self.program.kernels[w].outputs):
            if x in own:
                self._use(own[x])
            else:
                own[x] = self._block(x, self.program.tensors[x].nbytes, len(self.steps) - 1)
            uses[x] = own[x]

    def _rerun(self, k: int, rerun: list[int]) -> Set[int]:
        """The pass of kernel k by Rerun decisions (points 2, 4); returns the tensors on the host that it reads."""
        program, tensors = self.program, self.program.tensors
        copied = {d.tensor for swaps in self.leaves.values() for d in swaps if self._copied(d, k)}
        own: dict[int, int] = {}
        held: dict[int, int] = {}  # tensor -> the version of it in ``own``
        fetched: set[int] = set()
        for w in rerun:
            uses = self._step("recompute", w, k, fetched)
            for x in program.kernels[w].inputs:
                version = program.version(x, w)
                mine, there = held.get(x) == version, self.holder.get((x, version))
                if there is not None and (tensors[x].persistent or not mine):
                    uses[x] = self._use(there)
                    if x in self.away and version == program.version(x, k):
                        fetched.add(x)
                elif mine:
                    uses[x] = self._use(own[x])
                else:
                    raise PlanError(
                        f"kernel {w} cannot run again before kernel {k}: tensor {x} is not there as it read it"
                    )
            for x in program.kernels[w].outputs:
                earlier = program.version(x, w)
                if not tensors[x].persistent and earlier >= 0 and held.get(x) != earlier:
                    raise PlanError(
                        f"kernel {w} cannot run again before kernel {k}: it goes on writing tensor {x}, and kernel "
                        f"{earlier} does not run again just before it"
                    )
            self._write(w, uses, own)
            for x in program.kernels[w].outputs:
                replaced = not tensors[x].persistent and x not in copied
                if replaced and self.holder.get((x, held.get(x, -1))) == own[x]:
                    del self.holder[x, held[x]]
                held[x] = w
                if replaced:
                    self.holder[x, w] = own[x]
        return fetched

    def _copied(self, d: Swap, k: int) -> bool:
        """Is the copy of d enqueued before the pass of kernel k, and the tensor not back?"""
        copy = d.copied_at
        return self.away.get(d.tensor) == d or (copy < k <= d.after if copy <= d.after else not d.after < k <= copy)

    def schedule(self) -> Schedule:
        """What was walked."""
        program, n_steps = self.program, len(self.steps)
        n, size = len(program.kernels), [t.nbytes for t in program.tensors]
        blocks = tuple(Block(*owner, *span) for owner, span in zip(self.owners, self.spans, strict=True))
        born: list[list[int]] = [[] for _ in range(n_steps)]
        dies: list[list[int]] = [[] for _ in range(n_steps)]
        used = 0
        for b, block in enumerate(blocks):
            if block.first >= 0:
                born[block.first].append(b)
            else:
                used += block.nbytes
            if block.last < n_steps:
                dies[block.last].append(b)
        # Bytes that swaps take from a kernel on, and bring back for it.
        leaves, back = [0] * (n + 1), [0] * (n + 1)
        leaves[0] = sum(size[t] for t in self.away_at_start)
        for d, k in self.returns.items():
            leaves[d.after + 1] += size[d.tensor]
            back[k] += size[d.tensor]
        resident, residency = [], []
        for k in range(n):
            used += back[k] - leaves[k]
            resident.append(used)
            most = 0
            for i in range(self.first[k], self.first[k + 1]):
                used += sum(blocks[b].nbytes for b in born[i])
                most = max(most, used)
                used -= sum(blocks[b].nbytes for b in dies[i])
            residency.append(most)
        copies: dict[int, list[Swap]] = {}
        opens: dict[int, list[Swap]] = {}
        for d in sorted(self.moved, key=lambda d: d.tensor):
            copies.setdefault(d.copied_at, []).append(d)
            opens.setdefault(d.after, []).append(d)
        steps = tuple(
            Step(kind, w, program.kernels[w].duration_ns, k, frozenset(waits), uses, tuple(born[i]), tuple(dies[i]),
                 *((tuple(copies.get(w, ())), tuple(opens.get(w, ()))) if kind == "kernel" else ((), ())))
            for i, (kind, w, k, waits, uses) in enumerate(self.steps)
        )  # fmt: skip
        on_host = _on_host(program, self.moved, self.returns)
        return Schedule(program, self.plan, steps, tuple(self.first), blocks, self.returns | self.recovered, self.moved,
                        self.away_at_start, tuple(resident), tuple(residency), tuple(on_host))  # fmt: skip


def _on_host(program: Program, swaps: Iterable[Swap], returns: Mapping[Swap | Recompute, int]) -> list[int]:
    """Bytes that the host holds at each kernel: from a copy's issue until the tensor is back, and on to the next gap
    that finds the copy valid."""
    n = len(program.kernels)
    change = [0] * (2 * n + 1)  # at this iteration's kernels, and at the next one's
    of: dict[int, list[Swap]] = {}
    for d in sorted(swaps, key=lambda d: d.after):
        of.setdefault(d.tensor, []).append(d)
    for t, ds in of.items():
        tensor = program.tensors[t]
        for d, following in zip(ds, [*ds[1:], ds[0] if tensor.persistent else None], strict=True):
            kernels = (returns[d] - d.copied_at - 1) % n + 1
            if following:
                ahead = (following.copied_at - d.copied_at - 1) % n + 1
                valid = all((w - d.copied_at - 1) % n >= ahead for w in program.writes[t])
                kernels = max(kernels, ahead if valid else 0)
            change[d.copied_at + 1] += tensor.nbytes
            change[d.copied_at + 1 + kernels] -= tensor.nbytes
    held = list(accumulate(change))
    return [held[k] + held[k + n] for k in range(n)]
