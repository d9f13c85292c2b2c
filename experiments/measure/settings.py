"""Settings of experiments.validate_gpu from ``key=value`` words, without Hydra, which a GPU host may lack."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import agents
from executor.capture.profile import Cache
from experiments.common.errors import UsageError
from experiments.measure.networks import NETWORKS

# Stage -> weight of its share of the remaining time, relative to the later stages.
STAGES = {"calibrate": 0.3, "profile": 1.5, "plan": 1.5, "replay": 1.5, "train": 3.0, "compare": 3.0, "largest": 3.0}
METHODS = ("eager", "ours", "checkpoint", "selective", "offload", "compile", "save_on_cpu")
LEAST = {"calibrate": 30.0}  # minimum seconds of a stage that all others depend on
BACKENDS = ("cuda", "host")
CASTS: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}


@dataclass(frozen=True)
class Settings:
    """Settings of a run; each field is a command-line key, with commas between list entries.

    Attributes:
        backend: "cuda"; or "host", which runs tiny networks without a GPU.
        stages: stages to run, of calibrate, profile, plan, replay, train, compare (pytorch_baselines.py) and largest
            (largest_batch.py); always in this order.
        out: results folder (default: runs/validate_gpu-<time>); a folder with results is continued.
        machine: machine file or preset; default: out/machine.yaml, else the preset of the GPU's name. For calibrate:
            the preset for figures that are not measured.
        profiles: folder of profiles and profiled programs (default: out/profiles).
        plans: folder of plans (default: out/plans).
        workloads: networks of experiments.measure.networks, most important first.
        limits: limits as fractions of the activation peak.
        cache: cache mode of executor.capture.profile.measure; falls back to "cold" if a step does not fit.
        planners: planners of stages plan and replay.
        train: planners whose plans are used for training.
        graph: planners whose plans also train as a CUDA graph.
        steps: measured training steps, alternating with as many eager steps.
        methods: methods of stages compare and largest.
        seconds: time budget of all stages.
        workers: planning processes; 0: one per processor.
        source: author of the measurements, in measured/ (experiments/measured).
        license: license of the published profiles.
    """

    backend: str = "cuda"
    stages: tuple[str, ...] = ("calibrate", "profile", "plan", "replay", "train")
    out: str = ""
    machine: str = ""
    profiles: str = ""
    plans: str = ""
    workloads: tuple[str, ...] = (
        "resnet50_imagenet_bf16",
        "llama_bf16",
        "gpt2_medium_bf16",
        "resnet50_imagenet",
        "vgg16",
    )
    limits: tuple[float, ...] = (0.7, 0.5, 0.35)
    cache: str = "step"
    planners: tuple[str, ...] = tuple(agents.untrained())
    train: tuple[str, ...] = ("autoswap_swdoa", "superneurons", "capuchin", "lp_round")
    graph: tuple[str, ...] = ("capuchin", "lp_round")
    steps: int = 20
    methods: tuple[str, ...] = METHODS
    seconds: float = 540.0
    workers: int = 0
    source: str = "experiments.validate_gpu"
    license: str = "CC0-1.0"

    @property
    def device(self) -> str:
        """PyTorch device type: "cuda" or "cpu"."""
        return "cuda" if self.backend == "cuda" else "cpu"


ON_HOST = Settings(
    "host",
    workloads=("tiny_resnet", "tiny_gpt2"),
    limits=(0.7,),
    cache="hot",
    steps=2,
    seconds=90.0,
    methods=tuple(m for m in METHODS if m != "compile"),
)


def values_of(kind: type, words: Sequence[str]) -> dict[str, Any]:
    """Returns values for the fields of dataclass ``kind`` from ``key=value`` words.

    Raises:
        UsageError: if a word is invalid; the message names it.
    """
    kinds = {f.name: str(f.type) for f in fields(kind)}
    chosen: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or key not in kinds:
            nearest = difflib.get_close_matches(key, kinds, n=1, cutoff=0.0)[0]
            raise UsageError(f"{word!r}: expected key=value; the nearest key is {nearest!r} (of {', '.join(kinds)})")
        element = kinds[key].removeprefix("tuple[").removesuffix(", ...]")
        try:
            parts = tuple(map(CASTS[element], filter(None, value.split(","))))
            chosen[key] = parts if element != kinds[key] else CASTS[element](value)
        except ValueError:
            raise UsageError(f"{key}: expected {kinds[key]}, got {value!r}") from None
    return chosen


def check_known(key: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raises UsageError if a value, or an entry of a tuple, is not in ``allowed``."""
    for entry in value if isinstance(value, tuple) else (value,):
        if entry not in allowed:
            raise UsageError(f"{key}: unknown value {entry!r}; expected one of {', '.join(map(str, allowed))}")


def parse(words: Sequence[str]) -> Settings:
    """Returns settings from ``key=value`` words; raises UsageError with the invalid word."""
    chosen = values_of(Settings, words)
    settings = replace(ON_HOST if chosen.get("backend") == "host" else Settings(), **chosen)
    plans = agents.PLANNERS
    for key, allowed in {
        "backend": BACKENDS,
        "cache": get_args(Cache),
        "workloads": NETWORKS,
        "planners": plans,
        "train": plans,
        "graph": plans,
        "stages": STAGES,
        "methods": METHODS,
    }.items():
        check_known(key, getattr(settings, key), allowed)
    for key in ("workloads", "limits", "stages"):
        if not getattr(settings, key):
            raise UsageError(f"{key}: expected at least one value")
    if not all(0 < f <= 1 for f in settings.limits):
        raise UsageError("limits: expected numbers above 0 and at most 1")
    if settings.steps < 1 or settings.workers < 0 or settings.seconds <= 0:
        raise UsageError("expected steps >= 1, seconds > 0 and workers >= 0")
    return replace(settings, stages=tuple(stage for stage in STAGES if stage in settings.stages))
