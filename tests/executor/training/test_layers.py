"""Layers and styles that models have: recurrent ones, attention, checkpoints, channels last; equal to eager."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from executor import CaptureError, capture
from tests.executor.networks import CLASSES, GPT2, Attention, Batch, Residual, adamw, images, sgd, words
from tests.executor.training.programs import GPU, Parts, Twins, random_plan, tight


class Recurrent(nn.Module):
    """Two layers each way, with dropout between them, over a sequence of vectors."""

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = cell(8, 8, 2, dropout=0.3, bidirectional=True, batch_first=True)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # 8 channels: of 4, oneDNN's backward of a strided 1x1 convolution writes past its buffer on AVX2.
        layers = [nn.Conv2d(3, 8, 3, padding=1), Residual(8, 8, 2), Residual(8, 8, 1), nn.AdaptiveAvgPool2d(1)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, CLASSES)).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.contiguous(memory_format=torch.channels_last))


class Checkpointed(nn.Module):
    """Blocks whose activations PyTorch itself recomputes, with dropout and batch norm in them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.reentrant = nn.Conv2d(3, 4, 3, padding=1), reentrant
        self.blocks = nn.ModuleList(nn.Sequential(Residual(4, 4, 1), nn.Dropout(0.2)) for _ in range(3))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Attentions(nn.Module):
    """Fused attention with dropout, and with a mask; PyTorch's own encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.first = Attention(16, 2, 0.2)
        self.second = nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True)
        self.out = nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = x + self.first(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        x = x + functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.1)
        return self.out(self.second(x)).transpose(1, 2)


def vectors() -> Batch:
    return torch.randn(3, 3, 8), torch.randint(CLASSES, (3,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "rnn": (lambda: Recurrent(nn.RNN), vectors), "gru": (lambda: Recurrent(nn.GRU), vectors),
    "lstm": (lambda: Recurrent(nn.LSTM), vectors), "channels_last": (ChannelsLast, images(8)),
    "checkpoint": (lambda: Checkpointed(False), images(8)), "reentrant": (lambda: Checkpointed(True), images(8)),
    "attention": (Attentions, words), "tied": (GPT2, words),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_eager(name):
    model, batch = MODELS[name]
    optimizer = sgd if name in ("gru", "reentrant", "tied") else adamw
    twins = Twins("small", optimizer)
    twins.batch = batch

    def parts() -> Parts:
        torch.manual_seed(0)
        made = model()
        return made, nn.CrossEntropyLoss(), optimizer(made)

    twins.ours, twins.eager = parts(), parts()
    captured = twins.captured()
    twins.train(tight(captured, random_plan(captured.program, 1)), 3)


@pytest.mark.parametrize(
    ("where", "said"),
    [("whole", r"^the model is compiled \(torch.compile\), .*: give its _orig_mod$"),
     ("part", r"^0 is compiled \(torch.compile\), .*: give its _orig_mod$"),
     ("in place", r"^0 is compiled \(torch.compile\), .*: leave out its compile\(\)$"),
     ("loss", r"^a part of the step is compiled \(torch.compile\), .*: give the function that was compiled$")],
)  # fmt: skip
def test_compiled_parts_are_refused(where, said):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    batch = torch.randn(3, 8), torch.randint(4, (3,))
    optimizer = sgd(model)
    loss_fn = nn.CrossEntropyLoss()
    if where == "whole":
        model = torch.compile(model)
    elif where == "part":
        model[0] = torch.compile(model[0])
    elif where == "in place":
        model[0].compile()
    else:
        loss_fn = torch.compile(nn.functional.cross_entropy)
    with pytest.raises(CaptureError, match=said) as caught:
        capture(model, loss_fn, optimizer, batch, machine=GPU)
    assert "\n" not in str(caught.value)
