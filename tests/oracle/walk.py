"""The walk, written to be read: what the compiled one (envs/compiled_walk.py, envs/observation.py) is tested equal to.

envs/walk.py says what an episode is; read on in ``Walk.step``. ``Clock`` is the present iteration as it has gone so
far, which ``reward="causal"`` is made of. Choices where the paper is silent:

1. A wrapping gap of a persistent tensor is open at position 0; its swap-out does not hold the agent.
2. Rounding up holds the agent, not the copy engine: an offload starts as soon as the engine is free and its gap open.
3. While a transfer holds the agent, kernels take their ideal time (until one cannot start).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.graph import AHEAD, FEATURES, NOTHING, OFFLOAD, PRESSURE, QUEUE, RELIEF, REMOVE, STUCK, VALID
from envs.task import COPY, DEAD_END_REWARD, EARLY, KEEP, PLAIN, REWARDS, Task
from envs.walk import Step
from simulator import Plan
from simulator.compiled.encoding import RECOMPUTE, SWAP, decisions_of
from simulator.schedule import lower


class Clock:
    """Compute runs the kernels that the agent passes, copies to the host go one after the other, and what a passed
    kernel needs has come back: the causal side of rules 2 to 8. A kernel is run once, under the decisions taken until
    then. What comes later, the simulation of the whole plan settles with the last step. Times are in ns; 0 is the start
    of the iteration."""

    def __init__(self, task: Task):
        self.task = task
        self.ended = np.zeros(len(task.start_ns), np.int64)  # when all kernels before k had ended
        self.out_free = self.in_free = -task.program.ideal_ns  # when the copy engines are
        self.out_end = np.zeros(len(task.tensor), np.int64)  # by gap: when its copy to the host is complete
        self.queue: list[int] = []  # gaps whose copies to the host are under way, in order

    def offload(self, g: int, issued: int, before_iteration: bool) -> None:
        """A copy is issued when kernel ``issued`` has ended, of this iteration or of the one before."""
        task = self.task
        ended, late = (task.start_ns, task.program.ideal_ns) if before_iteration else (self.ended, 0)
        self.out_free = max(self.out_free, int(ended[issued + 1]) - late) + task.machine.d2h_ns(int(task.nbytes[g]))
        self.out_end[g] = self.out_free
        self.queue.append(g)

    def run(self, begin: int, end: int, need: NDArray[np.int64], swapped: NDArray[np.bool_]) -> None:
        """Runs kernels ``begin`` to ``end`` - 1.

        Args:
            need: planned residency.
            swapped: by gap, whether it is emptied by a swap.
        """
        task = self.task
        for k in range(begin, end):
            now = int(self.ended[k])
            # What was away until kernel k comes back, from when it fits by the planned residency (rules 5 and 6).
            for g in np.flatnonzero(swapped & (task.before == k)):
                first = 0 if task.wraps[g] else int(task.after[g]) + 1
                tight = np.flatnonzero(need[first:k] + task.nbytes[g] > task.limit)
                fits = int(self.ended[first + tight[-1] + 1]) if len(tight) else -task.program.ideal_ns
                self.in_free = max(self.in_free, int(self.out_end[g]), fits) + task.machine.h2d_ns(int(task.nbytes[g]))
                now = max(now, self.in_free)
            # What has not left yet is there beside the planned residency (rule 8).
            while self.queue:
                leaves, under_way = int(self.out_end[self.queue[0]]), int(task.nbytes[self.queue].sum())
                if leaves > now and need[k] + under_way <= task.limit:
                    break
                now = max(now, leaves)
                self.queue.pop(0)
            self.ended[k + 1] = now + task.start_ns[k + 1] - task.start_ns[k]

    def stall_ns(self, position: int) -> int:
        """How long the kernels before ``position`` have waited in all."""
        return int(self.ended[position] - self.task.start_ns[position])


class Walk:
    """The state of one episode.

    Args:
        reward: "paper": the change in simulated time of the plan so far, with the limit enforced up to the position;
            "causal": what the clock of the present iteration (clock.py) has waited, and what runs again.

    Raises:
        ValueError: unknown reward.
    """

    def __init__(self, task: Task, reward: str = "paper"):
        if reward not in REWARDS:
            raise ValueError(f"reward: expected {' or '.join(map(repr, REWARDS))}, got {reward!r}")
        self.task, self._causal = task, reward == "causal"
        self._rows = np.zeros((len(task.graph.gaps), 6), np.int64)
        self.reset()

    def reset(self) -> None:
        """Back to position 0 with an empty plan."""
        task = self.task
        self.position = 0
        self.count = 0
        self.taken = np.full(len(task.graph.gaps), -1, np.int64)  # kind of the action taken, or -1
        self.iteration_ns = task.program.ideal_ns
        self.free_ns = -task.program.ideal_ns  # when the d2h stream is free, in ideal time
        self.need = task.live_bytes
        self.done = bool((self.need <= task.limit).all())
        self.dead_end = False
        self.host_left = task.machine.host_bytes
        if self._causal:
            self.clock = Clock(task)
            self.rerun_ns = 0
        self._refresh()

    @property
    def rows(self) -> NDArray[np.int64]:
        """The plan so far (simulator.compiled.engine.rows_of)."""
        return self._rows[: self.count]

    @property
    def overhead(self) -> float:
        """Simulated time of the plan so far over the ideal time, less 1."""
        return self.iteration_ns / self.task.ideal_ns - 1

    def plan(self, planner: str = "") -> Plan:
        """The plan so far."""
        program, task = self.task.program, self.task
        return Plan.of(program, decisions_of(self.rows), planner, task.limit, task.machine.name)

    def _refresh(self) -> None:
        """Where the plan so far gets stuck, and which gaps are open."""
        task, p = self.task, self.position
        over = self.need[p:] > task.limit
        self.stuck_at = p + int(over.argmax()) if over.any() else len(self.need)
        # A gap is of use while the tensor would be away for kernel p.
        began = (task.after < p) | task.wraps
        # Where the host is short, so is a tensor that would find room at its own time: rare, and safe.
        self.open = began & (p < task.before) & (self.taken < 0)
        mask = np.zeros(len(task.graph), np.bool_)
        mask[task.offloads] = (self.open & (task.nbytes <= self.host_left))[task.offload_gap]
        mask[task.removals] = self.open[task.removal_gap]
        if not self.done and self.stuck_at == p and not mask.any():
            self.done = self.dead_end = True
        if self.done:
            mask[:] = False
        mask[0] = self.done or self.stuck_at > p
        self._mask = mask

    def mask(self) -> NDArray[np.bool_]:
        """(N,) which nodes are actions that may be taken now; after the end, only do nothing. Do not write to it."""
        return self._mask

    def form_masks(self) -> NDArray[np.bool_]:
        """(forms, N) which actions may be taken now in which form; row 0 is ``mask``.

        A copy after the last write has to be of what is there still, and in this iteration. ``keep`` is always
        possible; an earlier recomputation where there is a kernel that does not fit, and then one before the use.
        """
        task = self.task
        masks = np.zeros((task.forms, len(task.graph)), np.bool_)
        masks[PLAIN] = self._mask
        for node, g in zip(task.offloads, task.offload_gap, strict=True):
            stayed = (self.taken[task.first_since[g] : g] < 0).all() and (
                not task.wraps[g] or (self.position == 0 and task.first_since[g] == g)
            )
            masks[COPY, node] = self._mask[node] and task.copy_at[g] >= 0 and stayed
        if task.mode != "swap":
            for node, g in zip(task.removals, task.removal_gap, strict=True):
                masks[KEEP, node] = self._mask[node]
                masks[EARLY, node] = self._mask[node] and self._early(g) >= 0
        return masks

    def _early(self, g: int) -> int:
        """The kernel after the last one before the use that does not fit, from the position on; -1: they all do."""
        before = int(self.task.before[g])
        over = np.flatnonzero(self.need[self.position : before] > self.task.limit)
        at = self.position + int(over[-1]) + 1 if len(over) else before
        return at if at < before else -1

    def relief(self) -> NDArray[np.float64]:
        """(G,) share of what is over the limit, in bytes x time by the planned residency, within each gap."""
        task = self.task
        over = np.maximum(0, self.need - task.limit) * np.diff(task.start_ns).astype(np.float64)
        until = np.concatenate([[0.0], np.cumsum(over)])
        inside = until[task.before] - until[task.after + 1]
        inside[task.wraps] += until[-1]
        share: NDArray[np.float64] = inside / max(until[-1], 1.0)
        return share

    def step(self, node: int, form: int = PLAIN) -> Step:
        """Takes the action that a node represents, in one of its forms.

        Raises:
            ValueError: the action is not valid now.
        """
        if self.done or not (self.form_masks()[form] if form else self._mask)[node]:
            raise ValueError(f"node {node} is not a valid action now" + (f" in form {form}" if form else ""))
        task, p = self.task, self.position
        kind, g = int(task.graph.action_kind[node]), int(task.graph.action_gap[node])
        if kind == NOTHING:
            self.position = min(int(task.next_opening[p]), self.stuck_at)
        elif kind == OFFLOAD:
            self._offload(g, int(task.copy_at[g]) if form == COPY else -1)
        else:
            self._remove(g, int(form == KEEP), self._early(g) if form == EARLY else -1)
        if kind != NOTHING:
            self.taken[g] = kind
            if task.host_is_short:
                self.host_left = task.machine.host_bytes - task.engine.on_host(self.rows)
            self.need = task.engine.residency(self.rows)
        self.done = bool((self.need <= task.limit).all())
        if self._causal:
            self.clock.run(p, self.position, self.need, self.taken == OFFLOAD)
            if kind != NOTHING:
                again = lower(task.program, self.plan()).steps if (self.taken == REMOVE).any() else ()
                self.rerun_ns = sum(step.duration_ns for step in again if step.again)
        reward = 0.0
        if self._causal and not self.done:
            lasts = task.program.ideal_ns + self.clock.stall_ns(self.position) + self.rerun_ns
            feasible = True
        else:
            score = task.engine.score(self.rows, None if self.done else self.position)
            lasts, feasible = score.iteration_ns, score.feasible
        if feasible:
            reward = (self.iteration_ns - lasts) / task.ideal_ns
            self.iteration_ns = lasts
        elif self.done:  # its iterations never repeat (rule 10)
            self.dead_end = True
        self._refresh()
        if self.dead_end:
            reward += DEAD_END_REWARD
        return Step(reward, self.done, self.dead_end)

    def _add(self, kind: int, g: int, after: int, extra: int, when: int) -> None:
        self._rows[self.count] = kind, self.task.tensor[g], after, self.task.before[g], extra, when
        self.count += 1

    def _offload(self, g: int, copy: int) -> None:
        """Args: copy: the kernel at whose end the copy is issued; -1: as the memory is given up."""
        task, p = self.task, self.position
        duration = task.machine.d2h_ns(int(task.nbytes[g]))
        if task.wraps[g] and p == 0:
            issued = int(task.after[g]) if copy < 0 else copy
            begin = int(task.start_ns[issued + 1]) - task.program.ideal_ns
            self.free_ns = max(self.free_ns, begin) + duration
            self._add(SWAP, g, int(task.after[g]), -1, copy)
            if self._causal:
                self.clock.offload(g, issued, before_iteration=True)
            return
        queued = int(np.searchsorted(task.start_ns, self.free_ns, side="right")) - 2
        after = max(min(p - 1, queued), 0 if task.wraps[g] else int(task.after[g]))
        issued = after if copy < 0 else copy
        end = max(self.free_ns, int(task.start_ns[issued + 1])) + duration
        self._add(SWAP, g, after, -1, copy)
        if self._causal:
            self.clock.offload(g, issued, before_iteration=False)
        if self.stuck_at == p:  # kernel p waits for this very transfer
            self.free_ns = int(task.start_ns[p])
            return
        reached = min(int(np.searchsorted(task.start_ns, end)), self.stuck_at)
        self.free_ns = min(end, int(task.start_ns[self.stuck_at]))
        self.position = max(p, reached)

    def _remove(self, g: int, keep: int, at: int) -> None:
        task, p = self.task, self.position
        self._add(RECOMPUTE, g, max(p - 1, int(task.after[g])), keep, at)
        if self.stuck_at != p:
            self.position = min(int(task.next_opening[p]), self.stuck_at)


def dynamic_features(walk: Walk, out: NDArray[np.float32]) -> None:
    """Writes the columns of the moment of the node features, (N, FEATURES) or (N, OBSERVED), of the walk's present
    state."""
    task, graph = walk.task, walk.task.graph
    n, p = len(graph), min(walk.position, len(walk.need) - 1)
    acts = graph.action_gap >= 0
    out[:n, VALID] = walk.mask()
    out[:n, VALID][acts] -= walk.taken[graph.action_gap[acts]] == graph.action_kind[acts]
    out[:n, RELIEF][acts] = walk.relief()[graph.action_gap[acts]]
    out[:n, AHEAD] = (task.start_ns[graph.kernel] - task.start_ns[p]) / task.ideal_ns
    if out.shape[1] > FEATURES:
        out[:n, PRESSURE] = (walk.need[graph.kernel] - task.limit) * (1 / task.limit)
        out[:n, QUEUE] = max(0, walk.free_ns - int(task.start_ns[p])) / task.ideal_ns
        never = walk.stuck_at == len(walk.need)
        out[:n, STUCK] = 1.0 if never else (task.start_ns[walk.stuck_at] - task.start_ns[p]) / task.ideal_ns


def current_node(walk: Walk) -> int:
    """The node under execution: the last operation that has begun at the walk's position."""
    return max(0, int(np.searchsorted(walk.task.graph.kernel, walk.position, side="left")) - 1)
