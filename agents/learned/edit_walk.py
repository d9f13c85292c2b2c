"""Greedy walks of the Q-network, or of a control, over the plans of one task."""

from __future__ import annotations

import numpy as np
import torch

from agents.learned.edit_net import EditNet, edit_graph
from agents.learned.greedy_edits import FRESH, RANDOM, Q, head_of, hunt, make_pool
from envs.edit.batch import EditBatch
from envs.edit.task import EditTask, Start
from envs.edit.walkers import BEST_NS, BEST_ROWS, BIN_COLUMNS, BUDGET, STEPS, TIME_NS

NOTHING = np.zeros((1, 1), np.float32)


class EditWalk(EditBatch):
    """Walkers of one task.

    Args:
        net: ranks the neighbours; None: they are tried as they are drawn.
        neighbours: of a pool. draws: for each call.
        column: of the network's outputs (greedy_edits.py).
    """

    def __init__(
        self, task: EditTask, count: int, net: EditNet | None, seed: int, neighbours: int = 64, draws: int = 8,
        column: int = Q, hot: float = 1e-3, cold: float = 3e-5,
    ) -> None:  # fmt: skip
        if net is None:
            neighbours = draws = 1
        super().__init__([task], count, neighbours, budget=1, hot=hot, cold=cold)
        for i in range(count):
            self.seed(i, seed + i)
        self.net, self.draws, self.column = net, draws, RANDOM if net is None else column
        self._head, self._pools = head_of(net), [make_pool(neighbours) for _ in range(count)]
        self._bases = [(NOTHING, NOTHING[0])] * count
        self.simulated = 0
        if net is not None:
            with torch.no_grad():
                self._graph = edit_graph(task)
                self._parts = net.static_parts(self._graph)

    def begin(self, i: int, start: Start) -> None:
        """Walker i begins at a plan."""
        self._begin(i, 0, start)
        self._pools[i].meta[FRESH] = 1

    def walk(self, i: int, calls: int, done: float) -> int:
        """Makes at most so many simulator calls of walker i, all on one reading of its plan; returns how many.

        Args:
            done: how far the temperature has fallen, from 0 to 1.
        """
        task, walkers = self.tasks[0], self._walkers[0]
        walkers.ints[i, BUDGET] = round(min((walkers.ints[i, STEPS] + 1) / max(done, 1e-9), 1e12))
        if self.net is not None and self._pools[i].meta[FRESH]:
            self._read(i)
        h, base = self._bases[i]
        made, answer, waits, begin = 0, -1, True, task.engine.calls
        while waits:
            room = task.engine.direct(len(task.graph) + 8)
            more, accepted, waits = hunt(
                walkers, i, calls - made, self.draws, answer, self._pools[i], h, base, self._head, self.column,
                self.accept, self.hot, self.cold, float(task.ideal_ns), *self._moved(0), room,
            )  # fmt: skip
            made += more
            if waits:
                answer = task.engine.score(self._moves[0].proposed(int(walkers.ints[i, TIME_NS]))).iteration_ns
        if accepted and self.net is not None:
            self._show_plan(i)
        self.simulated += made - (task.engine.calls - begin)  # Engine.score has counted its own
        return made

    def best(self, i: int) -> Start:
        """The best plan of walker i."""
        walkers = self._walkers[0]
        return Start(int(walkers.ints[i, BEST_NS]), walkers.best[i, : walkers.ints[i, BEST_ROWS]].copy())

    def _read(self, i: int) -> None:
        one = np.zeros(self.count, np.bool_)
        one[i] = True
        self._finish(one)
        assert self.net is not None
        with torch.no_grad():
            gaps, bins, plan = (
                torch.from_numpy(x[i : i + 1]) for x in (self.gaps, self.bins[:, :, -BIN_COLUMNS:].copy(), self.plan)
            )
            h, whole = self.net.encode(self._graph, gaps, bins, plan, self._parts)
            self._bases[i] = h[0].numpy(), self.net.edit_of_whole(whole)[0].numpy()
