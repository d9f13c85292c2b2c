"""structure2vec over the operation graph, and the Q-value of an action node.

Equations 1 to 3 of "GPU memory management for neural networks using deep Q-network" (sections 4.4, 4.9), after
"Learning combinatorial optimization algorithms over graphs". Shapes: N nodes, B states of one program, F features,
p embedding size, A action nodes. Node tensors are (N, B, p), so that one sparse product sums over the neighbours of
all states at once. Differences from the paper, each switched off in ``agent=dqn_paper`` (reasons in README.md):

1. ``pool="mean"``: the mean over all nodes in equation 2, where the paper has the sum, which grows with the program.
2. ``mixing``: a layer W9 before the ReLU of equation 3, through which the graph state can change the order of actions.
3. ``features=8``: two features of the moment are added to the six (envs/graph.py).
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import spmm

from envs.graph import OperationGraph


class NeighbourSum(MessagePassing):  # type: ignore[misc]  # it has no types
    """Σ over u in N(v) of s_u; N(v) contains v (the graph has self-loops)."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")

    def forward(self, s: Tensor, adjacency: Tensor) -> Tensor:
        """s (N, B, p) -> (N, B, p)."""
        total: Tensor = self.propagate(adjacency, s=s.flatten(1))
        return total.view_as(s)

    def message_and_aggregate(self, edge_index: Tensor, s: Tensor) -> Tensor:
        """The sum over neighbours as one sparse product: (N, N) by (N, B p)."""
        total: Tensor = spmm(edge_index, s, self.aggr)
        return total


def sparse(edges: Tensor, weights: Tensor, size: int) -> Tensor:
    """Sparse (size, size) with these weights (E,) at edges (2, E)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns at the first use that sparse CSR is in beta
        return torch.sparse_coo_tensor(edges, weights, (size, size), check_invariants=True).to_sparse_csr()


class Structure2Vec(nn.Module):
    """Node states, graph state and Q-values of one program's graph.

    Args:
        graph: the static part: edges and their weights.
        features: F, 6 as in the paper or 8.
        embedding_size: p.
        message_passing_steps: T.
        forms: in how many an action may be taken (envs/task.py); a Q-value for each, form by form.
    """

    adjacency: Tensor
    target: Tensor
    weights: Tensor
    actions: Tensor
    codes: Tensor

    def __init__(
        self,
        graph: OperationGraph,
        features: int,
        embedding_size: int,
        message_passing_steps: int,
        pool: str,
        mixing: bool,
        forms: int = 1,
    ):
        super().__init__()
        p = embedding_size
        self.message_passing_steps, self.pool, self.features = message_passing_steps, pool, features
        self.neighbours = NeighbourSum()
        self.w1 = nn.Linear(features, p, bias=False)
        self.w2 = nn.Linear(p, p, bias=False)
        self.w3 = nn.Linear(p, p, bias=False)
        self.w4 = nn.Linear(1, p, bias=False)
        self.w5 = nn.Linear(p, p, bias=False)
        self.w6 = nn.Linear(p, p, bias=False)
        self.w7 = nn.Linear(p if mixing else 3 * p, forms, bias=False)
        self.w8 = nn.Linear(p, p, bias=False)
        self.w9 = nn.Linear(3 * p, p) if mixing else None
        n = len(graph)
        edges, weights = torch.from_numpy(graph.edges), torch.from_numpy(graph.weights)

        # Not part of the checkpoint: they come from the program.
        self.register_buffer("adjacency", sparse(edges.flip(0), torch.ones(edges.shape[1]), n), persistent=False)
        self.register_buffer("target", edges[1], persistent=False)
        self.register_buffer("weights", weights[:, None], persistent=False)
        self.register_buffer("codes", codes(graph, forms), persistent=False)
        self.register_buffer("actions", torch.from_numpy(graph.action_kind >= 0).nonzero()[:, 0], persistent=False)

    def forward(self, x: Tensor, current: Tensor) -> Tensor:
        """Q-values: x (N, B, F), current (B,) node under execution -> (B, A * forms)."""
        return self.with_graph_state(x, current)[0]

    def with_graph_state(self, x: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
        """Q-values (B, A * forms) as ``forward``, and the graph state (B, 2p) that they are read from."""
        n, batch, _ = x.shape
        # Equation 1. S^0 is zero, so the first round has no neighbour term.
        edge = self.w3(
            torch.zeros(n, self.w3.in_features).index_add_(0, self.target, self.w4(self.weights).relu())
        )  # W3 Σ_u ReLU(W4 w(u, v)), the same for all states
        own = self.w1(x) + edge[:, None]
        s = own.relu()
        for _ in range(self.message_passing_steps - 1):
            s = (own + self.w2(self.neighbours(s, self.adjacency))).relu()
        # Equation 2: g = [W5 Σ_u s_u, W6 s_c].
        together = s.sum(0) if self.pool == "sum" else s.mean(0)
        g = torch.cat([self.w5(together), self.w6(s[current, torch.arange(batch)])], -1)  # (B, 2p)
        # Equation 3: Q = W7 ReLU([g, W8 s_a]).
        a = self.w8(s[self.actions]).transpose(0, 1)  # (B, A, p)
        both = torch.cat([g[:, None].expand(-1, a.shape[1], -1), a], -1)
        if self.w9 is not None:
            both = self.w9(both)
        q: Tensor = self.w7(both.relu())
        return q.transpose(1, 2).flatten(1), g


class CustomNetworkError(ValueError):
    """What is wrong with a class."""


class CustomNetwork(nn.Module):
    """A network of one's own in the place of Structure2Vec: ``network=module:Class`` of train_dqn and train_sb3.

    The class is a ``torch.nn.Module``, made as ``Class(graph, features, forms)``: the static graph (envs/graph.py), how
    many features of a node it gets, and in how many forms an action may be taken. ``forward(nodes, current)`` takes
    float32 (B, N, features) and int64 (B,), the node under execution, and returns scores (B, N * forms), of node n in
    form f at n + N * f, and a state (B, S) of any width, which only the critic of PPO reads. Actions that may not be
    taken are masked outside.

    Raises:
        CustomNetworkError: the class is none, cannot be made, or its forward is not as described.
    """

    codes: Tensor

    def __init__(self, kind: object, graph: OperationGraph, features: int, forms: int):
        super().__init__()
        name = f"{getattr(kind, '__module__', '')}:{getattr(kind, '__qualname__', kind)}"
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise CustomNetworkError(f"network: {name} is no class of torch.nn.Module")
        n = len(graph)
        self.register_buffer("codes", codes(graph, forms), persistent=False)
        try:
            self.network = kind(graph, features, forms)
            with torch.no_grad():
                made = self.network(torch.zeros(2, n, features), torch.zeros(2, dtype=torch.long))
        except Exception as error:  # whatever a stranger's code raises
            raise CustomNetworkError(f"network: {name} does not run ({type(error).__name__}: {error})") from error
        if not isinstance(made, tuple) or len(made) != 2 or not all(isinstance(one, Tensor) for one in made):
            raise CustomNetworkError(f"network: {name} returns no two tensors, scores and a state")
        scores, state = made
        if scores.shape != (2, n * forms) or state.dim() != 2 or len(state) != 2 or not scores.is_floating_point():
            raise CustomNetworkError(
                f"network: of {name}, for 2 states, expected scores (2, {n * forms}) and a state (2, any), got "
                f"{tuple(scores.shape)} and {tuple(state.shape)}"
            )
        if not any(True for _ in self.network.parameters()):
            raise CustomNetworkError(f"network: {name} has nothing that could learn")
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
