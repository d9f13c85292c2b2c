"""Workloads: networks of the papers, and user-defined models.

A workload is a YAML file (``configs/workload/*.yaml`` or your own) with ``name``, ``family`` (default for a
``target``: ``module``), the arguments of the family's function in FAMILIES, and optionally:

- ``iteration_ms``: measured iteration times by machine name, to which kernel durations are scaled; the default is
  the roofline's durations.
- ``dtype``: float32 (default), bfloat16 or float16, for the whole step; a ``target`` keeps its own dtype.
- ``algorithms``: true adds the workspace of the fastest convolution algorithm, with the others as variants.
- ``paper_peak_mb``: the paper's peak load, for comparison.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from executor.capture.batches import arguments
from executor.capture.capture import Captured, capture, capture_step
from executor.capture.optimizers import BUCKET_BYTES
from executor.capture.recorder import watched
from experiments import defer_ctrl_c
from experiments.workloads import (
    densenet,
    huggingface,
    inception,
    llama,
    maps,
    mobile,
    module,
    others,
    randwire,
    resnet,
    transformers,
    vgg,
)
from experiments.workloads.module import (
    Parts,
    WorkloadError,
    batch_size_of,
    length_of,
    longest_of,
    with_batch,
    with_length,
)
from simulator.files import FormatError
from simulator.machine import Machine

__all__ = ["WorkloadError", "batch_of", "build", "length_of_workload", "load"]

FAMILIES: dict[str, Callable[..., Parts]] = {
    "alexnet": vgg.alexnet,
    "bert": transformers.bert,
    "convnext": resnet.convnext,
    "densenet": densenet.densenet,
    "diffusion_unet": maps.diffusion_unet,
    "fc_densenet": densenet.fc_densenet,
    "gpt2": transformers.gpt2,
    "hourglass": maps.hourglass,
    "huggingface": huggingface.huggingface,
    "inception": inception.inception,
    "inverted_residual": mobile.inverted_residual,
    "kmeans": others.kmeans,
    "llama": llama.llama,
    "lstm": others.lstm,
    "mixtral": llama.mixtral,
    "mlp": others.mlp,
    "mobilenet": mobile.mobilenet,
    "module": module.build,
    "plain": resnet.plain,
    "randwire": randwire.randwire,
    "regnet": resnet.regnet,
    "resnet": resnet.resnet,
    "resnet_imagenet": resnet.resnet_imagenet,
    "resnet_stochastic": resnet.resnet_stochastic,
    "squeezenet": mobile.squeezenet,
    "transformer": transformers.transformer,
    "unet": maps.unet,
    "vgg": vgg.vgg,
    "vgg_imagenet": vgg.vgg_imagenet,
    "vit": transformers.vit,
    "yolov3": maps.yolov3,
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    workload: Mapping[str, Any],
    machine: Machine,
    batch: int | None = None,
    as_cuda: bool = False,
    length: int | None = None,
) -> Captured:
    """Captures a workload's training step, with durations for ``machine``.

    Args:
        batch: Batch size that replaces the workload's own; durations are then the roofline's.
        length: Sequence length, likewise.
        as_cuda: As in ``capture``, with optimizer updates of several parameters in buckets, as ``fit`` captures them.
            Otherwise gradients of bundled networks live until the next step.

    Returns:
        The captured step.

    Raises:
        WorkloadError: The configuration is invalid.
        CaptureError: The model cannot be traced.
        FormatError: The machine has no FLOP rate for the dtype.
    """
    parts = build(workload)
    if batch is not None:
        parts = with_batch(parts, batch) if _is_custom(workload) else build({**workload, "batch_size": batch})
    if length is not None:
        parts = with_length(parts, length) if _is_custom(workload) else build({**workload, "length": length})
    iteration_ms = workload.get("iteration_ms") or {}
    measured = iteration_ms.get(machine.name) if isinstance(iteration_ms, Mapping) else iteration_ms
    if measured is not None and (isinstance(measured, bool) or not isinstance(measured, (int, float)) or measured <= 0):
        raise WorkloadError(f"workload.iteration_ms: expected positive numbers by machine, got {iteration_ms!r}")
    algorithms = workload.get("algorithms", False)
    if not isinstance(algorithms, bool):
        raise WorkloadError(f"workload.algorithms: expected true or false, got {algorithms!r}")
    if (dtype := workload.get("dtype", "float32")) not in machine.flops_per_s and dtype in _DTYPES:
        raise FormatError(
            f"machine.flops_per_s: {machine.name} has no figure for {dtype}; choose another workload.dtype"
        )
    name = str(workload.get("name") or (type(parts[0]).__name__ if _is_custom(workload) else _family(workload)))
    buckets = BUCKET_BYTES if as_cuda else None
    # Benchmark tasks pin the programs of bundled networks, whose gradients live until the next step as in the papers.
    keep_grads = not (as_cuda or _is_custom(workload))
    # The program is planned, not trained.
    options = {"as_cuda": as_cuda, "bucket_bytes": buckets, "keep_grads": keep_grads, "check": False}
    # An interrupt within PyTorch's C++ may abort the process, but not between two operators.
    with defer_ctrl_c() as check_ctrl_c, watched(lambda _: check_ctrl_c()):
        if len(parts) == 2:
            captured = capture_step(parts[0], *arguments(parts[1]), machine=machine, name=name, **options)
        else:
            captured = capture(*parts, machine=machine, name=name, **options)
    is_other = batch is not None or length is not None
    iteration_ns = None if measured is None or is_other else round(measured * 1e6)
    return captured.on(machine, iteration_ns, algorithms)


def build(workload: Mapping[str, Any]) -> Parts:
    """Returns model, loss function, optimizer and example batch of a workload.

    Bundled networks are built on the meta device.

    Raises:
        WorkloadError: The configuration is invalid.
    """
    make = _maker(workload)
    parameters = inspect.signature(make).parameters
    other_keys = ("name", "family", "iteration_ms", "paper_peak_mb", "algorithms", "dtype")
    settings = {str(key): value for key, value in workload.items() if key not in other_keys}
    for key, value in settings.items():
        if key not in parameters:
            raise WorkloadError(f"workload: unknown key {key!r}; {_family(workload)} has {', '.join(parameters)}")
        # Integer arguments are counts; families check further constraints.
        if parameters[key].annotation == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise WorkloadError(f"workload.{key}: expected a positive integer, got {value!r}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in settings:
            raise WorkloadError(f"workload.{key}: missing; {_family(workload)} needs {', '.join(parameters)}")
    dtype = workload.get("dtype", "float32")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise WorkloadError(f"workload.dtype: expected {', '.join(_DTYPES)}, got {dtype!r}")
    with torch.device("cpu" if _is_custom(workload) else "meta"):
        parts = make(**settings)
    if dtype == "float32":
        return parts
    if len(parts) == 2:
        raise WorkloadError(f"workload.dtype: a user-defined step keeps its own dtype; remove this key ({dtype})")
    model, loss_fn, optimizer, batch = parts
    kind = _DTYPES[dtype]
    narrow = tree_map_only(Tensor, lambda x: x.to(kind) if x.is_floating_point() else x, batch)
    return model.to(kind), loss_fn, optimizer, narrow


def batch_of(workload: Mapping[str, Any], parts: Parts) -> int:
    """Returns the batch size of a workload's example batch.

    Raises:
        WorkloadError: The tensors of a user-defined batch do not share a first dimension.
    """
    if _is_custom(workload):
        return batch_size_of(parts)
    default = inspect.signature(_maker(workload)).parameters["batch_size"].default
    return int(workload.get("batch_size", default))


def length_of_workload(workload: Mapping[str, Any], parts: Parts) -> tuple[int, int | None]:
    """Returns the sequence length of a workload's example batch, and the longest that its model has positions for.

    Raises:
        WorkloadError: The batch has no sequences of one length.
    """
    if _is_custom(workload):
        return length_of(parts), longest_of(parts)
    parameter = inspect.signature(_maker(workload)).parameters.get("length")
    if parameter is None:
        raise WorkloadError(f"{_family(workload)} has no sequence length: choose a transformer")
    length = int(workload.get("length", parameter.default))
    # A table of positions that is as long as the sequences is built with them.
    longest = longest_of(parts)
    return length, None if longest is None or longest_of(
        build({**workload, "length": length // 2})
    ) != longest else longest


def _is_custom(workload: Mapping[str, Any]) -> bool:
    """Returns whether the workload is a user-defined model."""
    return _family(workload) == "module"


def _family(workload: Mapping[str, Any]) -> Any:
    return workload.get("family", "module" if "target" in workload else None)


def _maker(workload: Mapping[str, Any]) -> Callable[..., Parts]:
    family = _family(workload)
    if family not in FAMILIES:
        raise WorkloadError(f"workload.family: expected {', '.join(FAMILIES)}, got {family!r}")
    return FAMILIES[family]
