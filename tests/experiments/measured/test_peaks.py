"""Published peaks: the points, what is refused, and ours beside one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import workloads
from experiments.measured import peaks
from simulator.files import FormatError


def test_the_points() -> None:
    found = peaks.points()
    assert len(found) == 22 and sum(not p.fits for p in found) == 5
    assert {p.zero_grad for p in found} == {"start", "backward"}
    assert {p.network for p in found} <= set(peaks.NETWORKS)
    first = found[0]
    assert (first.network, first.batch, first.gpu, first.memory_bytes) == ("ConvNeXtBase", 209, "RTX 4060", 8318222336)
    assert first.estimates["llmem"] is None and first.verdicts["xmem"] is True


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("RTX 4060", "RTX 9", "line 2: gpu is none of RTX 3060, RTX 4060, A100: 'RTX 9'"),
        (",209,", ",0,", "line 2: batch is out of range: 0"),
        (",209,", ",many,", "line 2: batch is no number of at least 0: 'many'"),
        (",Adam,", ",_multi_tensor,", "line 2: optimizer is none of torch.optim: '_multi_tensor'"),
        ("7809794048", "-1", "line 2: ground_bytes is no number of at least 0: '-1'"),
        ("ConvNeXtBase,Adam", ",Adam", "line 2: model is missing"),
        ("zero_grad_mode", "mode", "line 2: zero_grad_mode is no number of at least 0: None"),
    ],
)
def test_what_is_no_point_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "points.csv"
    text = (peaks.DATA / "xmem_points.csv").read_text()
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(FormatError) as caught:
        peaks.points(path)
    assert said in str(caught.value)


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        peaks.points(tmp_path / "none.csv")


def test_ours_beside_the_measured_and_the_means() -> None:
    (point,) = (p for p in peaks.points() if (p.network, p.optimizer) == ("MobileNetV2", "SGD"))
    (row,) = peaks.rows([point])
    assert row["ours_bytes"] == sum(row[part] for part in ("tensors", "loop", "workspaces", "allocator"))
    assert abs(row["error"]) < 0.03 and row["ours_fits"] and row["fits"]
    lost = {**row, "fits": False, "error": None, "xmem_error": None}
    found = peaks.means([row, lost])
    assert found["ours"] == {"error": abs(row["error"]), "of": 1, "wrong": 1, "verdicts": 2}
    assert found["llmem"]["of"] == 0 and found["llmem"]["error"] is None


# Parameters with 1000 classes as torchvision's pages have them, and as the models' own pages say.
COUNTS = [
    ({"family": "convnext", "size": "tiny"}, 28_589_128), ({"family": "convnext", "size": "small"}, 50_223_688),
    ({"family": "convnext", "size": "base"}, 88_591_464),
    ({"family": "inverted_residual", "network": "mobilenet_v2"}, 3_504_872),
    ({"family": "inverted_residual", "network": "mnasnet1_0"}, 4_383_312),
    ({"family": "inverted_residual", "network": "mobilenet_v3_large"}, 5_483_032),
    ({"family": "inverted_residual", "network": "mobilenet_v3_small"}, 2_542_856),
    ({"family": "regnet", "size": "x_400mf"}, 5_495_976), ({"family": "regnet", "size": "y_400mf"}, 4_344_144),
    ({"family": "resnet_imagenet", "stages": "3-4-6-3", "halve": 3}, 25_557_032),
    ({"family": "resnet_imagenet", "stages": "3-4-23-3", "halve": 3}, 44_549_160),
    ({"family": "resnet_imagenet", "stages": "3-8-36-3", "halve": 3}, 60_192_808),
    ({"family": "vgg_imagenet", "pooled": True, "depth": 11}, 132_863_336),
    ({"family": "vgg_imagenet", "pooled": True, "depth": 16}, 138_357_544),
]  # fmt: skip
MODELS = {"gpt2": 124_439_808, "distilgpt2": 81_912_576, "cerebras-gpt-111m": 111_050_496, "gpt-neo-125m": 125_198_592,
          "opt-125m": 125_239_296, "opt-350m": 331_196_416, "t5-small": 60_506_624, "t5-base": 222_903_552}  # fmt: skip


@pytest.mark.parametrize(("workload", "count"), COUNTS)
def test_networks_have_torchvisions_parameters(workload: dict[str, object], count: int) -> None:
    model, _, _, (x, _) = workloads.build({**workload, "batch_size": 2, "image": 86})
    assert sum(p.numel() for p in model.parameters()) == count
    assert tuple(model(x).shape) == (2, 1000)


@pytest.mark.parametrize("name", list(MODELS))
def test_language_models_have_their_parameters(name: str) -> None:
    model, *_ = workloads.build({"family": "huggingface", "model": name, "batch_size": 2})
    assert sum(p.numel() for p in model.parameters()) == MODELS[name]


def test_unknown_networks_are_refused() -> None:
    for workload in ({"family": "convnext", "size": "huge"}, {"family": "inverted_residual", "network": "v4"},
                     {"family": "regnet", "size": "z"}, {"family": "huggingface", "model": "gpt9"},
                     {"family": "vgg_imagenet", "depth": 12}):  # fmt: skip
        with pytest.raises(workloads.WorkloadError, match="has "):
            workloads.build(workload)
