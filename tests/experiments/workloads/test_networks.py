"""Convolutional networks, the LSTM and K-means: what they are made of, and arithmetic as defined."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from executor import PlannedStep, capture, with_roofline
from experiments import workloads
from experiments.workloads import densenet, inception, kmeans, lstm, maps, mobile, randwire, resnet
from simulator import Machine, Plan, Swap
from tests.experiments.workloads.conftest import config

GPU, HOME_GPU = Machine.load("gtx1080ti"), Machine.load("rtx2080ti")
CIFAR = {"image": 32, "classes": 10}


@pytest.mark.parametrize(
    ("name", "convolutions"),
    [
        ("mobilenet", 1 + 13 * 2),
        ("squeezenet", 1 + 8 * 3 + 1),
        ("plain20", 19),
        ("resnet18_cifar", 17 + 3),  # and three shortcuts whose shape changes
        ("vgg16_imagenet", 13),
    ],
)
def test_captured_convolutions(name, convolutions):
    kernels = workloads.load(config(name, batch_size=2, **CIFAR), GPU).program.kernels
    assert sum(k.kind == "conv" and k.phase == "forward" for k in kernels) == convolutions


# Capturing these takes seconds; every convolution module is called once.
@pytest.mark.parametrize(
    ("name", "convolutions"),
    [
        # Stem 5, three modules of 7, a reduction of 4, four of 10, a reduction of 6, two of 9.
        ("inception_v3", 5 + 3 * 7 + 4 + 4 * 10 + 6 + 2 * 9),
        # Stem 3 + 1 + 6 + 1, four modules of 7, a reduction of 4, seven of 10, a reduction of 6, three of 10.
        ("inception_v4", 11 + 4 * 7 + 4 + 7 * 10 + 6 + 3 * 10),
        ("densenet121", 121 - 1),  # one of the 121 layers is linear
    ],
)
def test_convolutions_of_the_large_networks(name, convolutions):
    model = workloads.build(config(name))[0]
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == convolutions


def test_inception_keeps_the_sizes_of_its_tables():
    with torch.device("meta"):
        sizes = []
        for version, image in ((3, 299), (4, 299), (3, 32)):
            features = inception.Inception(version, image).features
            x = torch.empty(2, 3, image, image)
            for part in features:
                x = part(x)
                if not sizes or sizes[-1] != tuple(x.shape[1:3]):
                    sizes.append(tuple(x.shape[1:3]))
    assert sizes == [
        (192, 35), (256, 35), (288, 35), (768, 17), (1280, 8), (2048, 8),  # Szegedy et al., 2015, Table 1
        (384, 35), (1024, 17), (1536, 8),  # Szegedy et al., 2017, Figure 9
        (192, 32), (256, 32), (288, 32), (768, 15), (1280, 7), (2048, 7),
    ]  # fmt: skip


def test_inceptions_notation():
    x = torch.empty(2, 5, 9, 9, device="meta")
    for spec, shape in [
        ("4", (4, 9, 9)),
        ("4/5 6/1x7", (6, 9, 9)),
        ("4/3v", (4, 7, 7)),
        ("4/3s", (4, 4, 4)),
        ("avg max", (5, 9, 9)),
        (["4/3s", "maxs", ("2", ["3/3s", "1/3s"])], (4 + 5 + (3 + 1), 4, 4)),
    ]:
        module, channels = inception.network(spec, 5)
        result = module.to("meta")(x)
        assert result.shape == (2, *shape) and channels == shape[0]
    module, _ = inception.network("4/1x7", 5)
    assert [m.kernel_size for m in module.modules() if isinstance(m, nn.Conv2d)] == [(1, 7)]


def test_a_residual_block_adds_its_input():
    x = torch.tensor([[-1.0, 2.0]]).view(1, 2, 1, 1).expand(2, 2, 3, 3)
    for residual, expected in ((True, x.relu()), (False, torch.zeros_like(x))):
        block = resnet.PlainBlock(2, 2, 1, residual)
        nn.init.zeros_(block.layers[-1].weight)  # batch-norm's: nothing comes out of the convolutions
        assert torch.equal(block(x), expected)
    assert resnet.PlainBlock(2, 4, 2, True)(x).shape == (2, 4, 2, 2)


def test_a_bypass_adds_and_a_dense_block_keeps_its_input():
    x = torch.rand(2, 16, 3, 3)
    for bypass in (True, False):
        fire = mobile.Fire(16, 16, norm=True, bypass=bypass)
        for expand in (fire.expand1, fire.expand3):
            nn.init.zeros_(expand[1].weight)
        assert torch.equal(fire(x), x if bypass else torch.zeros_like(x))
    y = densenet.Block(16, 3)(x)
    assert y.shape == (2, 16 + 3 * 32, 3, 3) and torch.equal(y[:, :16], x)


# What resnet.Plain infers HOME's networks from, to the digits it quotes: GiB, and images per second by the roofline.
@pytest.mark.parametrize(
    ("name", "changes", "peak", "speed"),
    [
        ("plain20", {"batch_size": 1040}, 8.9, 2094),
        ("plain20", {"batch_size": 1040, "width": 16}, 2.2, 22794),
        ("resnet18_cifar", {"batch_size": 1255}, 8.2, 2368),
    ],
)
def test_peaks_at_the_largest_batches_of_home(name, changes, peak, speed):
    program = workloads.load(config(name, **changes), HOME_GPU).program
    assert round(program.peak_bytes / 2**30, 1) == peak
    program = with_roofline(program, HOME_GPU)  # the papers' figures scale it to what they measured
    assert changes["batch_size"] / (program.ideal_ns / 1e9) == pytest.approx(speed, rel=0.01)


def test_fc_densenet_comes_up_as_the_paper_prints():
    # Jégou et al., Table 2: 1072 channels before the last convolution's 256; the paper prints 578 for 576.
    model = workloads.build(config("fc_densenet"))[0]
    assert model.classify.in_channels == 256
    assert [up[-1][2].in_channels + 16 for up in model.up] == [1088, 816, 576, 384, 256]


def test_the_graph_of_randwire_is_that_of_watts_and_strogatz():
    rng = random.Random(3)
    inputs = randwire.graph(32, rng)
    assert sum(map(len, inputs)) == 32 * 2 and all(u < v for v in range(32) for u in inputs[v])
    assert all(len(set(i)) == len(i) for i in inputs)
    ring = [sorted({(v - 1) % 32, (v - 2) % 32, (v + 1) % 32, (v + 2) % 32} & set(range(v))) for v in range(32)]
    assert inputs != ring


def test_hourglass_adds_what_went_beside():
    model = maps.Hourglass(1, 4).eval()
    for part in (model.down, model.inner, model.up):
        part.forward = lambda x: x  # type: ignore[method-assign]
    model.beside.forward = lambda x: 10 * x  # type: ignore[method-assign]
    x = torch.arange(16.0).view(1, 1, 4, 4).expand(1, 4, 4, 4)
    # Of every 2 x 2 pixels the largest, in all four places.
    assert model(x)[0, 0].tolist() == [[5, 15, 27, 37], [45, 55, 67, 77], [93, 103, 115, 125], [133, 143, 155, 165]]


def test_unet_has_the_sides_of_its_figure():
    # 572 -4- 568 /2 284 -4- 280 /2 140 -4- 136 /2 68 -4- 64 /2 32 -4- 28; 28 ·2-4 52 ·2-4 100 ·2-4 196 ·2-4 388
    assert maps.output(572) == 388
    # 188: 184, 92, 88, 44, 40, 20, 16, 8, 4; 4, 4, 4, 4, 4
    assert maps.output(188) == 4
    with torch.device("meta"):
        model = maps.UNet()
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
    model = maps.UNet().eval()
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
    model, loss_fn, optimizer, (chunks, squares) = kmeans.kmeans(batch_size=12, dimensions=3, clusters=4, chunks=3)
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
        assert names.count("aten.convolution.default") == 1 + 2 * sum(resnet.survival(3, draw))


def test_survival_decays_linearly():
    # p_l = 1 - l / (2 L): for L = 4 blocks 0.875, 0.75, 0.625, 0.5; four standard deviations of 2000 draws are 0.045
    rates = np.mean([resnet.survival(4, draw) for draw in range(2000)], axis=0)
    np.testing.assert_allclose(rates, [0.875, 0.75, 0.625, 0.5], atol=0.045)


def test_dropped_blocks_are_their_shortcuts_and_stay_as_they_are():
    torch.manual_seed(0)
    model = resnet.StochasticResNet([True, False, False])
    dropped = [block for block in model.layers if isinstance(block, resnet.StochasticBlock) and not block.survives]
    x = torch.rand(2, 16, 4, 4)
    pooled = dropped[0](x)
    assert tuple(pooled.shape) == (2, 32, 2, 2) and not pooled[:, 16:].any()
    assert torch.equal(pooled[:, :16], F.avg_pool2d(x, 2))
    F.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.tensor([1, 2])).backward()
    assert all(p.grad is None for block in dropped for p in block.parameters())
    assert sum(p.grad is None for p in model.parameters()) == sum(1 for b in dropped for _ in b.parameters())
