"""Karpathy's character-level LSTM (github.com/karpathy/char-rnn: train.lua and model/LSTM.lua), unrolled.

One-hot characters, LSTM layers with dropout 0, a linear decoder and cross-entropy over all time steps; RMSprop with
learning rate 0.002 and decay 0.95. The cells are plain layers instead of one cuDNN call, so that kernels and tensors of
every time step are visible. As in the source, both linear layers of a cell have a bias, and the three sigmoid gates are
computed together in the order in, forget, out. Unspecified or different (experiments/workloads/README.md):

1. The batch is 2048 sequences, so that a state ``[batch, hidden]`` has 1 MiB; train.lua has 50.
2. Vocabulary: 65 characters, those of the example, the works of Shakespeare.
3. The state starts at zero in every step; the source continues from the previous batch. Gradients are not clamped.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.workloads._shared import tokens
from experiments.workloads.module import Parts


class Cell(nn.Module):
    """One layer at one time step: maps x ``[batch, inputs]``, h and c ``[batch, hidden]`` to the next h and c."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.i2h, self.h2h = nn.Linear(inputs, 4 * hidden), nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        sums = self.i2h(x) + self.h2h(h)
        gates, write = sums.split([3 * h.shape[1], h.shape[1]], dim=1)
        enter, forget, leave = gates.sigmoid().chunk(3, dim=1)
        c = forget * c + enter * write.tanh()
        return leave * c.tanh(), c


class CharRNN(nn.Module):
    """LSTM from characters ``[batch, length]`` to logits ``[length · batch, vocabulary]``, time first."""

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.eye: Tensor
        self.register_buffer("eye", torch.eye(vocabulary))  # its rows are the one-hot characters
        self.cells = nn.ModuleList(Cell(hidden if i else vocabulary, hidden) for i in range(layers))
        self.decoder = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        zero = self.eye.new_zeros(characters.shape[0], self.hidden)
        states = [(zero, zero)] * len(self.cells)
        logits = []
        for step in characters.unbind(1):
            x = self.eye.index_select(0, step)
            for i, cell in enumerate(self.cells):
                states[i] = cell(x, *states[i])
                x = states[i][0]
            logits.append(self.decoder(x))
        return torch.cat(logits)


def lstm(
    *, batch_size: int = 2048, hidden: int = 128, layers: int = 2, length: int = 50, vocabulary: int = 65
) -> Parts:
    """Returns the LSTM with ``batch_size`` sequences of ``length`` characters and the next character of each."""
    model = CharRNN(vocabulary, hidden, layers)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.95)
    return model, nn.CrossEntropyLoss(), optimizer, tokens(batch_size, length)
