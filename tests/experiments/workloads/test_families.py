"""Tests that every family builds with its configuration's keys, has its published size, and rejects invalid keys."""

from functools import partial

import pytest
import torch

from experiments import figures, workloads
from experiments.workloads import WorkloadError
from simulator import Machine
from tests.experiments.workloads.conftest import CONFIGS, SMALL, config

CIFAR = {"image": 32, "classes": 10}
IMAGENET = {"image": 224, "classes": 1000}
# Keys for small variants; image networks use the other kind of images (CIFAR-10 or ImageNet).
TINY = {
    **{name: {"batch_size": 4} for name in ("vgg11", "vgg13", "vgg16", "vgg19")},
    **{name: {"batch_size": 4} for name in ("resnet18", "resnet34", "resnet50", "resnet101")},
    **{
        name: {"batch_size": 2, "image": 96, "classes": 7}
        for name in ("inception_v3_cifar", "mobilenet", "squeezenet", "plain20", "resnet18_cifar")
    },
    **{
        name: {"batch_size": 2, "image": 32, "classes": 7}
        for name in (
            "inception_v3",
            "inception_v4",
            "densenet121",
            "vgg16_imagenet",
            "resnet50_imagenet",
            "resnet101_imagenet",
            "resnet152_imagenet",
            "mobilenet_v2",
            "regnet_x_400mf",
            "convnext_tiny",
        )
    },
    "alexnet": {"batch_size": 2},
    "bert": {"batch_size": 1, "length": 4},
    "fc_densenet": {"stages": "1-2-1", "growth": 4, "image": 16},
    "gpt2_medium": {"batch_size": 1, "length": 4},
    "gpt2_small": {"batch_size": 1, "length": 4},
    "hourglass": {"batch_size": 2, "image": 64, "width": 8},
    "kmeans": {"batch_size": 12, "dimensions": 3, "clusters": 4, "chunks": 3},
    "llama": SMALL,
    "llama3_8b": SMALL,
    "lstm": {"batch_size": 2, "hidden": 8, "length": 3, "vocabulary": 5},
    "mixtral": {**SMALL, "experts": 3},
    "mlp": {"batch_size": 2, "width": 8, "layers": 3},
    "qwen3": {**SMALL, "head_size": 6},
    "randwire": {"batch_size": 2, "image": 32, "width": 4, "nodes": 16},
    "resnet_stochastic": {"batch_size": 2, "blocks": 2},
    "transformer": {"batch_size": 1, "length": 4},
    "unet": {"batch_size": 1, "image": 188},
    "vit_l": {"batch_size": 2, "layers": 1, "image": 32},
    "yolov3": {"stages": "1-1-1-1-1", "width": 4, "image": 64},
}
# Bundled configurations: parameters, kernels, MiB at the peak.
SIZES = {
    "alexnet": (62_378_344, 157, 3_754),
    "bert": (109_514_298, 2_512, 18_084),
    "convnext_tiny": (28_589_128, 1_089, 3_584),
    "densenet121": (7_978_856, 2_557, 5_962),
    "fc_densenet": (9_322_091, 4_331, 3_630),
    "gpt2_medium": (354_823_168, 3_978, 22_707),
    "gpt2_small": (124_439_808, 2_022, 6_411),
    "hourglass": (6_570_400, 3_586, 3_169),
    "inception_v3": (23_834_568, 1_604, 4_027),
    "inception_v3_cifar": (21_806_058, 1_600, 3_769),
    "inception_v4": (42_679_816, 2_524, 6_696),
    "kmeans": (0, 170, 847),
    "llama": (307_251_200, 741, 5_580),
    "llama3_8b": (1_923_125_248, 743, 29_051),
    "lstm": (240_321, 4_011, 804),
    "mixtral": (6_067_228_672, 2_287, 48_349),
    "mlp": (62_971_914, 124, 1_153),
    "mobilenet": (3_217_226, 453, 631),
    "mobilenet_v2": (3_504_872, 879, 2_434),
    "plain20": (4_286_026, 325, 1_146),
    "qwen3": (2_016_449_536, 831, 31_618),
    "randwire": (5_847_837, 4_490, 3_813),
    "regnet_x_400mf": (5_495_976, 1_193, 817),
    "resnet101": (62_739_402, 1_972, 7_764),
    "resnet101_imagenet": (44_549_160, 1_745, 4_115),
    "resnet152_imagenet": (60_192_808, 2_595, 5_779),
    "resnet18": (11_178_762, 395, 1_396),
    "resnet18_cifar": (11_173_962, 351, 940),
    "resnet34": (21_290_634, 699, 2_660),
    "resnet50": (32_619_210, 1_003, 4_134),
    "resnet50_imagenet": (25_557_032, 895, 2_721),
    "resnet_stochastic": (1_732_010, 2_244, 885),
    "squeezenet": (734_986, 523, 619),
    "transformer": (63_084_544, 3_071, 11_473),
    "unet": (31_030_658, 260, 6_500),
    "vgg11": (9_494_794, 213, 302),
    "vgg13": (9_679_690, 255, 426),
    "vgg16": (14_991_946, 318, 506),
    "vgg16_imagenet": (138_357_544, 189, 5_426),
    "vgg19": (20_304_202, 381, 586),
    "vit_l": (304_326_632, 4_139, 54_507),
    "yolov3": (61_949_149, 1_255, 4_135),
    "opt_125m": (125_239_296, 2_687, 3_705),
    "t5_small": (60_506_624, 3_438, 3_695),
}


