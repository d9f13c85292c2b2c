"""Measures the CPU time to plan and compile a model over its number of equal layers.

    python -m experiments.measure.compile_time 4 12 32 --regional

Each model runs in a process of its own, with an empty cache of Inductor. The time is that of the first training step in
CPU seconds, including compilers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

import torch
from torch import Tensor, nn

from executor.compiled import compile, report

WIDTH = 64


class Layer(nn.Module):
    """Transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Returns hidden states of the same shape."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Returns the mean square of the last hidden states."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def measure(layers: int, regional: bool) -> str:
    """Returns a line with the CPU seconds of the first step, and the plan's peak."""
    model = compile(Model(layers), memory=0.7, regional=regional)
    before = os.times()
    model(torch.randn(4, 64, WIDTH)).backward()
    after = os.times()
    (graph,) = report(model).graphs
    fraction = graph.peak_bytes / graph.without_bytes
    return f"{layers} layers: {sum(after[:4]) - sum(before[:4]):.1f} s of CPU time, peak {fraction:.0%} of PyTorch's"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", type=int, nargs="+")
    parser.add_argument("--regional", action="store_true")
    arguments = parser.parse_args()
    if len(arguments.layers) > 1:
        for number in arguments.layers:
            options = [str(number), *(["--regional"] if arguments.regional else [])]
            subprocess.run([sys.executable, "-m", "experiments.measure.compile_time", *options], check=True)
    else:
        # Inductor compiles in this process, so that its time counts.
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            torch._inductor.config.compile_threads = 1
            print(measure(arguments.layers[0], arguments.regional), flush=True)
