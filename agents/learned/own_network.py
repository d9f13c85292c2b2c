"""A network of one's own in the place of structure2vec: ``network=module:Class`` of train_dqn and train_sb3.

The class is a ``torch.nn.Module``, made as ``Class(graph, features, forms)``: the static graph (envs/graph.py: edges,
weights, features), how many features of a node it gets, and in how many forms an action may be taken (1, or more with
``actions=full``). ``forward(nodes, current)`` takes float32 (B, N, features) and int64 (B,), the node under execution,
and returns scores (B, N * forms), of node n in form f at n + N * f, and a state (B, S) of any width, which only the
critic of PPO reads. Actions that may not be taken are masked outside.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from envs.graph import OperationGraph


class OwnNetworkError(ValueError):
    """What is wrong with a class."""


class OwnNetwork(nn.Module):
    """As Structure2Vec, over a class of one's own.

    Raises:
        OwnNetworkError: the class is none, cannot be made, or its forward is not as described.
    """

    codes: Tensor

    def __init__(self, kind: object, graph: OperationGraph, features: int, forms: int):
        super().__init__()
        name = f"{getattr(kind, '__module__', '')}:{getattr(kind, '__qualname__', kind)}"
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise OwnNetworkError(f"network: {name} is no class of torch.nn.Module")
        n = len(graph)
        self.register_buffer("codes", codes(graph, forms), persistent=False)
        try:
            self.network = kind(graph, features, forms)
            with torch.no_grad():
                made = self.network(torch.zeros(2, n, features), torch.zeros(2, dtype=torch.long))
        except Exception as error:  # whatever a stranger's code raises
            raise OwnNetworkError(f"network: {name} does not run ({type(error).__name__}: {error})") from error
        if not isinstance(made, tuple) or len(made) != 2 or not all(isinstance(one, Tensor) for one in made):
            raise OwnNetworkError(f"network: {name} returns no two tensors, scores and a state")
        scores, state = made
        if scores.shape != (2, n * forms) or state.dim() != 2 or len(state) != 2 or not scores.is_floating_point():
            raise OwnNetworkError(
                f"network: of {name}, for 2 states, expected scores (2, {n * forms}) and a state (2, any), got "
                f"{tuple(scores.shape)} and {tuple(state.shape)}"
            )
        if not any(True for _ in self.network.parameters()):
            raise OwnNetworkError(f"network: {name} has nothing that could learn")
        self.state_size = state.shape[1]

    def forward(self, x: Tensor, current: Tensor) -> Tensor:
        """x (N, B, F), current (B,) -> the scores of what is an action, (B, A)."""
        return self.with_graph_state(x, current)[0]

    def with_graph_state(self, x: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
        """The scores (B, A), and the state (B, S)."""
        scores, state = self.network(x.transpose(0, 1), current)
        return scores[:, self.codes], state


def codes(graph: OperationGraph, forms: int) -> Tensor:
    """(A,) node + N * form of every action, ascending."""
    actions = torch.from_numpy(graph.action_kind >= 0).nonzero()[:, 0]
    return (actions + len(graph) * torch.arange(forms)[:, None]).flatten()
