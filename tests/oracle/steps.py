"""Meaning of each step, derived from the recorded spans without a clock.

A **block** is one copy of a tensor in device memory. A step reads the blocks that hold the versions of program order. A
block is allocated at its first write and freed after the last step that uses it, which is known from later spans. So
of a pass, only the recomputed kernels need to be known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from simulator.plan import Plan, Recompute, Rerun, Swap
from simulator.program import Program
from simulator.timeline import Span
from tests.oracle.machine import Violation

Version = tuple[int, ...]  # executions that wrote the content: iteration * kernels + kernel


@dataclass(eq=False)
class Block:
    """One copy of a tensor, or a workspace."""

    owner: int  # tensor, or -1 - k: the workspace of kernel k
    nbytes: int
    born: int  # first step, counted from the start of its iteration; -1: a persistent tensor
    reader_position: int = -1  # the only position whose pass may read it; -1: unrestricted
    content: Version = ()
    last: int = -1  # last step that used it, counted from the start


@dataclass
class Step:
    """One step: a kernel, or a recomputed kernel."""

    span: Span
    position: int  # kernel whose pass it belongs to, counted from the start
    duration_ns: int = 0  # duration without copies
    traffic_bytes: int = 0  # device memory traffic in bytes
    waits: set[int] = field(default_factory=set)  # tensors that it, or its pass, needs in place
    uses: list[Block] = field(default_factory=list)  # those that it reads or writes
    allocates: list[Block] = field(default_factory=list)
    frees: list[Block] = field(default_factory=list)


class Steps:
    """All steps of iterations whose kernels are in order."""

    def __init__(self, spans: Iterable[Span], program: Program, plan: Plan):
        self.program = program
        self.n = len(program.kernels)
        self.size = [t.nbytes for t in program.tensors]
        self.uses = [
            [k for k, kernel in enumerate(program.kernels) if t in kernel.inputs + kernel.outputs]
            for t in range(len(self.size))
        ]
        self.writers = [[k for k in uses if t in program.kernels[k].outputs] for t, uses in enumerate(self.uses)]
        plan.only("the validator", "swap", "recompute", "rerun")
        self.swaps = sorted(plan.of_kind(Swap), key=lambda d: d.tensor)
        self.drops = plan.of_kind(Recompute)
        self.reruns = bool(plan.of_kind(Rerun))
        self.passes = self._rerun_kernels(plan)
        self.found: list[Violation] = []  # resident, content, recompute
        self.steps: list[Step] = []  # as recorded
        self.needs: list[set[int]] = []  # per position, the tensors used in place, whose gaps it ends
        self.evicted: dict[tuple[int, int], Block] = {}  # (position, tensor) -> block that a gap opened there evicts
        self.expected: list[Version] = [()] * len(self.size)  # content by program order
        self.read: dict[tuple[int, int], Version] = {}  # (position, tensor) -> content that the kernel read
        persistent = [t for t, tensor in enumerate(program.tensors) if tensor.persistent]
        self.tensor = {t: Block(t, self.size[t], -1) for t in persistent}  # the newest block with the right content
        self.persistent = list(self.tensor.values())
        self.blocks: dict[int, list[Block]] = {}  # all of this iteration, by tensor
        self.pass_blocks: dict[int, Block] = {}  # blocks that the current pass has written
        self.dropped: dict[int, Recompute] = {}
        self.swapped_out: set[int] = set()  # tensors that are swapped out
        self.begin = 0  # first step of this iteration
        blocks: list[Block] = []
        pass_spans: list[Span] = []
        for span in spans:
            pass_spans.append(span)
            if span.kind == "kernel":
                blocks += self._position(pass_spans)
                pass_spans = []
        for block in blocks:
            self.steps[block.last].frees.append(block)
        self.used_at = [[k for k in range(self.n) if t in self.needs[k]] for t in range(len(self.size))]

    def _rerun_kernels(self, plan: Plan) -> list[list[int]]:
        """Returns the kernels recomputed for each kernel (7), by Rerun decisions or by Recompute decisions."""
        program = self.program
        kernels = self.program.kernels
        writers = self.writers
        uses = self.uses
        dropped: dict[int, Recompute] = {}

        def is_available(t: int, w: int, k: int) -> bool:
            """Returns whether kernel k finds tensor t with the content that kernel w read."""
            is_live = program.tensors[t].persistent or uses[t][0] < k <= uses[t][-1]
            return is_live and t not in dropped and not any(w <= u < k for u in writers[t])

        passes = []
        for k in range(self.n):
            rerun_kernels = {d.kernel for d in plan.of_kind(Rerun) if d.before == k}
            due = recovered(dropped, k, set(), writers)
            pending = [w for t in due for w in writers[t] if w < k]
            while pending:
                w = pending.pop()
                if w not in rerun_kernels:
                    rerun_kernels.add(w)
                    pending += [u for t in kernels[w].inputs if not is_available(t, w, k) for u in writers[t] if u < w]
            passes.append(sorted(rerun_kernels))
            for t in recovered(dropped, k, rerun_kernels, writers):
                del dropped[t]
            dropped |= {d.tensor: d for d in self.drops if d.after == k}
        return passes

    def _fail(self, step: Step, rule: str, detail: str) -> None:
        self.found.append(Violation(rule, step.span.start_ns, detail))

    # ------------------------------------------------------------------------------ one kernel, its pass

    def _position(self, pieces: list[Span]) -> list[Block]:
        """Processes a kernel and its pass; returns the blocks that they allocate."""
        position = len(self.needs)
        k = position % self.n
        self.needs.append(set())
        if k == 0:
            self.blocks, self.begin = {}, len(self.steps)
        self.pass_blocks = {}
        excluded = self.swapped_out | {
            d.tensor
            for d in self.swaps
            if d.copy is not None and 0 < (k - d.copy) % self.n <= (d.after - d.copy) % self.n
        }
        reruns = [self._rerun(Step(span, position), excluded) for span in pieces[:-1]]
        for step in reruns:
            step.waits |= self.needs[-1]
        kernel = Step(pieces[-1], position)
        ran = [s.span.index for s in reruns]
        if ran != self.passes[k]:
            self._fail((reruns or [kernel])[0], "recompute", f"{ran} recomputed for kernel {k}, not {self.passes[k]}")
        for t in recovered(self.dropped, k, set(ran), self.writers) & self.pass_blocks.keys():
            self.tensor[t] = self.pass_blocks[t]
            del self.dropped[t]
        self._kernel(kernel)
        return [block for step in (*reruns, kernel) for block in step.allocates]

    def _allocate(self, step: Step, owner: int, nbytes: int, only: int = -1) -> Block:
        """Allocates a block for the last step."""
        block = Block(owner, nbytes, len(self.steps) - 1 - self.begin, only, (), len(self.steps) - 1)
        step.allocates.append(block)
        return block

    def _begin(self, step: Step) -> None:
        self.steps.append(step)
        w = step.span.index
        kernel = self.program.kernels[w]
        step.duration_ns = kernel.duration_ns
        step.traffic_bytes = kernel.bytes
        if kernel.workspace:
            self._allocate(step, -1 - w, kernel.workspace)

    def _rerun(self, step: Step, excluded: set[int]) -> Step:
        """Processes a recomputed kernel; ``excluded``: tensors on the host or in flight that are not replaced."""
        self._begin(step)
        w = step.span.index
        n = self.n
        position = step.position
        kernel = self.program.kernels[w]
        first_kernel = position - position % n
        for t in dict.fromkeys(kernel.inputs):
            content = self.read.get((first_kernel + w, t))
            block = self._block_read(t, content, position)
            if self.reruns and t in kernel.outputs and block is not self.pass_blocks.get(t):
                block = None  # it would continue a write that is not in the pass
            if block is not None:
                block.last = len(self.steps) - 1
                step.uses.append(block)
                if block is self.tensor.get(t):
                    self.needs[-1].add(t)
            elif t in self.pass_blocks:
                self._fail(
                    step, "content", f"kernel {w} is recomputed for {position % n} on another content of tensor {t}"
                )
            else:
                self._fail(step, "resident", f"kernel {w} is recomputed for {position % n} without tensor {t}")
        for t in dict.fromkeys(kernel.outputs):
            is_excluded = self.program.tensors[t].persistent or t in excluded
            block = self.pass_blocks.get(t)
            if block is None:
                block = self.pass_blocks[t] = self._allocate(step, t, self.size[t], position if is_excluded else -1)
                self.blocks.setdefault(t, []).append(block)
            block.content = self._content_after(block.content, w, t, first_kernel + w)
            block.last = len(self.steps) - 1
            step.uses.append(block)
            if self.reruns and not is_excluded and block.content == self.expected[t]:
                self.tensor[t] = block
        return step

    def _content_after(self, content: Version, k: int, tensor: int, execution: int) -> Version:
        """Returns the content after a write; with Rerun, a persistent tensor that is not read starts a new one."""
        reset = self.reruns and self.program.tensors[tensor].persistent and tensor not in self.program.kernels[k].inputs
        return (execution,) if reset else (*content, execution)

    def _block_read(self, tensor: int, content: Version | None, position: int) -> Block | None:
        """Returns the block that a pass reads.

        Recompute: the tensor itself if valid, else the pass's own. Rerun: the newest, or a valid persistent tensor
        itself.
        """
        current = self.tensor.get(tensor)
        pass_block = self.pass_blocks.get(tensor)
        if not self.reruns:
            candidates = [current, pass_block]
        else:
            newest = [b for b in reversed(self.blocks.get(tensor, [])) if b.reader_position in (-1, position)]
            candidates = [current, *newest] if self.program.tensors[tensor].persistent else [*newest]
        return next((b for b in candidates if b is not None and b.content == content), None)

    def _kernel(self, step: Step) -> None:
        self._begin(step)
        k = step.span.index
        position = step.position
        kernel = self.program.kernels[k]
        for t in dict.fromkeys(kernel.inputs + kernel.outputs):
            if not self.program.tensors[t].persistent and self.uses[t][0] == k:
                self.expected[t] = ()
                self.tensor[t] = self._allocate(step, t, self.size[t])
                self.blocks[t] = [self.tensor[t]]
            block = self.tensor.get(t)
            if block is None:
                self._fail(step, "resident", f"kernel {k} starts without tensor {t}")
            elif block.content != self.expected[t]:
                detail = f"kernel {k} uses tensor {t} with content {block.content}, not {self.expected[t]}"
                self._fail(step, "content", detail)
            self.read[position, t] = self.expected[t]
            step.waits.add(t)
        for t in dict.fromkeys(kernel.outputs):
            self.expected[t] = self._content_after(self.expected[t], k, t, position)
        for t in step.waits:
            if t in self.tensor:
                step.uses.append(self.tensor[t])
                self.tensor[t].content, self.tensor[t].last = self.expected[t], len(self.steps) - 1
        self.needs[-1] |= step.waits
        self.swapped_out -= self.needs[-1]
        for t in step.waits:
            if not self.program.tensors[t].persistent and self.uses[t][-1] == k:
                self.tensor.pop(t, None)
        for drop in self.drops:
            if drop.after == k and (block := self.tensor.pop(drop.tensor, None)):
                block.last = len(self.steps) - 1
                self.dropped[drop.tensor] = drop
        for d in self.swaps:
            if d.after == k:
                self.swapped_out.add(d.tensor)
                self.evicted[position, d.tensor] = self.tensor.get(d.tensor) or Block(d.tensor, self.size[d.tensor], -2)

    # -------------------------------------------------------------------------------- after the walk

    def next_use(self, tensor: int, position: int) -> int:
        """Returns the first position >= ``position`` at which a kernel needs the tensor."""
        iteration, k = divmod(position, self.n)
        kernels = self.used_at[tensor]
        following = kernels[bisect_left(kernels, k) :] + [k + self.n for k in kernels]
        return iteration * self.n + (following[0] if following else 2 * self.n)

    def gaps(self, iterations: Iterable[int]) -> list[tuple[Swap, int, int, int]]:
        """Returns (decision, positions of copy, opening and return) of all gaps that open in these iterations."""
        out = []
        for i in iterations:
            for d in self.swaps:
                opened = i * self.n + d.after
                issued = opened - (0 if d.copy is None else (d.after - d.copy) % self.n)
                out.append((d, issued, opened, self.next_use(d.tensor, opened + 1)))
        return out

    def planned_residency(self) -> list[int]:
        """Returns the bytes that each kernel and its pass need at least under the plan."""
        peaks = [0] * self.n
        evicted = [0] * len(self.needs)
        for d, _, opened, position_back in self.gaps(range(-1, len(self.needs) // self.n)):
            for p in range(max(0, opened + 1), min(position_back, len(evicted))):
                evicted[p] += self.size[d.tensor]
        used = sum(block.nbytes for block in self.persistent)
        for step in self.steps:
            used += sum(block.nbytes for block in step.allocates)
            k = step.position % self.n
            peaks[k] = max(peaks[k], used - evicted[step.position])
            used -= sum(block.nbytes for block in step.frees)
        return peaks

    def planned_host_bytes(self) -> list[int]:
        """Returns the host bytes per kernel; a copy is held from its issue until the last swap-in that uses it."""
        n = self.n
        lifetimes: dict[tuple[int, int], list[int]] = {}  # (tensor, last write) -> first issue, last return
        for d, issued, _, position_back in self.gaps(range(-1, 4)):
            t = d.tensor
            writes = [w + i * n for w in self.writers[t] for i in range(-3, 5)]
            version = max((w for w in writes if w <= issued), default=-1)
            lifetimes.setdefault((t, version), []).extend((issued, position_back))
        host_bytes = [0] * n
        for (t, _), ends in lifetimes.items():
            for p in range(max(n, min(ends) + 1), min(2 * n - 1, max(ends)) + 1):
                host_bytes[p % n] += self.size[t]
        return host_bytes


def recovered(dropped: Mapping[int, Recompute], k: int, ran: Set[int], writers: Sequence[Sequence[int]]) -> set[int]:
    """Returns tensors that ``ran`` restores for kernel k: due ones, and with ``keep`` all completely written ones."""
    due = {t for t, d in dropped.items() if k == (d.before if d.at is None else d.at)}
    complete = {t for t in dropped if {w for w in writers[t] if w < k} <= ran}
    return due | complete if any(dropped[t].keep for t in due) else due
