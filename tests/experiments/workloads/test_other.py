"""U-Net, hourglasses, RandWire, char-RNN, K-means, stochastic depth, MLP, GPT-2, BERT, the Transformer: sizes as
published, arithmetic as defined."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional as F

from executor import PlannedStep, capture
from experiments import figures, workloads
from experiments.workloads import (
    WorkloadError,
    gpt2,
    hourglass,
    kmeans,
    lstm,
    randwire,
    resnet_stochastic,
    transformer,
    unet,
)
from simulator import Machine, Plan, Swap

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "workload"
NAMES = ["unet", "lstm", "kmeans", "resnet_stochastic", "mlp", "gpt2_small", "gpt2_medium", "hourglass",
         "randwire", "bert", "transformer", "fc_densenet", "yolov3"]  # fmt: skip
TINY = {
    "unet": {"batch_size": 1, "image": 188},
    "lstm": {"batch_size": 2, "hidden": 8, "length": 3, "vocabulary": 5},
    "kmeans": {"batch_size": 12, "dimensions": 3, "clusters": 4, "chunks": 3},
    "resnet_stochastic": {"batch_size": 2, "blocks": 2},
    "mlp": {"batch_size": 2, "width": 8, "layers": 3},
    "gpt2_small": {"batch_size": 1, "length": 4},
    "gpt2_medium": {"batch_size": 1, "length": 4},
    "hourglass": {"batch_size": 2, "image": 64, "width": 8},
    "randwire": {"batch_size": 2, "image": 32, "width": 4, "nodes": 16},
    "bert": {"batch_size": 1, "length": 4},
    "transformer": {"batch_size": 1, "length": 4},
    "fc_densenet": {"stages": "1-2-1", "growth": 4, "image": 16},
    "yolov3": {"stages": "1-1-1-1-1", "width": 4, "image": 64},
}
GPU = Machine.load("gtx1080ti")


def config(name: str) -> dict:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


def parameters(name: str, **changes: object) -> int:
    model = workloads.build({**config(name), **changes})[0]
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_builds_with_the_keys_of_its_family(name):
    model, loss_fn, optimizer, (x, y) = workloads.build({**config(name), **TINY[name]})
    loss = loss_fn(model(x), y)
    assert loss.shape == () and loss.device.type == "meta"
    assert (optimizer is None) == (name == "kmeans") == (not list(model.parameters()))
    assert config(name)["name"] == name and figures.label(name) != name


@pytest.mark.parametrize(
    ("name", "changes", "published"),
    [
        # The paper's Figure 1 with biases; 31,030,593 is quoted for one class: a class more is 64 weights and a bias.
        ("unet", {}, 31_030_593 + 65),
        # What train.lua prints with its own defaults (128 units, 65 characters): 4 · 128 · (65 + 128 + 2) + 4 · 128 ·
        # (128 + 128 + 2) + 129 · 65.
        ("lstm", {}, 240_321),
        ("mlp", {}, 3072 * 4096 + 4096 + 3 * (4096 * 4096 + 4096) + 4096 * 10 + 10),
        ("gpt2_small", {}, 124_439_808),
        ("gpt2_medium", {}, 354_823_168),
        ("gpt2_small", {"size": "large"}, 774_030_080),
        # Google's bert-base-uncased has 109,482,240 with a pooler of 768 · 768 + 768, and no masked language model:
        # that is a layer of the same size, a norm of 2 · 768 and a number per word.
        ("bert", {"length": 512}, 109_482_240 + 2 * 768 + 30_522),
        # The paper's Table 3 says 65 million. 37,000 words of 512; four 512 x 512 layers with biases an attention, of
        # which an encoder layer has one and a decoder layer two; two feed-forward layers; the norms, two of them last.
        (
            "transformer",
            {},
            37_000 * 512
            + 18 * 4 * (512 * 512 + 512)
            + 12 * (2 * 512 * 2048 + 2048 + 512)
            + (6 * 2 + 6 * 3 + 2) * 2 * 512,
        ),
    ],
)
def test_parameters_as_published(name, changes, published):
    assert parameters(name, **changes) == published


def test_resnet110_has_1_7_million_parameters():
    # He et al. (2016), Table 6. 3 · 9 · 16 weights in the stem; 36 convolutions a stage, the first from fewer channels;
    # a bias and two numbers of batch-norm per channel; 65 · 10 at the end.
    weights = 432 + 36 * 9 * 16 * 16 + sum(35 * 9 * w * w + 9 * w * w // 2 for w in (32, 64))
    assert parameters("resnet_stochastic") == weights + 3 * (16 + 36 * (16 + 32 + 64)) + 650
    assert round(parameters("resnet_stochastic") / 1e6, 1) == 1.7


def test_stacked_hourglasses_and_randwire_are_about_as_large_as_published():
    # Xie et al., Table 2: 5.6 ± 0.1 million, the mean of graphs. Tang et al. ("Quantized densely connected U-Nets",
    # ECCV 2018, Table 6) count 25.5 million for eight hourglasses.
    assert 5.4e6 < parameters("randwire") < 5.9e6
    assert parameters("hourglass", stacks=8) == pytest.approx(25.5e6, rel=0.01)


def test_fc_densenet_and_yolov3_are_as_large_as_published():
    # Jégou et al., Table 3: 1.5, 3.5 and 9.4 million; Table 2: 1072 channels before the last convolution's 256.
    assert parameters("fc_densenet") == pytest.approx(9.4e6, rel=0.02)
    assert parameters("fc_densenet", stages="5-5-5-5-5-5") == pytest.approx(3.5e6, rel=0.02)
    assert parameters("fc_densenet", stages="4-4-4-4-4-4", growth=12) == pytest.approx(1.5e6, rel=0.1)
    model = workloads.build(config("fc_densenet"))[0]
    assert model.classify.in_channels == 256
    assert [up[-1][2].in_channels + 16 for up in model.up] == [1088, 816, 576, 384, 256]  # the paper prints 578
    assert parameters("yolov3") == 61_949_149


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("fc_densenet", {"stages": "4"}, "workload.stages"),
        ("fc_densenet", {"image": 200}, "workload.image: expected a multiple of 32"),
        ("yolov3", {"stages": "1-2-8-8"}, "workload.stages"),
        ("yolov3", {"image": 400}, "workload.image: expected a multiple of 32"),
    ],
)
def test_images_and_stages_that_cannot_be(name, changes, says):
    with pytest.raises(WorkloadError, match=says):
        workloads.build({**config(name), **changes})


def test_the_graph_of_randwire_is_that_of_watts_and_strogatz():
    rng = random.Random(3)
    inputs = randwire.graph(32, rng)
    assert sum(map(len, inputs)) == 32 * 2 and all(u < v for v in range(32) for u in inputs[v])
    assert all(len(set(i)) == len(i) for i in inputs)
    ring = [sorted({(v - 1) % 32, (v - 2) % 32, (v + 1) % 32, (v + 2) % 32} & set(range(v))) for v in range(32)]
    assert inputs != ring


def test_hourglass_adds_what_went_beside():
    model = hourglass.Hourglass(1, 4).eval()
    for part in (model.down, model.inner, model.up):
        part.forward = lambda x: x  # type: ignore[method-assign]
    model.beside.forward = lambda x: 10 * x  # type: ignore[method-assign]
    x = torch.arange(16.0).view(1, 1, 4, 4).expand(1, 4, 4, 4)
    # Of every 2 x 2 pixels the largest, in all four places.
    assert model(x)[0, 0].tolist() == [[5, 15, 27, 37], [45, 55, 67, 77], [93, 103, 115, 125], [133, 143, 155, 165]]


def test_the_translator_does_not_see_the_words_to_come():
    torch.manual_seed(0)
    model = transformer.build(length=5, width=8, heads=2, vocabulary=7)[0].eval()
    words = torch.randint(7, (1, 2, 5))
    other = words.clone()
    other[0, 1, 3] = (words[0, 1, 3] + 1) % 7
    before, after = model(words), model(other)
    assert torch.allclose(before[:3], after[:3], atol=1e-6) and not torch.allclose(before[3:], after[3:], atol=1e-3)
    other[0, 0, 4] = (words[0, 0, 4] + 1) % 7
    assert not torch.allclose(model(other)[:3], before[:3], atol=1e-3)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("hourglass", {"image": 100}, "workload.image: expected a multiple of 64 with 4 levels, got 100"),
        ("hourglass", {"width": 6}, "workload.width: expected a multiple of 4, got 6"),
        ("randwire", {"nodes": 15}, "workload.nodes: expected at least 16, got 15"),
        ("randwire", {"width": 1}, "workload.width: expected at least 2, got 1"),
        ("bert", {"heads": 5}, r"workload.heads: expected a divisor of width \(768\), got 5"),
        ("transformer", {"dropout": 1}, r"workload.dropout: expected a number in \[0, 1\), got 1"),
    ],
)
def test_sizes_that_the_networks_cannot_have_are_refused(name, changes, message):
    with pytest.raises(WorkloadError, match=message):
        workloads.build({**config(name), **changes})


def test_unet_has_the_sides_of_its_figure():
    # 572 -4- 568 /2 284 -4- 280 /2 140 -4- 136 /2 68 -4- 64 /2 32 -4- 28; 28 ·2-4 52 ·2-4 100 ·2-4 196 ·2-4 388
    assert unet.output(572) == 388
    # 188: 184, 92, 88, 44, 40, 20, 16, 8, 4; 4, 4, 4, 4, 4
    assert unet.output(188) == 4
    with torch.device("meta"):
        model = unet.UNet()
        assert tuple(model(torch.empty(1, 1, 572, 572)).shape) == (1, 2, 388, 388)
    # Figure 1's bottom: 1024 channels of 28; the merged map below the top: 128 + 128 channels of 104 and 200 cropped
    assert model.down[4][2].out_channels == 1024 and model.merge[2][0].in_channels == 256


def test_unet_joins_the_middle_of_the_left_map():
    class Inverse(nn.Module):
        """In the place of a part of the network: what comes in, without the edge that convolutions would take."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return x[..., 2:-2, 2:-2]

    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(1, 1, 2 * x.shape[2], 2 * x.shape[3])

    seen: list[torch.Tensor] = []
    model = unet.UNet().eval()
    model.down, model.merge = (nn.ModuleList(Inverse() for _ in range(n)) for n in (5, 4))
    model.up, model.classify = nn.ModuleList(Nothing() for _ in range(4)), nn.Identity()
    image = torch.arange(188.0 * 188).view(1, 1, 188, 188)
    model(image)
    # The last merge sees 8 x 8 pixels of the top left map, 184 x 184: from row 88 there, row 90 of the image.
    assert torch.equal(seen[-1][:, :1], image[..., 90:98, 90:98])


