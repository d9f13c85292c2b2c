"""Compares published peak memory of training on real GPUs with our predictions and four other estimators.

The data points are xMem's (tests/data/measured/README.md): NVML's peak during the run minus its value before the run.
This includes the CUDA context, so ours predicts PyTorch's reserved memory. Runs that did not fit have no peak, only a
verdict.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from executor.capture.capture import capture
from executor.device_memory import Loop, ZeroGrad, card_peak
from experiments import workloads
from experiments.measure.published.steps import DATA, read_csv
from simulator.machine import Machine
from simulator.pool.device_memory import DevicePeak

ESTIMATORS = ("xmem", "dnnmem", "schedtune", "llmem")

# Network name in the data -> workload; xMem's MobileNetV3 and MnasNet have 10 classes, its other networks 1000.
NETWORKS: dict[str, dict[str, Any]] = {
    "ConvNeXtBase": {"family": "convnext", "size": "base"},
    "ConvNeXtTiny": {"family": "convnext", "size": "tiny"},
    "MnasNet": {"family": "inverted_residual", "network": "mnasnet1_0", "classes": 10},
    "MobeNetV3Large": {"family": "inverted_residual", "network": "mobilenet_v3_large", "classes": 10},
    "MobeNetV3Small": {"family": "inverted_residual", "network": "mobilenet_v3_small", "classes": 10},
    "MobileNetV2": {"family": "inverted_residual", "network": "mobilenet_v2"},
    "RegNetX400MF": {"family": "regnet", "size": "x_400mf"},
    "RegNetY400MF": {"family": "regnet", "size": "y_400mf"},
    **{
        f"ResNet{depth}": {"family": "resnet_imagenet", "stages": stages, "halve": 3}
        for depth, stages in ((50, "3-4-6-3"), (101, "3-4-23-3"), (152, "3-8-36-3"))
    },
    **{f"VGG{depth}": {"family": "vgg_imagenet", "pooled": True, "depth": depth} for depth in (11, 13, 16, 19)},
    **{
        name: {"family": "huggingface", "model": name.rpartition("/")[2].lower()}
        for name in (
            "EleutherAI/gpt-neo-125M",
            "T5-small",
            "t5-base",
            "cerebras/Cerebras-GPT-111M",
            "distilbert/distilgpt2",
            "facebook/opt-125m",
            "facebook/opt-350m",
            "openai-community/gpt2",
        )
    },
}


class Point(NamedTuple):
    """A measured training run.

    Attributes:
        memory_bytes: memory of the GPU.
        measured_bytes: NVML's peak, or the memory reached by a run that did not fit.
        fits: whether the run completed.
        zero_grad: zero_grad() at the start of an iteration, or before backward().
        estimates: estimated bytes by estimator; None: no estimate for this network.
        verdicts: predicted ``fits`` by estimator; None: no verdict.
    """

    network: str
    optimizer: str
    batch: int
    gpu: str
    memory_bytes: int
    measured_bytes: int
    fits: bool
    zero_grad: ZeroGrad
    estimates: dict[str, int | None]
    verdicts: dict[str, bool | None]


def points() -> list[Point]:
    """Returns the published runs."""
    return read_csv(DATA / "xmem_points.csv", _point)


def _point(row: dict[str, str]) -> Point:
    def number(key: str) -> int | None:
        return int(row[key]) if row[key] else None

    ooms = {name: number(f"{name}_oom") for name in ESTIMATORS}
    return Point(
        row["model"],
        row["optimizer"],
        int(row["batch"]),
        row["gpu"],
        int(row["gpu_bytes"]),
        int(row["ground_bytes"]),
        not number("real_oom"),
        "backward" if number("zero_grad_mode") else "start",
        {name: number(f"{name}_bytes") for name in ESTIMATORS},
        {name: None if oom is None else not oom for name, oom in ooms.items()},
    )


def predicted(point: Point) -> DevicePeak:
    """Predicts a run's peak memory and whether it fits."""
    workload = NETWORKS[point.network]
    # Sequence length in tokens (wikitext-2), or image size in pixels (CIFAR-10).
    size = {"length": 128} if workload["family"] == "huggingface" else {"image": 86}
    model, loss, _, batch = workloads.build({**workload, **size, "batch_size": point.batch})
    optimizer = getattr(torch.optim, point.optimizer)(model.parameters(), lr=1e-3)
    machine = Machine.load({"RTX 3060": "rtx3060", "RTX 4060": "rtx4060", "A100": "a100_40gb"}[point.gpu])
    captured = capture(model, loss, optimizer, batch, machine=machine, name=point.network, as_cuda=True)
    return card_peak(captured, machine, Loop(point.zero_grad, iterations=4), point.memory_bytes)


def row(point: Point) -> dict[str, Any]:
    """Returns a run's measurement, our prediction by parts and the estimators' predictions.

    A run that did not fit has no prediction errors.
    """
    ours = predicted(point)
    return {
        **dict(zip(Point._fields[:7], point[:7], strict=True)),
        "ours_bytes": ours.reserved,
        "tensors": ours.tensors,
        "loop": ours.loop,
        "workspaces": ours.workspaces,
        "allocator": ours.allocator,
        "context": ours.context,
        "ours_fits": ours.fits,
        "error": _error(ours.reserved, point),
        **{f"{e}_bytes": point.estimates[e] for e in ESTIMATORS},
        **{f"{e}_fits": point.verdicts[e] for e in ESTIMATORS},
        **{f"{e}_error": _error(point.estimates[e], point) for e in ESTIMATORS},
    }


def _error(nbytes: int | None, point: Point) -> float | None:
    return nbytes / point.measured_bytes - 1 if nbytes is not None and point.fits else None


def means(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns statistics per estimator, ours first.

    Returns:
        Per estimator, its mean absolute relative error ("error"), the number of errors ("of"), the number of wrong
        verdicts ("wrong") and the number of verdicts ("verdicts").
    """
    out = {}
    for name in ("ours", *ESTIMATORS):
        key = "error" if name == "ours" else f"{name}_error"
        errors = [abs(row[key]) for row in rows if row[key] is not None]
        judged = [row for row in rows if row[f"{name}_fits"] is not None]
        wrong = sum(row[f"{name}_fits"] != row["fits"] for row in judged)
        out[name] = {
            "error": sum(errors) / len(errors) if errors else None,
            "of": len(errors),
            "wrong": wrong,
            "verdicts": len(judged),
        }
    return out
