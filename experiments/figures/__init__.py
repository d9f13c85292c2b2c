"""Figures and tables of the papers, one module each (see README.md), and their shared functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import yaml
from omegaconf import DictConfig

import agents
from experiments.common import cli
from experiments.common.bisection import bisect
from experiments.common.report import Row
from simulator import Plan, simulate
from simulator.machine import Machine
from simulator.pool import Intervals, Packing, run
from simulator.pool.intervals import overlap
from simulator.program import Program

WORKLOADS = cli.CONFIGS / "workload"


def networks(settings: DictConfig, among: Collection[str] = ()) -> list[str]:
    """Returns the shipped workloads in ``settings.networks``.

    Raises:
        UsageError: A workload is unknown, or not ``among`` the paper's networks.
    """
    found = [network(str(name), "networks") for name in cli.values(settings, "networks")]
    for name in found:
        if among and name not in among:
            raise cli.UsageError(f"figure.networks: {name!r} is not in the table ({', '.join(among)})")
    return found


def numbers(
    settings: DictConfig, key: str, fits: Callable[[Any], bool], expected: str, kind: Any = (int, float)
) -> list[Any]:
    """Returns the list of numbers ``settings.key``.

    Args:
        fits: Whether a value is valid.
        expected: Description of valid values for the error message.
        kind: Accepted types; booleans are always rejected.

    Raises:
        UsageError: An entry has another type, or does not fit.
    """
    values = cli.values(settings, key)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
            raise cli.UsageError(f"figure.{key}: expected {expected}, got {value!r}")
    return values


def integers(settings: DictConfig, key: str, least: int) -> list[int]:
    """Returns the list ``settings.key`` of integers; raises UsageError if one is below ``least``."""
    return numbers(settings, key, lambda value: value >= least, f"integers of at least {least}", int)


def chosen(settings: DictConfig, key: str, among: Collection[str], what: str = "") -> list[str]:
    """Returns the names in the list ``settings.key``.

    Args:
        among: Valid names.
        what: Kind of name for the error message, such as "network ".

    Raises:
        UsageError: A name is not ``among`` the valid ones; the message suggests the nearest.
    """
    found = [str(name) for name in cli.values(settings, key)]
    for name in found:
        if name not in among:
            raise cli.UsageError(f"figure.{key}: unknown {what}{name!r}{cli.nearest(name, set(among))}")
    return found


def batch_sizes(settings: DictConfig, least: int) -> dict[str, int]:
    """Returns the batch sizes by workload; raises UsageError if one is no integer of at least ``least``."""
    batches: dict[str, int] = cli.plain(settings.batches)
    for name, batch in batches.items():
        network(name, "batches")
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < least:
            raise cli.UsageError(f"figure.batches.{name}: expected an integer of at least {least}, got {batch!r}")
    return batches


def share_of_peak(limit: Any, key: str = "limit") -> Any:
    """Returns the limit; raises UsageError unless it is above 0 and at most 1."""
    if not 0 < limit <= 1:
        raise cli.UsageError(f"figure.{key}: expected a share of the peak, got {limit!r}")
    return limit


def grouped(rows: Iterable[Row], key: str = "network") -> dict[Any, list[Row]]:
    """Groups rows by an entry, in the order in which its values appear."""
    out: dict[Any, list[Row]] = {}
    for row in rows:
        out.setdefault(row[key], []).append(row)
    return out


def attempt(planner: agents.Planner, program: Program, machine: Machine, limit: int) -> Plan | None:
    """Returns a planner's plan, or None if it finds none."""
    try:
        return planner.plan(program, machine, limit)
    except agents.Infeasible:
        return None


def least_limit(planner: agents.Planner, program: Program, machine: Machine, within: int) -> int:
    """Returns the smallest limit for which the planner finds a plan, to within ``within`` bytes (bisection)."""
    has_plan = partial(attempt, planner, program, machine)
    return bisect(lambda limit: has_plan(limit) is not None, 0, program.peak_bytes, within)[1]


