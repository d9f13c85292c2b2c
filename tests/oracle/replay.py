"""The clock: replays the spans of jobs, round by round, and names the first rule that they break.

In each round what ends now is completed, jobs go and come, and each stream is asked whether something starts now. What
starts must be allowed to; where nothing starts, nothing must be able to. Rules by number: simulator/RULES.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from simulator.job import Job, JobsTimeline
from simulator.machine import Machine
from simulator.timeline import Span
from tests.oracle.ledger import Change
from tests.oracle.machine import LONE, Violation, beside_each_other, copy_ns, taken
from tests.oracle.one_job import FAR, Copy, Gap, Part, Running, Work, alike
from tests.oracle.steps import Block


class Broken(Exception):
    """A rule is broken; what follows from it is not looked at."""


class Replay:
    """Replays a timeline whose spans are well formed; ``found`` has at most one violation.

    Attributes:
        curve: (time, bytes in use) after each change of the ledger.
        states: of a job alone, what the future depends on, at the start and at the end of each iteration.

    Args:
        alone: the first job is the only one: nothing is evicted, and it stops at its last boundary.
    """

    def __init__(self, timeline: JobsTimeline, jobs: Sequence[Job], parts: Sequence[list[Part]], machine: Machine,
                 limit: int, until_ns: int | None, alone: bool = False):  # fmt: skip
        self.timeline, self.jobs, self.machine, self.limit = timeline, jobs, machine, limit
        self.fifo, self.one_engine = timeline.sharing == "fifo", machine.copy_engines == 1
        self.alone = alone
        self.states: list[object] = []
        self.until = FAR if until_ns is None else until_ns
        self.all = [Running(j, *each, [0]) for j, each in enumerate(zip(jobs, timeline.jobs, parts, strict=True))]
        self.waiting = sorted(self.all, key=lambda r: (r.job.arrives_ns, r.index))
        self.present: list[Running] = []
        self.now = self.used = self.ended = 0
        self.queue: list[Copy] = []
        self.copies: dict[str, tuple[Work, Copy]] = {}
        self.steps: dict[int, Work] = {}
        self.last: Running | None = None  # whose step started last
        self.served: Running | None = None
        self.evictions = deque(timeline.evictions)
        self.spans = {
            stream: deque(sorted(((s, r) for r in self.all for s in r.ran.spans if s.stream == stream),
                                 key=lambda pair: pair[0].start_ns)) for stream in ("d2h", "h2d")
        }  # fmt: skip
        self.curve = [(0, 0)]
        self.found: list[Violation] = []
        self.shared = beside_each_other(machine)
        try:
            while self._round():
                pass
        except Broken as broken:
            rule, detail = broken.args
            self.found.append(Violation(rule, self.now, detail))

    def _need(self, holds: bool, rule: str, detail: str) -> None:
        if not holds:
            raise Broken(rule, detail)

    def _round(self) -> bool:
        self._end_copies()
        self._end_steps()
        if self.alone and self.all[0].leaving:
            return self._stop()
        self._part()
        self._admit()
        if not self.present and not self.waiting:
            left = self.evictions or any(self.spans.values()) or any(r.ran.spans for r in self.all if r.part < 0)
            self._need(not left, "order", "something is recorded after all jobs have left")
            return False
        self._offer()
        self._start_out()
        self._start_in()
        self._start_steps()
        self._go_on()
        return True

    def _stop(self) -> bool:
        """A job alone has come to its end: copies under way would go on as they are."""
        self._set_rates()
        for work, _ in self.copies.values():
            right = work.span.end_ns == self.now - (-work.left // work.rate)
            self._need(right, "duration", f"{work.span} does not end when its work is done")
        self._need(not any(self.spans.values()), "order", "something is recorded after the last iteration")
        return False

    def _state(self, job: Running) -> object:
        """Of a job alone."""
        copies = frozenset((work.span.stream, work.span.index, work.left) for work, _ in self.copies.values())
        return job.state(), copies, tuple((c.block.owner, c.issued - self.ended) for c in self.queue), self.used

    def _charge(self, job: Running, block: Block, sign: int) -> None:
        self.used += sign * block.nbytes
        if sign > 0:
            job.memory.append(block)
        else:
            self._need(block in job.memory, "memory", f"job {job.job.name!r} gives back tensor {block.owner} twice")
            job.memory.remove(block)
        if block.nbytes:
            job.ledger.append(Change(self.now, block.owner, block.born, sign * block.nbytes))
            self.curve.append((self.now, self.used))
            self._need(self.used <= self.limit, "limit", f"{self.used} bytes of {self.limit}")

    # ---------------------------------------------------------------------------------- what ends

    def _ends(self, work: Work) -> bool:
        """Does it end now, as recorded? It must be done just now."""
        done = work.left <= 0
        now = work.span.end_ns <= self.now
        just = done and (work.left + work.rate > 0 or work.span.start_ns == self.now)
        what = f"{work.span.kind} {work.span.index} of job {work.job.job.name!r}"
        self._need(now == done and (just or not done), "duration", f"{what} does not end when its work is done")
        return now

    def _end_copies(self) -> None:
        if "d2h" in self.copies and self._ends(self.copies["d2h"][0]):
            copy = self.copies.pop("d2h")[1]
            job, t = copy.job, copy.block.owner
            gap = job.gaps.get(copy.block)
            if gap is None or not gap.demand:
                valid = copy.writes == job.writes.get(t, 0)
                if valid:
                    job.host[t] = copy.writes, copy.block
                if gap and valid and gap.state == "leaving":
                    self._left(job, gap)
            else:
                self._left(job, gap)
        if "h2d" in self.copies and self._ends(self.copies["h2d"][0]):
            copy = self.copies.pop("h2d")[1]
            del copy.job.gaps[copy.block]

    def _left(self, job: Running, gap: Gap) -> None:
        gap.state = "on host"
        self._charge(job, gap.block, -1)

    def _end_steps(self) -> None:
        ending = [j for j in sorted(self.steps) if self._ends(self.steps[j])]
        for j in ending:
            del self.steps[j]
        for j in ending:
            self._end_step(self.all[j])

    def _end_step(self, job: Running) -> None:
        piece, job.running = job.todo.popleft(), None
        job.idle_since = self.now
        for block in piece.step.gives:
            self._charge(job, block, -1)
        if piece.span.kind != "kernel":
            return
        self.ended += 1
        part, program = job.now, job.now.steps.program
        kernel = program.kernels[piece.span.index]
        for t in set(kernel.outputs):
            job.writes[t] = job.writes.get(t, 0) + 1
            stale = [c for c in self.queue if c.job is job and c.block.owner == t and c.block in piece.step.uses]
            self.queue = [c for c in self.queue if c not in stale]
        for t in set(kernel.inputs + kernel.outputs):
            if not program.tensors[t].persistent and part.steps.uses[t][-1] == piece.span.index:
                job.host.pop(t, None)
        here = sorted((s for s in part.swaps if job.position in s[1:3]), key=lambda s: s[0].tensor)
        for d, issued, opened, _ in here:
            if issued == job.position and not job.valid(d.tensor):
                self._issue(job, part.sent(d, opened))
        for d, _, opened, back in here:
            if opened == job.position:
                self._open(job, job.gap_of(d, opened, back))
        job.position += 1
        job.kernel_ends.append(self.ended)
        job.early = [g for g in job.early if g.before >= job.position]
        if job.position % job.n == 0:
            self._boundary(job)

    def _issue(self, job: Running, block: Block) -> None:
        under_way = [self.copies["d2h"][1]] if "d2h" in self.copies else []
        if not any(c.block is block and c.writes == job.writes.get(block.owner, 0) for c in (*self.queue, *under_way)):
            self.queue.append(Copy(job, block, self.ended, job.writes.get(block.owner, 0)))

    def _open(self, job: Running, gap: Gap) -> None:
        job.gaps[gap.block] = gap
        if job.valid(gap.block.owner):
            self._left(job, gap)
        else:
            self._issue(job, gap.block)

    def _leaves(self, job: Running) -> int:
        return min(self.until, FAR if job.job.leaves_ns is None else job.job.leaves_ns)

    def _boundary(self, job: Running) -> None:
        ran = job.ran
        self._need(ran.boundaries[job.iterations] == self.now, "figures", f"job {ran.name!r} has other boundaries")
        job.iterations += 1
        job.changes.append(len(job.ledger))
        self.states.append(self._state(job))
        last = job.iterations == job.job.iterations or self.now >= self._leaves(job)
        self._need(last == (job.iterations == len(ran.boundaries)), "leave", f"job {ran.name!r} leaves at another time")
        if last:
            job.leaving = True
            self.queue = [c for c in self.queue if c.job is not job]
            return
        change = job.go_by(self._plan(job), self.now)
        in_time = change == (job.iterations == job.now.ended)
        self._need(in_time, "switch", f"job {ran.name!r} does not change its plan in time")
        if change:
            self._change(job)

    def _plan(self, job: Running) -> int:
        return len([at for at, _ in job.job.switches if at <= self.now])

    def _change(self, job: Running) -> None:
        """J7."""
        job.enter(job.part + 1, self.ended)
        self._need(alike(job.job, job.now.plan, job.plan), "switch", f"job {job.ran.name!r} goes on by another plan")
        for copy in (*self.queue, *(c for _, c in self.copies.values())):
            if copy.job is job and copy.block.born < 0 and copy.block.owner >= 0:
                copy.block = next(b for b in job.now.steps.persistent if b.owner == copy.block.owner)
        before, job.gaps = job.gaps, {}
        for d, _, opened, back in sorted(job.now.swaps, key=lambda s: s[0].tensor):
            if opened >= 0 or back < 0:
                continue
            gap = job.gap_of(d, opened, back)
            was = before.pop(gap.block, None)
            if was is None:
                self._open(job, gap)
                continue
            gap.state = was.state
            job.gaps[gap.block] = gap
            if gap.state == "on host":
                job.host[d.tensor] = job.writes.get(d.tensor, 0), gap.block
            elif gap.state == "arriving":
                job.early.append(gap)
        for block, was in before.items():
            at, _ = job.next_touch(block)
            job.gaps[block] = Gap(block, at, demand=True, state=was.state, counted=was.counted)
        leaving = [g.block for g in job.gaps.values() if g.state == "leaving"]
        self.queue = [c for c in self.queue if c.job is not job or c.block in leaving]

    # --------------------------------------------------------------------------------- coming and going

    def _part(self) -> None:
        busy = [copy.job for _, copy in self.copies.values()]
        for job in [r for r in self.present if r.leaving and r not in busy]:
            self._need(job.ran.left_ns == self.now, "leave", f"job {job.ran.name!r} is gone at another time")
            for block in list(job.memory):
                self._charge(job, block, -1)
            self.present.remove(job)

    def _admit(self) -> None:
        for job in [r for r in self.waiting if self._leaves(r) <= self.now]:
            self.waiting.remove(job)
            self._need(job.ran.admitted_ns is None, "admission", f"job {job.ran.name!r} is admitted too late")
            if job.job.arrives_ns < self.now:
                job.stalls.append((job.job.arrives_ns, self.now, "admission"))
        while self.waiting and self.waiting[0].job.arrives_ns <= self.now and not self.served:
            job = self.waiting[0]
            if not self._room(job):
                break
            self._need(job.ran.admitted_ns == self.now, "admission", f"job {job.ran.name!r} is not admitted in time")
            self._begin(self.waiting.pop(0))
        for job in self.waiting:
            at = job.ran.admitted_ns
            self._need(at is None or at >= self.now, "admission", f"there is no room for job {job.ran.name!r}")

    def _planned_host(self, job: Running) -> int:
        """What the host keeps free for the plans of a job (J9). Those that it never went by left no spans."""
        if not job.on_host:
            parts = {part.plan: part for part in job.parts}
            plans = (parts.get(i) or Part.unused(job.job, i) for i in range(len(job.job.plans)))
            job.on_host = [max(part.steps.planned_host_bytes()) for part in plans]
        return sum(sorted(job.on_host, reverse=True)[:2])

    def _host_left(self) -> int:
        counted = sum(g.block.nbytes for r in self.present for g in r.gaps.values() if g.counted)
        return self.machine.host_bytes - counted - sum(self._planned_host(r) for r in self.present)

    def _room(self, job: Running) -> bool:
        """May a job begin?"""
        plan = self._plan(job)
        first = job.parts[0] if job.parts and alike(job.job, job.parts[0].plan, plan) else Part.unused(job.job, plan)
        away = {d.tensor for d, _, opened, back in first.swaps if opened < 0 <= back}
        waits, takes = first.pieces[0].step.waits, sum(b.nbytes for b in first.pieces[0].step.takes)
        tensors = job.job.program.tensors
        resident = sum(x.nbytes for t, x in enumerate(tensors) if x.persistent and (t not in away or t in waits))
        return self.used + resident + takes <= self.limit and self._planned_host(job) <= self._host_left()

    def _begin(self, job: Running) -> None:
        if job.job.arrives_ns < self.now:
            job.stalls.append((job.job.arrives_ns, self.now, "admission"))
        job.idle_since = self.now
        self.present = sorted([*self.present, job], key=lambda r: r.index)
        job.go_by(self._plan(job), self.now)
        job.enter(0, self.ended)
        self._need(alike(job.job, job.now.plan, job.plan), "switch", f"job {job.ran.name!r} begins by another plan")
        for d, issued, opened, back in job.now.swaps:
            if opened < 0 <= back:
                gap = job.gap_of(d, opened, back)
                gap.state, job.gaps[gap.block] = "on host", gap
            if opened < 0 <= back or issued < 0 <= opened:
                job.host[d.tensor] = 0, job.now.sent(d, opened)
        for block in job.now.steps.persistent:
            if block not in job.gaps:
                self._charge(job, block, 1)
        job.changes.append(len(job.ledger))
        self.states.append(self._state(job))

    # ----------------------------------------------------------------------------------- what starts

    def _offer(self) -> None:
        for job in self.present:
            mine = not job.leaving and self.served in (None, job)
            gap = job.first_to_return(self.served is job) if mine else None
            if gap is not job.offer:
                job.offer, job.offered_since = gap, self.now

    def _best_offer(self) -> Running | None:
        """Whose tensor returns next, if the engine is free."""
        fit = [r for r in self.present if r.offer and self._may_return(r, r.offer)]
        return min(fit, key=lambda r: (r.offered_since, r.index), default=None)

    def _may_return(self, job: Running, gap: Gap) -> bool:
        """Is there room for it, beside everything and, where nobody is to be helped, within the job's share?"""
        share = job.job.plans[job.plan].limit if job.job.within else 0
        share = min(share, self.limit) if share and job is not self.served else self.limit
        mine = sum(block.nbytes for block in job.memory) + gap.block.nbytes
        return self.used + gap.block.nbytes <= self.limit and mine <= share and job.has_room(gap, share)

    def _next(self, stream: str, turn: Running | None, block: Block | None) -> Span | None:
        """What is recorded to start now: of the job and the tensor whose turn it is, if there is one."""
        spans, kind = self.spans[stream], "swap-out" if stream == "d2h" else "swap-in"
        span, job = spans[0] if spans else (None, None)
        if turn is None or block is None:
            self._need(span is None or span.start_ns >= self.now, kind, f"{span} starts when it cannot")
            return None
        here = span is not None and span.start_ns <= self.now
        self._need(here, "idle", f"{kind} of tensor {block.owner} of job {turn.ran.name!r} could start")
        right = span is not None and job is turn and span.index == block.owner and span.start_ns == self.now
        self._need(right, kind, f"{span} starts; it is the turn of tensor {block.owner} of job {turn.ran.name!r}")
        return spans.popleft()[0]

    def _begin_copy(self, stream: str, span: Span, copy: Copy) -> None:
        self.copies[stream] = Work(copy.job, span, copy_ns(self.machine, stream, copy.block.nbytes) * LONE), copy

    def _start_out(self) -> None:
        first = self.queue[0] if self.queue else None
        if first and self.one_engine:  # a swap-in that was issued before goes first
            best = self._best_offer()
            gap = best.offer if best else None
            if best and gap and gap.pinned and gap.after < best.position:
                issued = best.kernel_ends[max(0, gap.after + 1)]
                first = None if issued < first.issued else first
        if "d2h" in self.copies or (self.one_engine and self.copies):
            first = None
        span = self._next("d2h", first.job if first else None, first.block if first else None)
        if span:
            self._begin_copy("d2h", span, self.queue.pop(0))

    def _start_in(self) -> None:
        free = "h2d" not in self.copies and not (self.one_engine and self.copies)
        best = self._best_offer() if free else None
        gap = best.offer if best else None
        span = self._next("h2d", best, gap.block if gap else None)
        if not span or not best or not gap:
            return
        gap.state = "arriving"
        if not gap.demand:
            best.early.append(gap)
        self._charge(best, gap.block, 1)
        self._begin_copy("h2d", span, Copy(best, gap.block, 0, 0))

    def _ready(self, job: Running) -> bool:
        if job.running or job.leaving or not job.todo or self.served not in (None, job) or job.held_up():
            return False
        return self.used + sum(b.nbytes for b in job.todo[0].step.takes) <= self.limit

    def _start_steps(self) -> None:
        while True:
            for job in self.present:
                ready = self._ready(job)
                job.ready_since = (self.now if job.ready_since is None else job.ready_since) if ready else None
            able = [r for r in self.present if r.ready_since is not None and not (self.fifo and self.steps)]
            if not able:
                return
            job = min(able, key=lambda r: (r.ready_since, r.index))
            piece = job.todo[0]
            self._need(piece.begin == self.now, "idle", f"the next step of job {job.ran.name!r} could start")
            switch = self.machine.switch_ns if self.fifo and self.last not in (None, job) else 0
            right = piece.span.start_ns == self.now + switch
            self._need(right, "switch", f"the switch to job {job.ran.name!r} takes another time")
            for block in piece.step.takes:
                self._charge(job, block, 1)
            rows, k = job.job.durations, piece.span.index
            lasts = switch + (rows[job.iterations % len(rows)][k] if rows else piece.step.lasts_ns)
            if piece.span.kind == "kernel":
                lasts += self.machine.wait_ns * job.now.returns[k]
            self.steps[job.index] = Work(job, piece.span._replace(start_ns=self.now), lasts * LONE)
            job.running, job.ready_since, self.last = piece, None, job
            self.served = None if self.served is job else self.served

    def _reason(self, job: Running) -> str:
        """Why its next step cannot start."""
        if self.served not in (None, job):
            return "demand"
        if any(g.sync and g.state == "leaving" for g in job.gaps.values()):
            return "sync"
        return "resident" if job.held_up() else "overlap" if self.fifo and self.steps else "limit"

    # ------------------------------------------------------------------------------ on to the next instant

    def _go_on(self) -> None:
        under_way = self._set_rates()
        if not under_way and self.present:
            job = self.present[0]
            self._need(not self.alone, self._reason(job), f"job {job.ran.name!r} is stuck")
            self._evict()
            return
        on_demand = self.evictions and self.evictions[0].time_ns < self.now
        self._need(not on_demand, "demand", "a tensor is evicted while something is under way")
        times = [w.span.end_ns for w in under_way] + [self.now - (-w.left // w.rate) for w in under_way]
        says = [spans[0][0].start_ns for spans in self.spans.values() if spans]
        says += [r.todo[0].begin for r in self.present if not r.running and r.todo]
        times += [at for at in says if at > self.now]  # something is recorded to start, allowed to or not
        times += [t for r in self.waiting for t in (r.job.arrives_ns, self._leaves(r)) if t > self.now]
        then = max(self.now, min(times))
        for job in [r for r in self.present if then > self.now and not r.running and r.todo]:
            starts = job.todo[0].begin <= self.now
            self._need(not starts, self._reason(job), f"a step of job {job.ran.name!r} starts when it cannot")
        for work in under_way:
            work.left -= work.rate * (then - self.now)
        for job in self.present:
            if then > self.now and not job.running and not job.leaving:
                waits = "data" if "h2d" in self.copies and job.awaited() else "memory"
                job.stalls.append((self.now, then, waits if job.ready_since is None else "compute"))
        self.now = then

    def _set_rates(self) -> list[Work]:
        """How fast is what is under way from now on? Returns it."""
        for work, _ in self.copies.values():
            work.rate = self.shared[work.span.stream] if len(self.copies) == 2 else LONE
        k = len(self.steps)
        share = max(1, min(LONE, round(self.machine.concurrency * LONE) // k)) if k > 1 else LONE
        for work in self.steps.values():
            step = work.job.running.step
            work.rate = share - len(self.copies) * taken(step.lasts_ns, step.moves, self.machine)
        return [*(work for work, _ in self.copies.values()), *self.steps.values()]

    def _evict(self) -> None:
        """J6."""
        served_before = self.served is not None
        if self.served is None:
            self.served = min(self.present, key=lambda r: (r.idle_since, r.index))
        ranks = []
        room = self._host_left()
        for job in self.present:
            now = job.now.touched(job.todo[0].step)
            for block in job.memory:
                if block.owner >= 0 and 0 < block.nbytes <= room and not (job is self.served and block in now):
                    tier = 2 if block in now else 1 if job is self.served else 0
                    ahead = job.next_touch(block)[1]
                    ranks.append((tier, -ahead, -block.nbytes, job.index, block.owner, block.born, job, block))
        if not ranks and not served_before:
            return
        ranks.sort(key=lambda rank: rank[:6])
        self._need(bool(self.evictions and ranks), "demand", "nothing is under way, and no tensor is evicted")
        said, (*_, job, block) = self.evictions.popleft(), ranks[0]
        right = (self.now, job.index, block.owner, block.nbytes, self.served.index)
        says = (said.time_ns, said.job, said.tensor, said.nbytes, said.wanted_by)
        self._need(says == right, "demand", f"{said} is evicted; it should be (time, job, tensor, bytes, for) {right}")
        gap = job.gaps[block] = Gap(block, job.next_touch(block)[0], demand=True, counted=True)
        if job.valid(block.owner) and job.host[block.owner][1] is block:
            self._left(job, gap)
        else:
            self._issue(job, block)
