"""Settings of experiments.validate_gpu: ``key=value`` words, without Hydra, which a GPU machine may not have."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import agents
from executor.capture.profile import Cache
from executor.replay.replay import Kernels
from experiments.validate_gpu.networks import NETWORKS

COMPARING = 3600.0  # seconds; torch.compile takes most of them


class UsageError(ValueError):
    """A setting is wrong; the message is one sentence."""


@dataclass(frozen=True)
class Settings:
    """What a run does; each field is a key of the command line, lists with commas.

    Attributes:
        backend: "cuda"; or "host", which does the same in small without a GPU.
        out: folder of the results; by default runs/validate_gpu-<time>.
        machine: preset that gives what calibration does not measure.
        workloads: of experiments.validate_gpu.networks.
        limits: fractions of the activation peak.
        cache: of the profiles, as executor.capture.profile.measure; where a step does not fit, "cold".
        planners: which plan and replay.
        train: whose plans are trained under.
        graph: of these, whose are also trained under as a CUDA graph.
        kernels: of replays: "spin", or "stream", which move their bytes, too.
        pause_ns: of replays: pauses that they make up for.
        steps: measured training steps, in turns with as many eager ones.
        seconds: for everything; COMPARING with ``compare``.
        workers: processes that plan, at least 1.
        compare: also run pytorch_baselines.py.
        largest: also search the largest batches (largest_batch.py).
        largest_seconds: a time of its own for that, after ``seconds``.
    """

    backend: str = "cuda"
    out: str = ""
    machine: str = "h200"
    workloads: tuple[str, ...] = ("vgg16", "resnet50_imagenet_bf16", "gpt2_medium_bf16", "llama_bf16",
                                  "resnet50_imagenet")  # fmt: skip
    limits: tuple[float, ...] = (0.7, 0.5, 0.35)
    cache: str = "step"
    planners: tuple[str, ...] = tuple(agents.untrained())
    train: tuple[str, ...] = ("autoswap_swdoa", "superneurons", "capuchin", "lp_round")
    graph: tuple[str, ...] = ("capuchin", "lp_round")
    kernels: str = "spin"
    pause_ns: int = 0
    steps: int = 20
    seconds: float = 1500.0
    workers: int = 14
    compare: bool = False
    largest: bool = False
    largest_seconds: float = 900.0

    @property
    def device(self) -> str:
        """PyTorch's name of the device."""
        return "cuda" if self.backend == "cuda" else "cpu"


ON_HOST = Settings("host", machine="", workloads=("tiny_resnet", "tiny_gpt2"), limits=(0.7,), cache="hot", steps=2,
                   seconds=40.0, workers=2, largest_seconds=60.0)  # fmt: skip


def parse(words: Sequence[str]) -> Settings:
    """Settings from ``key=value`` words.

    Raises:
        UsageError: naming the word.
    """
    given: dict[str, str] = {}
    kinds = {f.name: str(f.type) for f in fields(Settings)}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1, cutoff=0.0)[0]
            raise UsageError(f"{word!r}: expected key=value; the nearest key is {near!r} (of {', '.join(kinds)})")
        given[key] = value
    if given.get("backend", "cuda") not in ("cuda", "host"):
        raise UsageError(f"backend: expected cuda or host, got {given['backend']!r}")
    chosen: dict[str, Any] = {}
    for key, value in given.items():
        try:
            if kinds[key].startswith("tuple"):
                parts = [part for part in value.split(",") if part]
                chosen[key] = tuple(map(float, parts)) if "float" in kinds[key] else tuple(parts)
            elif kinds[key] == "bool":
                chosen[key] = {"true": True, "false": False}[value]
            else:
                chosen[key] = {"str": str, "int": int, "float": float}[kinds[key]](value)
        except (ValueError, KeyError):
            raise UsageError(f"{key}: expected {kinds[key]}, got {value!r}") from None
    if chosen.get("compare"):
        chosen.setdefault("seconds", COMPARING)
    settings = replace(ON_HOST if given.get("backend") == "host" else Settings(), **chosen)
    plans = agents.PLANNERS
    for key, known in (("workloads", NETWORKS), ("planners", plans), ("train", plans), ("graph", plans)):
        for name in getattr(settings, key):
            if name not in known:
                raise UsageError(f"{key}: there is no {name!r}; there are {', '.join(known)}")
    for key, kind in (("cache", Cache), ("kernels", Kernels)):
        if getattr(settings, key) not in get_args(kind):
            raise UsageError(f"{key}: expected one of {', '.join(get_args(kind))}, got {getattr(settings, key)!r}")
    if not settings.workloads or not all(0 < f <= 1 for f in settings.limits) or not settings.limits:
        raise UsageError("workloads and limits: expected at least one of each, limits above 0 and at most 1")
    if settings.pause_ns < 0:
        raise UsageError(f"pause_ns: expected at least 0, got {settings.pause_ns}")
    if settings.steps < 1 or settings.workers < 1 or min(settings.seconds, settings.largest_seconds) <= 0:
        raise UsageError("steps, workers, seconds and largest_seconds: expected more than 0")
    return settings
