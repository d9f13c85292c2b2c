"""Tests of the solver for PyTorch's own memory budget, which sees chains instead of a knapsack."""

from typing import Any

import torch
from torch import fx
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack, greedy_knapsack
from torch._functorch.partitioners import min_cut_rematerialization_partition

from executor.compiled import ChainSolver
from tests.executor.compiled.test_compiled import blocks, interpreted, step


class Compared(ChainSolver):
    """Records the recomputation time of this solver and of two of PyTorch's, all within the budget."""

    def __call__(self, memory: list[float], joint_graph: Any, max_memory: float, node_info: Any, values: Any) -> Any:
        saved, recomputed = super().__call__(memory, joint_graph, max_memory, node_info, values)
        assert sum(memory[i] for i in saved) <= max_memory
        runtimes = [float(self._ns(node)) for node in values]
        others = [solve(memory, runtimes, max_memory)[2] for solve in (dp_knapsack, greedy_knapsack)]
        self.times = [self.chains({values[i] for i in some}, values) for some in (recomputed, *others)]
        return saved, recomputed

    def chains(self, recomputed: set[fx.Node], values: list[fx.Node]) -> int:
        """Returns the time to recompute these values, counting each operator once."""
        saved = set(values) - recomputed
        seen = set()
        stack = list(recomputed)
        while stack:
            node = stack.pop()
            if node.op == "call_function" and node not in saved and node not in seen:
                seen.add(node)
                stack += node.all_input_nodes
        return sum(map(self._ns, seen))


def test_recomputed_chains_are_faster_than_the_knapsacks_plan() -> None:
    net = blocks(3)
    x = torch.randn(4, 64, 32)
    times = []
    expected = step(net, net, x)
    for budget in (0.2, 0.1):
        torch._dynamo.reset()
        solver = Compared("h100")
        options = {"activation_memory_budget": budget, "activation_memory_budget_solver": solver}
        with torch._functorch.config.patch(options):
            results = step(interpreted(net, min_cut_rematerialization_partition), net, x)
        torch.testing.assert_close(results, expected)
        times.append(solver.times)
    assert all(ours <= min(theirs) for ours, *theirs in times)
    assert any(ours < min(theirs) for ours, *theirs in times)


def test_its_key_names_the_machine() -> None:
    assert ChainSolver("h100").uuid() == ChainSolver("h100").uuid() != ChainSolver("h200").uuid()
