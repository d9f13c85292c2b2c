"""Small versions of the networks used to test planned training: the original layers with few channels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
Batch = tuple[Tensor, Tensor]


class VGG16(nn.Module):
    """13 convolutions in 5 blocks, 3 linear layers with dropout (Simonyan and Zisserman, 2015)."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for depth, factor in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width * factor, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width * factor
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels, 32),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(32, 32),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(32, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        short = [nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)] if stride > 1 else []
        self.short = nn.Sequential(*short)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.short(x), inplace=True)


class ResNet(nn.Module):
    """Residual blocks (He et al., 2016), the last of each stage at half resolution; dropout before the last layer."""

    def __init__(self, width: int = 4, blocks: int = 2) -> None:
        super().__init__()
        widths = [width * 2 ** (i // 2) for i in range(blocks + 1)]
        self.blocks = nn.Sequential(*(Residual(a, b, b // a) for a, b in pairwise(widths)))
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        last = nn.Linear(widths[-1], CLASSES)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), last)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


def small() -> nn.Module:
    """Returns a network of one residual block."""
    return ResNet(blocks=1)


class UNet(nn.Module):
    """U-Net with concatenated skip connections (Ronneberger et al., 2015)."""

    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth)]
        self.down = nn.ModuleList(self.double(a, b) for a, b in pairwise([3, *widths]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.join = nn.ModuleList(self.double(2 * a, a) for a in widths[:-1])
        self.drop = nn.Dropout2d(0.2)
        self.out = nn.Conv2d(width, CLASSES, 1)

    @staticmethod
    def double(channels: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, out, 3, padding=1),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if i else x)
            skips.append(x)
        x = self.drop(skips.pop())
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return self.out(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.heads = heads
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.drop, is_causal=True)
        return functional.dropout(self.proj(y.transpose(1, 2).flatten(2)), self.drop)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, drop)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width), nn.Dropout(drop)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """GPT-2 (Radford et al., 2019): pre-norm layers, dropout, output weights tied to the embedding."""

    def __init__(self, width: int = 16, layers: int = 1, heads: int = 2, words: int = 40, length: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.Sequential(*(Layer(width, heads, 0.1) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        x = self.drop(self.words(x) + self.places(places))
        return self.out(self.norm(self.layers(x))).transpose(1, 2)


class LSTM(nn.Module):
    """Two recurrent layers with dropout between them over embedded words, which classify the sequence."""

    def __init__(self, width: int = 16, words: int = 40) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.2)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.words(x))[0][:, -1])


def images(size: int, count: int = 2) -> Callable[[], Batch]:
    return lambda: (torch.randn(count, 3, size, size), torch.randint(CLASSES, (count,)))


def masks() -> Batch:
    return torch.randn(2, 3, 16, 16), torch.randint(CLASSES, (2, 16, 16))


def words() -> Batch:
    text = torch.randint(40, (2, 13))
    return text[:, :-1].clone(), text[:, 1:].clone()


def sequences() -> Batch:
    return torch.randint(40, (3, 9)), torch.randint(CLASSES, (3,))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "vgg16": (VGG16, images(32)),
    "resnet": (ResNet, images(16)),
    "unet": (UNet, masks),
    "gpt2": (GPT2, words),
    "lstm": (LSTM, sequences),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
