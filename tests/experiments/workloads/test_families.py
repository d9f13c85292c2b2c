"""Tests that every family builds with its configuration's keys, has its published size, and rejects invalid keys."""

from pathlib import Path

import pytest
import torch
import yaml

from experiments import figures, workloads
from experiments.workloads import WorkloadError
from simulator import Machine
from tests.experiments.workloads.conftest import CONFIGS, config

CASES = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())
SIZES: dict[str, tuple[int, int, int]] = CASES["sizes"]
TINY = CASES["tiny"]


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


@pytest.mark.parametrize("case", CASES["published"], ids=str)
def test_parameters_as_published(case):
    name, changes, published, *tolerance = case
    model = workloads.build(config(name, **changes))[0]
    found = sum(p.numel() for p in model.parameters())
    assert abs(found - published) <= sum(tolerance)


@pytest.mark.parametrize(("name", "changes", "key"), CASES["bad"])
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