def test_unrolled_lstm_equals_torchs():
    torch.manual_seed(0)
    ours, theirs = lstm.CharRNN(5, 4, 2), nn.LSTM(5, 4, 2)
    order = [0, 1, 3, 2]  # PyTorch has the gates as in, forget, write, out
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
    """Twelve points in three chunks; the last of the four centroids is far from all of them."""
    model, loss_fn, optimizer, (chunks, squares) = kmeans.build(batch_size=12, dimensions=3, clusters=4, chunks=3)
    generator = torch.Generator().manual_seed(0)
    for chunk in chunks:
        chunk.copy_(torch.rand(chunk.shape, generator=generator))
    squares.copy_(sum(chunk.square().sum() for chunk in chunks))
    model.centroids.copy_(torch.cat([chunks[0][:3], torch.full((1, 3), 9.0)]))
    return model, loss_fn, optimizer, (chunks, squares)


def lloyd(points: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, float]:
    """One iteration, from its definition; an empty cluster stays."""
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
    points, before = torch.cat(batch[0]).double().numpy(), model.centroids.double().numpy()
    for _ in range(2):
        before, inertia = lloyd(points, before)
        (total,) = captured.graph(*captured.sources)
        np.testing.assert_allclose(model.centroids.numpy(), before, rtol=1e-5)
        np.testing.assert_allclose(total.item(), inertia, rtol=1e-4)
    assert (model.centroids[3] == 9).all()