def test_every_configuration_is_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} - {"module", "huggingface"} == set(SIZES)
    assert set(SIZES) - {"opt_125m", "t5_small"} == set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_a_configuration_builds_with_the_keys_of_its_family(name):
    model, loss_fn, optimizer, (x, y) = workloads.build(config(name, **TINY[name]))
    result = model(x)
    loss = loss_fn(result, y)
    assert loss.shape == () and loss.device.type == "meta"
    if "classes" in TINY[name]:
        side = TINY[name]["image"]
        assert x.shape == (2, 3, side, side) and result.shape == (2, 7)
    assert (optimizer is None) == (name == "kmeans") == (not list(model.parameters()))
    half = name in ("llama3_8b", "qwen3", "mixtral", "vit_l")
    assert {p.dtype for p in model.parameters()} <= {torch.bfloat16 if half else torch.float32}
    assert config(name)["name"] == name and figures.label(name) != name


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if size[1] < 300 else pytest.mark.nightly) for n, size in SIZES.items()]
)
def test_sizes(name):
    program = workloads.load(config(name), Machine.load("h100")).program
    parameters, kernels, peak = SIZES[name]
    assert sum(p.numel() for p in workloads.build(config(name))[0].parameters()) == parameters
    assert (len(program.kernels), round(program.peak_bytes / 2**20)) == (kernels, peak)


about = partial(pytest.approx, rel=0.01)


