"""A knapsack solver for PyTorch's own ``activation_memory_budget``.

    torch._functorch.config.activation_memory_budget = 0.4
    torch._functorch.config.activation_memory_budget_solver = ChainSolver()

PyTorch's solvers see a knapsack: each value has a size and the FLOPs of the one operator that computes it. This solver
sees chains: a value that is not saved is recomputed from its inputs, recursively up to saved ones, and a chain that two
values share is recomputed once. It solves a 0/1 program (Checkmate's without an order: Jain et al., 2020, section 4)
with roofline times of the operators. The meaning of the budget and the fusion stay PyTorch's; no peak is planned.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from torch import fx
from torch._inductor.custom_graph_pass import CustomKnapsackSolver

from executor.compiled.launches import is_view, operator_ns
from simulator.machine import Machine


class ChainSolver(CustomKnapsackSolver):
    """Selects the values to save so that recomputing the others takes the least time.

    Args:
        machine: A preset's name, a YAML file or a Machine, whose roofline gives operator durations; None is ``CPU``.

    Raises:
        FormatError: If machine is invalid.
    """

    def __init__(self, machine: Machine | str | None = None) -> None:
        from executor.compiled.backend import CPU

        self.machine = Machine.load(machine) if isinstance(machine, str) else machine or CPU

    def uuid(self) -> str:
        """Returns a hash of this code and the machine."""
        return hashlib.sha256(Path(__file__).read_bytes() + repr(self.machine).encode()).hexdigest()

    def __call__(
        self,
        memory: list[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: Any,
        all_recomputable_banned_nodes: list[fx.Node],
    ) -> tuple[list[int], list[int]]:
        """Returns indices of the values to save and to recompute; sizes are in the unit of ``max_memory``."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        values = all_recomputable_banned_nodes
        saved = {node: i for i, node in enumerate(values)}
        nodes = [n for n in node_info.required_fw_nodes if n.op == "call_function"]
        recomputed = {node: len(values) + i for i, node in enumerate(nodes)}  # columns: saved, then recomputed
        rows: list[tuple[int, int, float]] = [(0, i, m) for i, m in enumerate(memory)]
        lower = [-np.inf]
        upper = [max(max_memory, 0.0)]
        for value in values:  # saved or recomputed
            if value in recomputed:
                rows += [(len(lower), saved[value], 1.0), (len(lower), recomputed[value], 1.0)]
                lower.append(1.0)
                upper.append(np.inf)
        for node in nodes:  # recomputing needs inputs that are saved or recomputed
            for x in node.all_input_nodes:
                if x in recomputed:
                    rows += [(len(lower), recomputed[x], 1.0), (len(lower), recomputed[node], -1.0)]
                    rows += [(len(lower), saved[x], 1.0)] if x in saved else []
                    lower.append(0.0)
                    upper.append(np.inf)
        row_index, columns, factors = zip(*rows, strict=True)
        shape = (len(lower), len(values) + len(nodes))
        cost = np.array([0.0] * len(values) + [float(self._ns(node)) for node in nodes])
        integral = np.array([1] * len(values) + [0] * len(nodes))  # recomputed ones follow
        solution = milp(
            cost,
            integrality=integral,
            bounds=Bounds(0, 1),
            options={"time_limit": 5.0},  # in seconds; the incumbent is used then
            constraints=LinearConstraint(coo_array((factors, (row_index, columns)), shape).tocsr(), lower, upper),
        )
        kept_indices = {i for i in range(len(values)) if solution.x is not None and solution.x[i] > 0.5}
        return sorted(kept_indices), [i for i in range(len(values)) if i not in kept_indices]

    def _ns(self, node: fx.Node) -> int:
        """Returns the roofline duration of an operator in ns; 0 for views."""
        return 0 if is_view(node) else operator_ns(node, self.machine)
