"""NumPy forward pass of the Q-network's encoder: no PyTorch overhead between two evaluations for one plan.

``EditNet.encode`` is the definition; a test compares both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from agents.learned.edit_net import EditNet, edit_graph
from envs.edit.columns import N_CHANGES
from envs.edit.task import EditTask

Floats = NDArray[np.float32]


class Encoder:
    """Encodes plans of one task.

    Args:
        net: the network, whose weights are copied.
        task: the task.
    """

    def __init__(self, net: EditNet, task: EditTask) -> None:
        self._weights = {name: weight.detach().numpy().copy() for name, weight in net.named_parameters()}
        self._rounds = net.rounds
        graph = edit_graph(task)
        with torch.no_grad():
            static_parts = net.static_parts(graph)
        self._gap_part, self._change_part, self._bin_part = (part.numpy() for part in static_parts)
        if self._rounds:
            self._edges = [_csr(edges) for edges in graph.edges]
            self._gap_of_bin = graph.gap_of_bin.numpy()
            self._bin_of_gap = graph.bin_of_gap.numpy()

    def encode(self, gaps: Floats, bins: Floats, plan: Floats) -> tuple[Floats, Floats]:
        """Encodes one plan from its columns (envs/edit/columns.py).

        Args:
            gaps: (G, columns of GAP).
            bins: (BINS, columns of BIN).
            plan: (columns of PLAN,).

        Returns:
            h (G * N_CHANGES, w), the term of each possible change, and (w,), the term of the whole plan in every edit.
        """
        gap_x = self._gap_part + self._layer("gap_state", gaps)
        bin_x = self._bin_part + self._layer("bin_state", bins)
        s = _relu(gap_x)
        b = _relu(bin_x)
        for _ in range(self._rounds):
            among = self._layer("among", b.mean(0, keepdims=True))
            b = _relu(bin_x + self._layer("to_bin", self._bin_of_gap @ s) + among)
            messages = np.concatenate([edges @ s for edges in self._edges], 1)
            s = _relu(gap_x + self._layer("to_gap", self._gap_of_bin @ b) + self._layer("along", messages))
        whole = _relu(self._layer("whole", np.concatenate([s.mean(0), b.mean(0), plan])))
        change_x = self._change_part + self._layer("change_of_state", gaps)
        z = _relu(self._layer("change_of_gap", s) + change_x + whole)
        h = self._layer("change", z).reshape(len(gaps) * N_CHANGES, -1)
        return h, self._layer("edit_of_whole", whole)

    def _layer(self, name: str, x: Floats) -> Floats:
        """Applies a linear layer to (..., inputs)."""
        y: Floats = x @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return y if bias is None else y + bias


def _relu(x: Any) -> Floats:
    y: Floats = np.maximum(x, 0)
    return y


def _csr(matrix: Tensor) -> csr_matrix:
    parts = (matrix.values().numpy(), matrix.col_indices().numpy(), matrix.crow_indices().numpy())
    return csr_matrix(parts, shape=tuple(matrix.shape))