@pytest.mark.parametrize(
    ("name", "changes", "published"),
    [
        ("densenet121", CIFAR, 6_956_298 + 128),  # kuangliu's pytorch-cifar has no batch-norm in the stem
        ("mobilenet", IMAGENET, 4_231_976),  # keras.applications, trainable
        ("squeezenet", IMAGENET, 1_248_424),  # torchvision's documentation of squeezenet1_0
        ("plain20", {"width": 16}, 269_722),  # He et al., Table 6: 0.27 M
        ("bert", {"length": 512}, 109_482_240 + 2 * 768 + 30_522),  # with a masked language model instead of the pooler
        ("gpt2_small", {"size": "large"}, 774_030_080),
        ("llama", {"layers": 22}, 1_100_048_384),  # TinyLlama 1.1B
        ("llama", {"layers": 32, "width": 4096, "kv_heads": 32, "hidden": 11008}, 6_738_415_616),  # Llama 2 7B
        ("llama3_8b", {"layers": 32}, 8_030_261_248),
        ("qwen3", {"layers": 36}, 8_190_735_360),
        ("mixtral", {"layers": 32}, 46_702_792_704),
        ("vit_l", {"size": "base"}, 86_567_656),
        ("hourglass", {"stacks": 8}, about(25.5e6)),  # Tang et al., 2018, Table 6
        ("randwire", {}, pytest.approx(5.65e6, abs=0.25e6)),  # Xie et al., Table 2: mean over graphs
        ("fc_densenet", {}, pytest.approx(9.4e6, rel=0.02)),  # Jégou et al., Table 3
        ("fc_densenet", {"stages": "5-5-5-5-5-5"}, pytest.approx(3.5e6, rel=0.02)),
        ("fc_densenet", {"stages": "4-4-4-4-4-4", "growth": 12}, pytest.approx(1.5e6, rel=0.1)),
        # With 1000 classes, as torchvision documents them.
        *[
            ("resnet50_imagenet", {"stages": stages, "halve": 3}, count)
            for stages, count in (("3-4-6-3", 25_557_032), ("3-4-23-3", 44_549_160), ("3-8-36-3", 60_192_808))
        ],
        *[
            ("mobilenet_v2", {"network": network}, count)
            for network, count in (
                ("mobilenet_v2", 3_504_872),
                ("mnasnet1_0", 4_383_312),
                ("mobilenet_v3_large", 5_483_032),
                ("mobilenet_v3_small", 2_542_856),
            )
        ],
        *[
            ("regnet_x_400mf", {"size": size}, count)
            for size, count in (("x_400mf", 5_495_976), ("y_400mf", 4_344_144))
        ],
        *[("convnext_tiny", {"size": size}, count) for size, count in (("small", 50_223_688), ("base", 88_591_464))],
        *[
            ("vgg16_imagenet", {"pooled": True, "depth": depth}, count)
            for depth, count in ((11, 132_863_336), (16, 138_357_544))
        ],
        # As the model cards state.
        *[
            ("huggingface", {"model": model}, count)
            for model, count in (
                ("gpt2", 124_439_808),
                ("distilgpt2", 81_912_576),
                ("cerebras-gpt-111m", 111_050_496),
                ("gpt-neo-125m", 125_198_592),
                ("opt-125m", 125_239_296),
                ("opt-350m", 331_196_416),
                ("t5-small", 60_506_624),
                ("t5-base", 222_903_552),
            )
        ],
    ],
)
def test_parameters_as_published(name, changes, published):
    model = workloads.build(config(name, **changes))[0]
    assert sum(p.numel() for p in model.parameters()) == published


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("inception_v3", {"version": 2}, "version"),
        ("inception_v4", {"image": 74}, "image"),
        ("mobilenet", {"image": 0}, "image"),
        ("mobilenet", {"classes": "ten"}, "classes"),
        ("mobilenet", {"batch_size": 1}, "batch_size"),
        ("mobilenet", {"depth": 20}, "'depth'"),
        ("plain20", {"stages": "3-0-3"}, "stages"),
        ("plain20", {"residual": 1}, "residual"),
        ("resnet50_imagenet", {"stages": "3-4-6"}, "stages"),
        ("unet", {"image": 571}, "image"),
        ("kmeans", {"chunks": 7}, "chunks"),
        ("resnet_stochastic", {"draw": 1.5}, "draw"),
        ("mlp", {"layers": 1}, "layers"),
        ("gpt2_small", {"size": "huge"}, "size"),
        ("gpt2_small", {"length": 1025}, "length"),
        ("llama", {"kv_heads": 5}, "kv_heads"),
        ("llama", {"dtype": "int8"}, "dtype"),
        ("qwen3", {"head_size": 7}, "head_size"),
        ("mixtral", {"top": 9}, "top"),
        ("vit_l", {"patch": 15}, "patch"),
        ("fc_densenet", {"image": 200}, "image"),
        ("yolov3", {"stages": "1-2-8-8"}, "stages"),
        ("hourglass", {"image": 100}, "image"),
        ("randwire", {"nodes": 15}, "nodes"),
        ("transformer", {"dropout": 1}, "dropout"),
        ("mobilenet_v2", {"network": "v4"}, "network"),
        ("huggingface", {"model": "gpt9"}, "model"),
        ("vgg11", {"family": "lenet"}, "family"),
        ("vgg11", {"bach_size": 4}, "'bach_size'"),
    ],
)
def test_bad_keys(name, changes, key):
    with pytest.raises(WorkloadError, match=rf"(workload\.|unknown key ){key}"):
        workloads.build(config(name, **changes))


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("inception_v3", 75),
        ("inception_v3_cifar", 7),
        ("densenet121", 8),
        ("squeezenet", 8),
        ("vgg16_imagenet", 32),
        ("mobilenet", 1),
    ],
)
def test_the_smallest_images_pass(name, image):
    model, _, _, (x, _) = workloads.build(config(name, image=image, batch_size=2))
    assert model(x).shape == (2, config(name)["classes"])
