"""Every family: it builds with the keys of its configuration, is as large as published, and refuses wrong keys."""

from functools import partial

import pytest
import torch

from experiments import figures, workloads
from experiments.workloads import WorkloadError
from tests.experiments.workloads.conftest import CONFIGS, config

CIFAR, IMAGENET = {"image": 32, "classes": 10}, {"image": 224, "classes": 1000}
SMALL = {"batch_size": 1, "layers": 1, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 24, "vocabulary": 32,
         "length": 4}  # fmt: skip
# Keys with which they are small; of networks of images, those of the other kind (CIFAR-10's, ImageNet's).
TINY = {
    **{name: {"batch_size": 4} for name in ("vgg11", "vgg13", "vgg16", "vgg19")},
    **{name: {"batch_size": 4} for name in ("resnet18", "resnet34", "resnet50", "resnet101")},
    **{name: {"batch_size": 2, "image": 96, "classes": 7} for name in (
        "inception_v3_cifar", "mobilenet", "squeezenet", "plain20", "resnet18_cifar")},
    **{name: {"batch_size": 2, "image": 32, "classes": 7} for name in (
        "inception_v3", "inception_v4", "densenet121", "vgg16_imagenet", "resnet50_imagenet", "resnet101_imagenet",
        "resnet152_imagenet", "mobilenet_v2", "regnet_x_400mf", "convnext_tiny")},
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
}  # fmt: skip
NO_FIGURE = ("mobilenet_v2", "regnet_x_400mf", "convnext_tiny")


def test_every_configuration_is_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*TINY, "module", "huggingface"}


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
    assert config(name)["name"] == name and (figures.label(name) != name or name in NO_FIGURE)


