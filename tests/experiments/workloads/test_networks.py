"""Tests convolutional networks, the LSTM and K-means: structure and arithmetic."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from executor import capture
from experiments import workloads
from experiments.workloads import others, randwire, resnet
from simulator import Machine
from tests.experiments.workloads.conftest import config

GPU = Machine.load("gtx1080ti")
HOME_GPU = Machine.load("rtx2080ti")


def test_the_graph_of_randwire_is_that_of_watts_and_strogatz():
    rng = random.Random(3)
    inputs = randwire.graph(32, rng)
    assert sum(map(len, inputs)) == 32 * 2 and all(u < v for v in range(32) for u in inputs[v])
    assert all(len(set(i)) == len(i) for i in inputs)
    ring = [sorted({(v - 1) % 32, (v - 2) % 32, (v + 1) % 32, (v + 2) % 32} & set(range(v))) for v in range(32)]
    assert inputs != ring


def test_unrolled_lstm_equals_torchs():
    torch.manual_seed(0)
    ours = others.CharRNN(5, 4, 2)
    theirs = nn.LSTM(5, 4, 2)
    order = [0, 1, 3, 2]  # PyTorch orders the gates as in, forget, write, out
    with torch.no_grad():
        for i, cell in enumerate(ours.cells):
            for name, linear in (("ih", cell.i2h), ("hh", cell.h2h)):
                getattr(theirs, f"weight_{name}_l{i}").copy_(linear.weight.view(4, 4, -1)[order].flatten(0, 1))
                getattr(theirs, f"bias_{name}_l{i}").copy_(linear.bias.view(4, 4)[order].flatten())
    characters = torch.randint(5, (3, 6))
    expected = ours.decoder(theirs(F.one_hot(characters.T, 5).float())[0]).flatten(0, 1)
    logits = ours(characters)
    torch.testing.assert_close(logits, expected)
    target = torch.randint(5, (18,))
    for output in (logits, expected):
        F.cross_entropy(output, target).backward()
    gradient = ours.cells[0].h2h.weight.grad.view(4, 4, 4)[order].flatten(0, 1)
    torch.testing.assert_close(gradient, theirs.weight_hh_l0.grad)


def tiny_kmeans() -> tuple:
    """Returns twelve points in three chunks, and four centroids, the last far from all points."""
    model, loss_fn, optimizer, (chunks, squares) = others.kmeans(batch_size=12, dimensions=3, clusters=4, chunks=3)
    generator = torch.Generator().manual_seed(0)
    for chunk in chunks:
        chunk.copy_(torch.rand(chunk.shape, generator=generator))
    squares.copy_(sum(chunk.square().sum() for chunk in chunks))
    model.centroids.copy_(torch.cat([chunks[0][:3], torch.full((1, 3), 9.0)]))
    return model, loss_fn, optimizer, (chunks, squares)


def lloyd(points: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, float]:
    """Computes an iteration of Lloyd's algorithm; an empty cluster keeps its centroid."""
    distances = ((points[:, None] - centroids[None]) ** 2).sum(2)
    labels = distances.argmin(1)
    moved = [points[labels == c].mean(0) if (labels == c).any() else centroids[c] for c in range(len(centroids))]
    return np.stack(moved), float(distances.min(1).sum())


def test_kmeans_is_lloyds_iteration():
    model, loss_fn, optimizer, batch = tiny_kmeans()
    captured = capture(model, loss_fn, optimizer, batch)
    assert {k.phase for k in captured.program.kernels} == {"forward"}
    (state,) = (t for t in captured.program.tensors if t.persistent and t.kind == "buffer")
    assert (state.name, state.nbytes) == ("centroids", 4 * 3 * 4)
    points = torch.cat(batch[0]).double().numpy()
    before = model.centroids.double().numpy()
    for _ in range(2):
        before, inertia = lloyd(points, before)
        (total,) = captured.graph(*captured.sources)
        np.testing.assert_allclose(model.centroids.numpy(), before, rtol=1e-5)
        np.testing.assert_allclose(total.item(), inertia, rtol=1e-4)
    assert (model.centroids[3] == 9).all()


def test_one_program_per_draw_of_stochastic_depth():
    entry = {**config("resnet_stochastic"), "batch_size": 2, "blocks": 1}
    first, again, second = (workloads.load({**entry, "draw": draw}, GPU).program for draw in (1, 1, 3))
    assert first.fingerprint == again.fingerprint != second.fingerprint
    # Each surviving block (of three) has two forward convolutions; the stem has one.
    for program, draw in ((first, 1), (second, 3)):
        names = [k.name for k in program.kernels if k.phase == "forward"]
        assert names.count("aten.convolution.default") == 1 + 2 * sum(resnet.survival(3, draw))