def test_kmeans_runs_under_a_plan():
    ours, theirs = tiny_kmeans(), tiny_kmeans()
    captured = capture(*ours)
    gap = next(g for g in captured.program.gaps() if captured.program.tensors[g.tensor].name == "input0")
    plan = Plan((Swap(gap.tensor, gap.after, gap.before),), fingerprint=captured.program.fingerprint)
    step = PlannedStep(captured, plan)
    for _ in range(2):
        loss = step(*ours[3])
        assert torch.equal(loss, theirs[1](theirs[0](theirs[3][0]), theirs[3][1]))
        assert torch.equal(ours[0].centroids, theirs[0].centroids)


def test_a_step_without_optimizer_has_no_backward_pass():
    model = nn.Linear(2, 1)
    program = capture(model, lambda y, _: y.sum(), None, (torch.ones(3, 2), None)).program
    assert {k.phase for k in program.kernels} == {"forward"} and model.weight.grad is None


def test_one_program_per_draw_of_stochastic_depth():
    entry = {**config("resnet_stochastic"), "batch_size": 2, "blocks": 1}
    first, again, second = (workloads.load({**entry, "draw": draw}, GPU).program for draw in (1, 1, 3))
    assert first.fingerprint == again.fingerprint != second.fingerprint
    # Of three blocks, those that survive have two convolutions forward; the stem has one.
    for program, draw in ((first, 1), (second, 3)):
        names = [k.name for k in program.kernels if k.phase == "forward"]
        assert names.count("aten.convolution.default") == 1 + 2 * sum(resnet_stochastic.survival(3, draw))


