"""Reference implementation of the episode walk, for the compiled one (envs/compiled_walk.py, envs/observation.py).

envs/walk.py defines episodes; start reading at ``Walk.step``. ``Clock`` simulates the current iteration so far, on
which ``reward="causal"`` is based. Choices where the paper is silent:

1. A wrapping gap of a persistent tensor is open at position 0; its swap-out does not hold the agent.
2. Rounding up holds the agent, not the copy engine: an offload starts as soon as the engine is free and its gap open.
3. While a transfer holds the agent, kernels take their ideal time (until one cannot start).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.graph import FEATURES, Feature
from envs.task import COPY, DEAD_END_REWARD, EARLY, KEEP, PLAIN, REWARDS, Task
from envs.walk import Step
from simulator import Plan
from simulator.compiled.encoding import RECOMPUTE, SWAP, decisions_of
from simulator.modes import Choice
from simulator.schedule import lower


class Clock:
    """Causal simulation of the kernels that the agent passes (rules 2 to 8), under the decisions taken until then.

    Swap-outs run one after the other, and a kernel waits for its inputs. Kernels are not simulated twice: effects of
    later decisions are settled by the simulation of the complete plan in the last step. Times are in ns from the
    iteration's start.
    """

    def __init__(self, task: Task):
        self.task = task
        self.ended = np.zeros(len(task.start_ns), np.int64)  # end of all kernels before k
        self.out_free = self.in_free = -task.program.ideal_ns  # times at which the copy engines are free
        self.out_end = np.zeros(len(task.tensor), np.int64)  # per gap: completion of its swap-out
        self.queue: list[int] = []  # gaps whose swap-outs are in flight, in order

    def offload(self, g: int, issued: int, before_iteration: bool) -> None:
        """Issues a swap-out at the end of kernel ``issued``, of this iteration or of the previous one."""
        task = self.task
        ended, late = (task.start_ns, task.program.ideal_ns) if before_iteration else (self.ended, 0)
        self.out_free = max(self.out_free, int(ended[issued + 1]) - late) + task.machine.d2h_ns(int(task.nbytes[g]))
        self.out_end[g] = self.out_free
        self.queue.append(g)

    def run(self, begin: int, end: int, need: NDArray[np.int64], swapped: NDArray[np.bool_]) -> None:
        """Executes kernels ``begin`` to ``end`` - 1.

        Args:
            need: Planned residency.
            swapped: Per gap, whether a swap empties it.
        """
        task = self.task
        for k in range(begin, end):
            now = int(self.ended[k])
            # Tensors evicted until kernel k are swapped in once they fit by planned residency (rules 5 and 6).
            for g in np.flatnonzero(swapped & (task.before == k)):
                first = 0 if task.wraps[g] else int(task.after[g]) + 1
                tight = np.flatnonzero(need[first:k] + task.nbytes[g] > task.limit)
                fits = int(self.ended[first + tight[-1] + 1]) if len(tight) else -task.program.ideal_ns
                self.in_free = max(self.in_free, int(self.out_end[g]), fits) + task.machine.h2d_ns(int(task.nbytes[g]))
                now = max(now, self.in_free)
            # Unfinished swap-outs take memory in addition to the planned residency (rule 8).
            while self.queue:
                leaves = int(self.out_end[self.queue[0]])
                under_way = int(task.nbytes[self.queue].sum())
                if leaves > now and need[k] + under_way <= task.limit:
                    break
                now = max(now, leaves)
                self.queue.pop(0)
            self.ended[k + 1] = now + task.start_ns[k + 1] - task.start_ns[k]

    def stall_ns(self, position: int) -> int:
        """Returns the total stall of the kernels before ``position``."""
        return int(self.ended[position] - self.task.start_ns[position])


class Walk:
    """State of one episode.

    Args:
        reward: "paper": change in simulated time of the plan so far, with the limit enforced up to the position;
            "causal": stalls and recomputation in the ``Clock``'s current iteration.

    Raises:
        ValueError: The reward is unknown.
    """

    def __init__(self, task: Task, reward: str = "paper"):
        if reward not in REWARDS:
            raise ValueError(f"reward: expected {' or '.join(map(repr, REWARDS))}, got {reward!r}")
        self.task = task
        self._causal = reward == "causal"
        self._rows = np.zeros((len(task.graph.gaps), 6), np.int64)
        self.reset()

    def reset(self) -> None:
        """Returns to position 0 with an empty plan."""
        task = self.task
        self.position = 0
        self.count = 0
        self.taken = np.full(len(task.graph.gaps), -1, np.int64)  # kind of the action taken, or -1
        self.iteration_ns = task.program.ideal_ns
        self.free_ns = -task.program.ideal_ns  # time at which the d2h stream is free, in ideal time
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
        """Returns the plan so far (simulator.compiled.engine.rows_of)."""
        return self._rows[: self.count]

    @property
    def overhead(self) -> float:
        """Returns the overhead of the plan so far: simulated time over ideal time, minus 1."""
        return self.iteration_ns / self.task.ideal_ns - 1

    def plan(self, planner: str = "") -> Plan:
        """Returns the plan so far."""
        program = self.task.program
        task = self.task
        return Plan.of(program, decisions_of(self.rows), planner, task.limit, task.machine.name)

    def _refresh(self) -> None:
        """Updates the kernel at which the plan so far is stuck, and the open gaps."""
        task = self.task
        p = self.position
        over = self.need[p:] > task.limit
        self.stuck_at = p + int(over.argmax()) if over.any() else len(self.need)
        # A gap is useful if the tensor would be evicted at kernel p.
        began = (task.after < p) | task.wraps
        # If host memory is short, tensors that would fit at their own time are refused too: rare, and safe.
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
        """Returns (N,) the nodes that are valid actions now; after the end, only "do nothing". Read-only."""
        return self._mask

    def form_masks(self) -> NDArray[np.bool_]:
        """Returns (forms, N) the valid actions in each form; row 0 is ``mask``.

        An early copy must be of the current content and in this iteration. ``keep`` is always valid. An early
        recomputation is valid if some kernel does not fit, and is placed after the last such kernel before the use.
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
        """Returns the kernel after the last one above the limit before the use; -1: no such kernel before the use."""
        before = int(self.task.before[g])
        over = np.flatnonzero(self.need[self.position : before] > self.task.limit)
        at = self.position + int(over[-1]) + 1 if len(over) else before
        return at if at < before else -1

    def relief(self) -> NDArray[np.float64]:
        """Returns (G,) the share of the excess over the limit, in bytes x time, that lies within each gap."""
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
            ValueError: The action is not valid now.
        """
        if self.done or not (self.form_masks()[form] if form else self._mask)[node]:
            raise ValueError(f"node {node} is not a valid action now" + (f" in form {form}" if form else ""))
        task = self.task
        p = self.position
        kind = int(task.graph.action_kind[node])
        g = int(task.graph.action_gap[node])
        if kind == Choice.RESIDENT:
            self.position = min(int(task.next_opening[p]), self.stuck_at)
        elif kind == Choice.SWAPPED:
            self._offload(g, int(task.copy_at[g]) if form == COPY else -1)
        else:
            self._remove(g, int(form == KEEP), self._early(g) if form == EARLY else -1)
        if kind != Choice.RESIDENT:
            self.taken[g] = kind
            if task.host_is_short:
                self.host_left = task.machine.host_bytes - task.engine.on_host(self.rows)
            self.need = task.engine.residency(self.rows)
        self.done = bool((self.need <= task.limit).all())
        if self._causal:
            self.clock.run(p, self.position, self.need, self.taken == Choice.SWAPPED)
            if kind != Choice.RESIDENT:
                again = lower(task.program, self.plan()).steps if (self.taken == Choice.RECOMPUTED).any() else ()
                self.rerun_ns = sum(step.duration_ns for step in again if step.is_recomputation)
        reward = 0.0
        if self._causal and not self.done:
            lasts = task.program.ideal_ns + self.clock.stall_ns(self.position) + self.rerun_ns
            feasible = True
        else:
            score = task.engine.score(self.rows, None if self.done else self.position)
            lasts = score.iteration_ns
            feasible = score.feasible
        if feasible:
            reward = (self.iteration_ns - lasts) / task.ideal_ns
            self.iteration_ns = lasts
        elif self.done:  # the iterations never repeat (rule 10)
            self.dead_end = True
        self._refresh()
        if self.dead_end:
            reward += DEAD_END_REWARD
        return Step(reward, self.done, self.dead_end)

    def _add(self, kind: int, g: int, after: int, extra: int, when: int) -> None:
        self._rows[self.count] = kind, self.task.tensor[g], after, self.task.before[g], extra, when
        self.count += 1

    def _offload(self, g: int, copy: int) -> None:
        """Swaps gap ``g`` out; ``copy`` is the kernel at whose end the copy is issued, -1: when the gap opens."""
        task = self.task
        p = self.position
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
        if self.stuck_at == p:  # kernel p waits for this transfer
            self.free_ns = int(task.start_ns[p])
            return
        reached = min(int(np.searchsorted(task.start_ns, end)), self.stuck_at)
        self.free_ns = min(end, int(task.start_ns[self.stuck_at]))
        self.position = max(p, reached)

    def _remove(self, g: int, keep: int, at: int) -> None:
        task = self.task
        p = self.position
        self._add(RECOMPUTE, g, max(p - 1, int(task.after[g])), keep, at)
        if self.stuck_at != p:
            self.position = min(int(task.next_opening[p]), self.stuck_at)


def dynamic_features(walk: Walk, out: NDArray[np.float32]) -> None:
    """Writes the dynamic columns of the node features, (N, FEATURES) or (N, OBSERVED), for the walk's current state."""
    task = walk.task
    graph = walk.task.graph
    n = len(graph)
    p = min(walk.position, len(walk.need) - 1)
    acts = graph.action_gap >= 0
    out[:n, Feature.VALID] = walk.mask()
    out[:n, Feature.VALID][acts] -= walk.taken[graph.action_gap[acts]] == graph.action_kind[acts]
    out[:n, Feature.RELIEF][acts] = walk.relief()[graph.action_gap[acts]]
    out[:n, Feature.AHEAD] = (task.start_ns[graph.kernel] - task.start_ns[p]) / task.ideal_ns
    if out.shape[1] > FEATURES:
        need = walk.need[graph.kernel]
        out[:n, Feature.PRESSURE] = (need - task.limit) / np.maximum(need, task.limit)
        queued_ns = max(0, walk.free_ns - int(task.start_ns[p]))
        out[:n, Feature.QUEUE] = queued_ns / (queued_ns + task.ideal_ns)
        never = walk.stuck_at == len(walk.need)
        out[:n, Feature.STUCK] = 1.0 if never else (task.start_ns[walk.stuck_at] - task.start_ns[p]) / task.ideal_ns


def current_node(walk: Walk) -> int:
    """Returns the node being executed: the last operation that has begun at the walk's position."""
    return max(0, int(np.searchsorted(walk.task.graph.kernel, walk.position, side="left")) - 1)
