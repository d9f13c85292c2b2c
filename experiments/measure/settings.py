"""Settings of measuring commands from ``key=value`` words, without Hydra, which a GPU host may lack."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import formatannotation
from typing import Any, Literal, get_args, get_origin, get_type_hints

import agents
from executor.capture.profile import Cache
from experiments.common.errors import UsageError
from experiments.measure.networks import NETWORKS

# Stage -> weight of its share of the remaining time, relative to the later stages.
STAGES = {"calibrate": 0.3, "profile": 1.5, "plan": 1.5, "replay": 1.5, "train": 3.0, "compare": 3.0, "largest": 3.0}
Backend = Literal["cuda", "host"]
Method = Literal["eager", "ours", "checkpoint", "selective", "offload", "compile", "save_on_cpu"]


@dataclass(frozen=True)
class Settings:
    """Settings of a run; each field is a command-line key, with commas between list entries.

    Attributes:
        backend: "cuda"; or "host", which runs tiny networks without a GPU.
        stages: stages to run, of calibrate, profile, plan, replay, train, compare (gpu/pytorch_baselines.py) and
            largest (gpu/largest_batch.py); always in this order.
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

    backend: Backend = "cuda"
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
    cache: Cache = "step"
    planners: tuple[str, ...] = tuple(agents.untrained())
    train: tuple[str, ...] = ("autoswap_swdoa", "superneurons", "capuchin", "lp_round")
    graph: tuple[str, ...] = ("capuchin", "lp_round")
    steps: int = 20
    methods: tuple[Method, ...] = get_args(Method)
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
    methods=tuple(method for method in get_args(Method) if method != "compile"),
)


def values_of(kind: type, words: Sequence[str]) -> dict[str, Any]:
    """Returns values for the fields of dataclass ``kind`` from ``key=value`` words.

    A field is a number, a string, one of the values of a Literal, or a tuple of these (commas between entries).

    Raises:
        UsageError: if a word is invalid; the message names it.
    """
    kinds = get_type_hints(kind)
    chosen: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or key not in kinds:
            nearest = difflib.get_close_matches(key, kinds, n=1, cutoff=0.0)[0]
            raise UsageError(f"{word!r}: expected key=value; the nearest key is {nearest!r} (of {', '.join(kinds)})")
        is_tuple = get_origin(kinds[key]) is tuple
        element = get_args(kinds[key])[0] if is_tuple else kinds[key]
        allowed = get_args(element) if get_origin(element) is Literal else ()
        convert = type(allowed[0]) if allowed else element
        try:
            entries = tuple(map(convert, filter(None, value.split(",")) if is_tuple else (value,)))
        except ValueError:
            raise UsageError(f"{key}: expected {formatannotation(kinds[key])}, got {value!r}") from None
        if allowed:
            check_known(key, entries, allowed)
        chosen[key] = entries if is_tuple else entries[0]
    return chosen


def check_known(key: str, entries: Iterable[Any], allowed: Collection[Any]) -> None:
    """Raises UsageError if an entry is not in ``allowed``."""
    for entry in entries:
        if entry not in allowed:
            raise UsageError(f"{key}: unknown value {entry!r}; expected one of {', '.join(map(str, allowed))}")


def parse(words: Sequence[str]) -> Settings:
    """Returns settings from ``key=value`` words; raises UsageError with the invalid word.

    The key ``licence`` of version 0.4 is read as ``license``, with a DeprecationWarning.
    """
    if any(word.startswith("licence=") for word in words):
        warnings.warn(
            "licence= is now license=; the next version refuses the old key", DeprecationWarning, stacklevel=2
        )
        words = [word.replace("licence=", "license=", 1) if word.startswith("licence=") else word for word in words]
    chosen = values_of(Settings, words)
    settings = replace(ON_HOST if chosen.get("backend") == "host" else Settings(), **chosen)
    check_known("workloads", settings.workloads, NETWORKS)
    check_known("stages", settings.stages, STAGES)
    for key in ("planners", "train", "graph"):
        check_known(key, getattr(settings, key), agents.PLANNERS)
    for key in ("workloads", "limits", "stages"):
        if not getattr(settings, key):
            raise UsageError(f"{key}: expected at least one value")
    if not all(0 < f <= 1 for f in settings.limits):
        raise UsageError(f"limits: expected numbers above 0 and at most 1, got {settings.limits}")
    if settings.steps < 1 or settings.workers < 0 or settings.seconds <= 0:
        raise UsageError("steps, seconds, workers: expected steps >= 1, seconds > 0 and workers >= 0")
    return replace(settings, stages=tuple(stage for stage in STAGES if stage in settings.stages))