about = partial(pytest.approx, rel=0.01)
# 3 · 9 · 16 weights in the stem; 36 convolutions a stage, the first from fewer channels; a bias and two numbers of
# batch-norm per channel; 65 · 10 at the end. He et al. (2016), Table 6, say 1.7 million.
RESNET110 = 432 + 36 * 9 * 16 * 16 + sum(35 * 9 * w * w + 9 * w * w // 2 for w in (32, 64)) + 3 * (16 + 36 * 112) + 650


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
        ("llama", {"layers": 22}, 1_100_048_384),  # TinyLlama 1.1B
        ("llama", {"layers": 32, "width": 4096, "kv_heads": 32, "hidden": 11008}, 6_738_415_616),  # Llama 2 7B
        ("llama3_8b", {"layers": 32}, 8_030_261_248),
        ("qwen3", {"layers": 36}, 8_190_735_360),
        ("mixtral", {"layers": 32}, 46_702_792_704),
        ("vit_l", {}, 304_326_632),  # as torchvision's; Table 1's 307M have more classes
        ("vit_l", {"size": "base"}, 86_567_656),
        ("resnet_stochastic", {}, RESNET110),
        # Tang et al. ("Quantized densely connected U-Nets", ECCV 2018, Table 6).
        ("hourglass", {"stacks": 8}, about(25.5e6)),
        ("randwire", {}, pytest.approx(5.65e6, abs=0.25e6)),  # Xie et al., Table 2: 5.6 ± 0.1, the mean of graphs
        # Jégou et al., Table 3: 1.5, 3.5 and 9.4 million.
        ("fc_densenet", {}, pytest.approx(9.4e6, rel=0.02)),
        ("fc_densenet", {"stages": "5-5-5-5-5-5"}, pytest.approx(3.5e6, rel=0.02)),
        ("fc_densenet", {"stages": "4-4-4-4-4-4", "growth": 12}, pytest.approx(1.5e6, rel=0.1)),
        ("yolov3", {}, 61_949_149),
        # With 1000 classes as torchvision's pages have them.
        *[("resnet50_imagenet", {"stages": stages, "halve": 3}, count) for stages, count in (
            ("3-4-6-3", 25_557_032), ("3-4-23-3", 44_549_160), ("3-8-36-3", 60_192_808))],
        *[("mobilenet_v2", {"network": network}, count) for network, count in (
            ("mobilenet_v2", 3_504_872), ("mnasnet1_0", 4_383_312), ("mobilenet_v3_large", 5_483_032),
            ("mobilenet_v3_small", 2_542_856))],
        *[("regnet_x_400mf", {"size": size}, count) for size, count in (
            ("x_400mf", 5_495_976), ("y_400mf", 4_344_144))],
        *[("convnext_tiny", {"size": size}, count) for size, count in (
            ("tiny", 28_589_128), ("small", 50_223_688), ("base", 88_591_464))],
        *[("vgg16_imagenet", {"pooled": True, "depth": depth}, count) for depth, count in (
            (11, 132_863_336), (16, 138_357_544))],
        # As the models' own pages say.
        *[("huggingface", {"model": model}, count) for model, count in (
            ("gpt2", 124_439_808), ("distilgpt2", 81_912_576), ("cerebras-gpt-111m", 111_050_496),
            ("gpt-neo-125m", 125_198_592), ("opt-125m", 125_239_296), ("opt-350m", 331_196_416),
            ("t5-small", 60_506_624), ("t5-base", 222_903_552))],
    ],
)  # fmt: skip
def test_parameters_as_published(name, changes, published):
    model = workloads.build(config(name, **changes))[0]
    assert sum(p.numel() for p in model.parameters()) == published


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
        ("llama", {"heads": 3}, "workload.heads"),
        ("llama", {"kv_heads": 5}, r"workload.kv_heads: expected a divisor of heads \(32\), got 5"),
        ("llama", {"tied": True}, "unknown key 'tied'; llama has layers"),
        ("llama", {"dtype": "int8"}, "workload.dtype: expected float32, bfloat16, float16, got 'int8'"),
        ("qwen3", {"head_size": 7}, "workload.head_size: expected an even integer, got 7"),
        ("qwen3", {"rope_base": 0}, "workload.rope_base: expected a number above 0, got 0"),
        ("qwen3", {"qk_norm": 1}, "workload.qk_norm: expected true or false, got 1"),
        ("mixtral", {"top": 9}, r"workload.top: expected at most the number of experts \(8\), got 9"),
        ("mixtral", {"capacity": 0}, "workload.capacity: expected a number above 0, got 0"),
        ("vit_l", {"size": "tiny"}, "workload.size: vit has base, large, huge, not 'tiny'"),
        ("vit_l", {"patch": 15}, r"workload.patch: expected a divisor of image \(224\), got 15"),
        ("vit_l", {"layers": 0}, "workload.layers: expected a positive integer, got 0"),
        ("vit_l", {"dropout": 1}, r"workload.dropout: expected a number in \[0, 1\), got 1"),
        ("fc_densenet", {"stages": "4"}, "workload.stages"),
        ("fc_densenet", {"image": 200}, "workload.image: expected a multiple of 32"),
        ("yolov3", {"stages": "1-2-8-8"}, "workload.stages"),
        ("yolov3", {"image": 400}, "workload.image: expected a multiple of 32"),
        ("hourglass", {"image": 100}, "workload.image: expected a multiple of 64 with 4 levels, got 100"),
        ("hourglass", {"width": 6}, "workload.width: expected a multiple of 4, got 6"),
        ("randwire", {"nodes": 15}, "workload.nodes: expected at least 16, got 15"),
        ("randwire", {"width": 1}, "workload.width: expected at least 2, got 1"),
        ("bert", {"heads": 5}, r"workload.heads: expected a divisor of width \(768\), got 5"),
        ("transformer", {"dropout": 1}, r"workload.dropout: expected a number in \[0, 1\), got 1"),
        ("vgg11", {"depth": 12}, "workload.depth: vgg has 11, 13, 16, 19, not 12"),
        ("vgg16_imagenet", {"depth": 12}, "workload.depth: vgg_imagenet has 11, 13, 16, 19, not 12"),
        ("convnext_tiny", {"size": "huge"}, "workload.size: convnext has tiny, small, base, not 'huge'"),
        ("mobilenet_v2", {"network": "v4"}, "workload.network: inverted_residual has mobilenet_v2, "),
        ("regnet_x_400mf", {"size": "z"}, "workload.size: regnet has x_400mf, y_400mf, not 'z'"),
        ("huggingface", {"model": "gpt9"}, "workload.model: huggingface has gpt2, "),
        ("vgg11", {"family": "lenet"}, "workload.family: expected alexnet, bert, convnext, "),
        ("vgg11", {"batch_size": 0}, "workload.batch_size"),
        ("vgg11", {"bach_size": 4}, "unknown key 'bach_size'"),
    ],
)
def test_bad_keys(name, changes, message):
    with pytest.raises(WorkloadError, match=message):
        workloads.build(config(name, **changes))


@pytest.mark.parametrize(
    ("name", "image"),
    [("inception_v3", 75), ("inception_v3_cifar", 7), ("densenet121", 8), ("squeezenet", 8), ("vgg16_imagenet", 32),
     ("mobilenet", 1)],
)  # fmt: skip
def test_the_smallest_images_pass(name, image):
    model, _, _, (x, _) = workloads.build(config(name, image=image, batch_size=2))
    assert model(x).shape == (2, config(name)["classes"])