def test_survival_decays_linearly():
    # p_l = 1 - l / (2 L): for L = 4 blocks 0.875, 0.75, 0.625, 0.5; four standard deviations of 2000 draws are 0.045
    rates = np.mean([resnet_stochastic.survival(4, draw) for draw in range(2000)], axis=0)
    np.testing.assert_allclose(rates, [0.875, 0.75, 0.625, 0.5], atol=0.045)


def test_dropped_blocks_are_their_shortcuts_and_stay_as_they_are():
    torch.manual_seed(0)
    model = resnet_stochastic.StochasticResNet([True, False, False])
    dropped = [block for block in model.layers if isinstance(block, resnet_stochastic.Block) and not block.survives]
    x = torch.rand(2, 16, 4, 4)
    pooled = dropped[0](x)
    assert tuple(pooled.shape) == (2, 32, 2, 2) and not pooled[:, 16:].any()
    assert torch.equal(pooled[:, :16], F.avg_pool2d(x, 2))
    F.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.tensor([1, 2])).backward()
    assert all(p.grad is None for block in dropped for p in block.parameters())
    assert sum(p.grad is None for p in model.parameters()) == sum(1 for b in dropped for _ in b.parameters())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("unet", {"image": 571}, "workload.image: every 2x2 pool needs an even side, as with 556 or 572, got 571"),
        ("unet", {"image": 100}, "workload.image: .* 188 or 204, got 100"),
        ("unet", {"image": 172}, "workload.image"),
        ("lstm", {"hidden": 0}, "workload.hidden: expected a positive integer, got 0"),
        ("kmeans", {"chunks": 7}, r"workload.chunks: expected a divisor of batch_size \(300000\), got 7"),
        ("resnet_stochastic", {"draw": 1.5}, "workload.draw: expected a positive integer, got 1.5"),
        ("resnet_stochastic", {"batch_size": 1}, "workload.batch_size: expected an integer of at least 2"),
        ("mlp", {"layers": 1}, "workload.layers: expected an integer of at least 2, got 1"),
        ("gpt2_small", {"size": "huge"}, "workload.size: gpt2 has small, medium, large, not 'huge'"),
        ("gpt2_small", {"size": ["small"]}, "workload.size"),
        ("gpt2_small", {"length": 1025}, "workload.length: gpt2 has 1024 positions, not 1025"),
    ],
)
def test_bad_keys(name, change, message):
    with pytest.raises(WorkloadError, match=message):
        workloads.build({**config(name), **change})


def test_gpt2_takes_tokens_to_logits():
    model = gpt2.GPT2(2, 8, 2, vocabulary=16, context=4)
    assert tuple(model(torch.zeros(3, 4, dtype=torch.int64)).shape) == (12, 16)
