"""structure2vec over the operation graph, and the Q-values of action nodes.

Equations 1 to 3 of the DQN paper (sections 4.4, 4.9), after "Learning combinatorial optimization algorithms over
graphs". Shapes: N nodes, B states of one program, F features, p embedding size, A action nodes. Node tensors are
(N, B, p), so one sparse product sums over the neighbors in all states. Options beyond the paper, all off in
``agent=dqn_paper`` (README.md):

1. ``pool="mean"``: mean instead of sum over nodes in equation 2; the sum grows with the program.
2. ``mixing``: a layer W9 before the ReLU of equation 3, so that the graph state can change the ranking of actions.
3. ``features=8``: two dynamic features in addition to the six (envs/graph.py).
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch_geometric.utils import spmm

from envs.graph import OperationGraph


def neighbor_sum(s: Tensor, adjacency: Tensor) -> Tensor:
    """Returns the sum of s_u over u in N(v), which contains v (self-loops), as one product: (N, B, p) -> (N, B, p)."""
    total: Tensor = spmm(adjacency, s.flatten(1), "sum")
    return total.view_as(s)


def sparse(edges: Tensor, weights: Tensor, size: int) -> Tensor:
    """Returns a sparse (size, size) matrix with ``weights`` (E,) at ``edges`` (2, E)."""
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
        pool: "sum" (equation 2) or "mean".
        mixing: whether to add the layer W9.
        forms: number of forms of an action (envs/task.py), with one Q-value each, form by form.
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
        self.state_size = 2 * embedding_size
        self.message_passing_steps = message_passing_steps
        self.pool = pool
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
        edges = torch.from_numpy(graph.edges)
        weights = torch.from_numpy(graph.weights)

        # Not part of the checkpoint: computed from the program.
        self.register_buffer("adjacency", sparse(edges.flip(0), torch.ones(edges.shape[1]), n), persistent=False)
        self.register_buffer("target", edges[1], persistent=False)
        self.register_buffer("weights", weights[:, None], persistent=False)
        self.register_buffer("codes", codes(graph, forms), persistent=False)
        self.register_buffer("actions", codes(graph, 1), persistent=False)

    def forward(self, x: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
        """Returns Q-values (B, A * forms) and the graph state (B, 2p) of x (N, B, F) and current nodes (B,)."""
        n, batch, _ = x.shape
        # Equation 1. S^0 is zero, so the first round has no neighbor term; the edge term is equal in all states.
        weighted = self.w4(self.weights).relu()
        edge = self.w3(torch.zeros(n, self.w3.in_features).index_add_(0, self.target, weighted))
        node_input = self.w1(x) + edge[:, None]
        s = node_input.relu()
        for _ in range(self.message_passing_steps - 1):
            s = (node_input + self.w2(neighbor_sum(s, self.adjacency))).relu()
        # Equation 2: g = [W5 Σ_u s_u, W6 s_c].
        pooled = s.sum(0) if self.pool == "sum" else s.mean(0)
        g = torch.cat([self.w5(pooled), self.w6(s[current, torch.arange(batch)])], -1)  # (B, 2p)
        # Equation 3: Q = W7 ReLU([g, W8 s_a]).
        a = self.w8(s[self.actions]).transpose(0, 1)  # (B, A, p)
        features = torch.cat([g[:, None].expand(-1, a.shape[1], -1), a], -1)
        if self.w9 is not None:
            features = self.w9(features)
        q: Tensor = self.w7(features.relu())
        return q.transpose(1, 2).flatten(1), g


class CustomNetworkError(ValueError):
    """Raised if a custom network class cannot be used."""


class CustomNetwork(nn.Module):
    """Custom network instead of Structure2Vec: ``network=module:Class`` of train_dqn and train_sb3.

    The class is a ``torch.nn.Module`` constructed as ``Class(graph, features, forms)``: the static graph
    (envs/graph.py), the number of features per node, and the number of forms of an action. ``forward(nodes, current)``
    takes float32 (B, N, features) and int64 (B,), the current node. It returns scores (B, N * forms), node n in form f
    at n + N * f, and a state (B, S) of any width, which only PPO's critic reads. Invalid actions are masked outside.

    Raises:
        CustomNetworkError: if the class cannot be constructed or its forward does not match this description.
    """

    codes: Tensor

    def __init__(self, kind: object, graph: OperationGraph, features: int, forms: int):
        super().__init__()
        name = f"{getattr(kind, '__module__', '')}:{getattr(kind, '__qualname__', kind)}"
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise CustomNetworkError(f"network: {name} is not a subclass of torch.nn.Module; give a class that is")
        n = len(graph)
        self.register_buffer("codes", codes(graph, forms), persistent=False)
        try:
            self.network = kind(graph, features, forms)
            with torch.no_grad():
                output = self.network(torch.zeros(2, n, features), torch.zeros(2, dtype=torch.long))
        except Exception as error:  # user code can raise anything
            raise CustomNetworkError(
                f"network: {name} failed on two zero states ({type(error).__name__}: {error}); correct it"
            ) from error
        if not isinstance(output, tuple) or len(output) != 2 or not all(isinstance(value, Tensor) for value in output):
            raise CustomNetworkError(f"network: {name} must return two tensors, scores and a state")
        scores, state = output
        if scores.shape != (2, n * forms) or state.dim() != 2 or len(state) != 2 or not scores.is_floating_point():
            raise CustomNetworkError(
                f"network: {name}: for 2 states expected scores (2, {n * forms}) and a state (2, any), got "
                f"{tuple(scores.shape)} and {tuple(state.shape)}"
            )
        if not any(True for _ in self.network.parameters()):
            raise CustomNetworkError(f"network: {name} has no parameters to train; register some in its __init__")
        self.state_size = state.shape[1]

    def forward(self, x: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scores of the actions (B, A) and the state (B, S) of x (N, B, F) and current nodes (B,)."""
        scores, state = self.network(x.transpose(0, 1), current)
        return scores[:, self.codes], state


def codes(graph: OperationGraph, forms: int) -> Tensor:
    """Returns node + N * form of every action, (A,), ascending."""
    actions = torch.from_numpy(graph.action_kind >= 0).nonzero()[:, 0]
    return (actions + len(graph) * torch.arange(forms)[:, None]).flatten()
