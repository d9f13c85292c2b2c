"""The convolutional networks besides VGG and ResNet of Table I: sizes as published, and what they are made of."""

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from executor import with_roofline
from experiments import figures, workloads
from experiments.workloads import WorkloadError, densenet, inception, plain, squeezenet
from simulator import Machine

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "workload"
NAMES = ["inception_v3", "inception_v3_cifar", "inception_v4", "densenet121", "mobilenet", "squeezenet", "plain20",
         "resnet18_cifar", "vgg16_imagenet"]  # fmt: skip
IMAGENET, CIFAR = {"image": 224, "classes": 1000}, {"image": 32, "classes": 10}
GPU = Machine.load("rtx2080ti")


def config(name: str, **changes: object) -> dict:
    return {**yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), **changes}


@pytest.mark.parametrize(
    ("name", "changes", "published"),
    [
        ("inception_v3", {}, 23_834_568),  # torchvision's inception_v3(aux_logits=False, init_weights=False)
        ("inception_v4", {}, 42_679_816),  # Cadene's pretrained-models.pytorch and timm
        ("densenet121", {}, 7_978_856),  # torchvision's documentation
        # kuangliu's pytorch-cifar, 6,956,298, has no batch-norm in the stem: 2 · 64 more.
        ("densenet121", CIFAR, 6_956_298 + 128),
        ("mobilenet", IMAGENET, 4_231_976),  # keras.applications, trainable; the paper's Table 1 gives 4.2 M
        # Only the linear layer is another: 1000 · 1024 + 1000 become 10 · 1024 + 10.
        ("mobilenet", {}, 4_231_976 - 1_025_000 + 10_250),
        ("squeezenet", IMAGENET, 1_248_424),  # torchvision's documentation of squeezenet1_0
        # He et al., Table 6: 0.27 M. 3·16·9 + 6·16²·9 + (16·32 + 5·32²)·9 + (32·64 + 5·64²)·9 = 267,696 weights,
        # 2 · 7 · 16 + 2 · 6 · 32 + 2 · 6 · 64 = 1,376 for batch-norm and 650 in the linear layer.
        ("plain20", {"width": 16}, 267_696 + 1_376 + 650),
        ("resnet18_cifar", {}, 11_173_962),  # kuangliu's pytorch-cifar
        ("vgg16_imagenet", {}, 138_357_544),  # torchvision's documentation; the paper's Table 2: 138 M
    ],
)
def test_parameters_are_as_published(name, changes, published):
    model = workloads.build(config(name, **changes))[0]
    assert sum(p.numel() for p in model.parameters()) == published


@pytest.mark.parametrize("name", NAMES)
def test_every_network_takes_the_other_kind_of_images(name):
    assert config(name)["name"] == name and figures.label(name) != name
    image = 32 if config(name)["image"] > 64 else 96
    model, loss_fn, _, (x, y) = workloads.build(config(name, batch_size=2, image=image, classes=7))
    logits = model(x)
    assert x.shape == (2, 3, image, image) and x.device.type == "meta"
    assert logits.shape == (2, 7) and loss_fn(logits, y).shape == ()


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
        block = plain.Block(2, 2, 1, residual)
        nn.init.zeros_(block.layers[-1].weight)  # batch-norm's: nothing comes out of the convolutions
        assert torch.equal(block(x), expected)
    assert plain.Block(2, 4, 2, True)(x).shape == (2, 4, 2, 2)


def test_a_bypass_adds_and_a_dense_block_keeps_its_input():
    x = torch.rand(2, 16, 3, 3)
    for bypass in (True, False):
        fire = squeezenet.Fire(16, 16, norm=True, bypass=bypass)
        for expand in (fire.expand1, fire.expand3):
            nn.init.zeros_(expand[1].weight)
        assert torch.equal(fire(x), x if bypass else torch.zeros_like(x))
    y = densenet.Block(16, 3)(x)
    assert y.shape == (2, 16 + 3 * 32, 3, 3) and torch.equal(y[:, :16], x)


# What plain.py infers HOME's networks from, to the digits it quotes: GiB, and images per second by the roofline.
@pytest.mark.parametrize(
    ("name", "changes", "peak", "speed"),
    [
        ("plain20", {"batch_size": 1040}, 8.9, 2094),
        ("plain20", {"batch_size": 1040, "width": 16}, 2.2, 22794),
        ("resnet18_cifar", {"batch_size": 1255}, 8.2, 2368),
    ],
)
def test_peaks_at_the_largest_batches_of_home(name, changes, peak, speed):
    program = workloads.load(config(name, **changes), GPU).program
    assert round(program.peak_bytes / 2**30, 1) == peak
    program = with_roofline(program, GPU)  # the papers' figures scale it to what they measured
    assert changes["batch_size"] / (program.ideal_ns / 1e9) == pytest.approx(speed, rel=0.01)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("inception_v3", {"version": 2}, "workload.version: inception has 3 and 4, not 2"),
        ("inception_v4", {"image": 74}, "workload.image: expected an integer of at least 75, got 74"),
        ("inception_v3_cifar", {"image": 6}, "workload.image: expected an integer of at least 7, got 6"),
        ("densenet121", {"image": 7}, "workload.image: expected an integer of at least 8, got 7"),
        ("squeezenet", {"image": 7}, "workload.image: expected an integer of at least 8, got 7"),
        ("vgg16_imagenet", {"image": 31}, "workload.image: expected an integer of at least 32, got 31"),
        ("mobilenet", {"image": 0}, "workload.image: expected a positive integer"),
        ("mobilenet", {"classes": "ten"}, "workload.classes: expected a positive integer"),
        ("mobilenet", {"batch_size": 1}, "workload.batch_size: expected an integer of at least 2"),
        ("mobilenet", {"depth": 20}, "unknown key 'depth'"),
        ("plain20", {"stages": "3-0-3"}, "workload.stages: expected numbers of blocks as in '3-3-3', got '3-0-3'"),
        ("plain20", {"stages": [3, 3]}, "workload.stages"),
        ("plain20", {"residual": 1}, "workload.residual: expected true or false, got 1"),
    ],
)
def test_bad_keys(name, changes, message):
    with pytest.raises(WorkloadError, match=message):
        workloads.build(config(name, **changes))


def test_the_smallest_images_pass():
    for name, image in (("inception_v3", 75), ("inception_v3_cifar", 7), ("densenet121", 8), ("squeezenet", 8),
                        ("vgg16_imagenet", 32), ("mobilenet", 1)):  # fmt: skip
        model, _, _, (x, _) = workloads.build(config(name, image=image, batch_size=2))
        assert model(x).shape == (2, config(name)["classes"])