def network(name: str, key: str) -> str:
    """Returns the name of a shipped workload; raises UsageError, naming the ``key``, if it is unknown."""
    known = {path.stem for path in WORKLOADS.glob("*.yaml") if "batch_size" in workload(path.stem)}
    if name not in known:
        raise cli.UsageError(f"figure.{key}: unknown workload {name!r}{cli.nearest(name, known)}")
    return name


def workload(name: str) -> dict[str, Any]:
    """Returns the configuration of a workload."""
    return yaml.safe_load((WORKLOADS / f"{name}.yaml").read_text())


def program(name: str, machine: Machine, **changes: Any) -> Program:
    """Returns a workload's program with changed configuration keys; raises WorkloadError for an invalid key."""
    from experiments import workloads  # only captures need PyTorch

    return workloads.load({**workload(name), **changes}, machine).program


def planned(program: Program, machine: Machine, limit: int, name: str, **options: Any) -> dict[str, Any]:
    """Runs a planner and simulates its plan.

    Args:
        limit: Memory limit in bytes.
        options: Options of ``agents.make``.

    Returns:
        Overhead in per cent (None without a plan), planning time in s, and simulator calls.

    Raises:
        ValueError: As for ``agents.make``.
    """
    planner = agents.make(name, **options)
    begin = time.perf_counter()
    plan = attempt(planner, program, machine, limit)
    seconds = round(time.perf_counter() - begin, 3)
    over = None if plan is None else round(100 * simulate(program, plan, machine, limit).overhead, 4)
    return {"overhead_percent": over, "plan_s": seconds, "simulator_calls": planner.simulator_calls}


_LABELS = {"unet": "U-Net", "lstm": "LSTM", "kmeans": "K-means", "resnet_stochastic": "ResNet110, stochastic depth",
           "mlp": "MLP", "gpt2_small": "GPT-2 small", "gpt2_medium": "GPT-2 medium", "llama": "Llama",
           "llama3_8b": "Llama 3 8B", "qwen3": "Qwen3 8B", "mixtral": "Mixtral 8x7B", "vit_l": "ViT-L/16",
           "hourglass": "Stacked hourglass", "randwire": "RandWire", "bert": "BERT", "transformer": "Transformer",
           "fc_densenet": "FC-DenseNet", "yolov3": "YOLOv3",
           "inception_v3": "Inception V3", "inception_v3_cifar": "Inception V3", "inception_v4": "Inception V4",
           "densenet121": "DenseNet121", "mobilenet": "MobileNet", "squeezenet": "SqueezeNet", "plain20": "Plain20",
           "resnet18_cifar": "ResNet18", "vgg16_imagenet": "VGG16", "resnet50_imagenet": "ResNet50",
           "resnet101_imagenet": "ResNet101", "resnet152_imagenet": "ResNet152", "alexnet": "AlexNet",
           "opt_125m": "OPT-125M", "t5_small": "T5-small", "convnext_tiny": "ConvNeXt-T",
           "mobilenet_v2": "MobileNetV2", "regnet_x_400mf": "RegNetX-400MF"}  # fmt: skip


def label(network: str) -> str:
    """Returns a network's display name."""
    return _LABELS.get(network) or network.replace("resnet", "ResNet").replace("vgg", "VGG")


def measured_ms(config: Mapping[str, Any], machine: Machine) -> float | None:
    """Returns a workload's measured iteration time on a machine, or None."""
    times: Mapping[str, float] = config.get("iteration_ms") or {}
    return times.get(machine.name)


def packed(name: str, intervals: Intervals, alignment: int = 1, seconds: float = 5.0) -> Packing:
    """Returns an allocator's packing, checked for overlaps.

    Args:
        name: Allocator of simulator.pool.
        alignment: Alignment of addresses in bytes.
        seconds: Time limit of the search.

    Raises:
        AssertionError: Two blocks share a byte at some time.
    """
    blocks, packing = run(name, intervals, alignment, seconds)
    if pair := overlap(blocks, packing.offsets):
        raise AssertionError(f"{name}: blocks {pair[0]} and {pair[1]} share a byte")
    return packing
