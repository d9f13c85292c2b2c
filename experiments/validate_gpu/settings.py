"""Settings of experiments.validate_gpu: ``key=value`` words, without Hydra, which a GPU machine may not have."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import agents
from executor.capture.profile import Cache
from experiments.common.endings import UsageError
from experiments.validate_gpu.networks import NETWORKS
from experiments.validate_gpu.pytorch_baselines import METHODS

# Stage -> its part of the time that is left, beside those that come after it.
STAGES = {"calibrate": 0.3, "profile": 1.5, "plan": 1.5, "replay": 1.5, "train": 3.0, "compare": 3.0, "largest": 3.0}
LEAST = {"calibrate": 30.0}  # seconds of a stage that all others need


@dataclass(frozen=True)
class Settings:
    """What a run does; each field is a key of the command line, lists with commas.

    Attributes:
        backend: "cuda"; or "host", which does the same in small without a GPU.
        stages: what is done, of calibrate, profile, plan, replay, train, compare (pytorch_baselines.py) and largest
            (largest_batch.py), in this order.
        out: folder of the results; by default runs/validate_gpu-<time>. One that has some is gone on with.
        machine: what calibration has measured, else the preset that gives the rest; out/machine.yaml where there is
            one, else the preset of the GPU's name.
        profiles: folder of programs with what was measured of them; out/profiles.
        plans: folder of plans; out/plans.
        workloads: of experiments.validate_gpu.networks, those that matter most first.
        limits: fractions of the activation peak.
        cache: of the profiles, as executor.capture.profile.measure; where a step does not fit, "cold".
        planners: which plan and replay.
        train: whose plans are trained under.
        graph: of these, whose are also trained under as a CUDA graph.
        steps: measured training steps, in turns with as many eager ones.
        methods: of compare and largest.
        seconds: for all stages.
        workers: processes that plan, at least 1; 0: as many as there are processors.
        source: who measured, in measured/ (experiments/measured).
        licence: under which these profiles may be passed on.
    """

    backend: str = "cuda"
    stages: tuple[str, ...] = ("calibrate", "profile", "plan", "replay", "train")
    out: str = ""
    machine: str = ""
    profiles: str = ""
    plans: str = ""
    workloads: tuple[str, ...] = ("resnet50_imagenet_bf16", "llama_bf16", "gpt2_medium_bf16", "resnet50_imagenet",
                                  "vgg16")  # fmt: skip
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
    licence: str = "CC0-1.0"

    @property
    def device(self) -> str:
        """PyTorch's name of the device."""
        return "cuda" if self.backend == "cuda" else "cpu"


ON_HOST = Settings("host", workloads=("tiny_resnet", "tiny_gpt2"), limits=(0.7,), cache="hot", steps=2,
                   seconds=90.0, methods=tuple(m for m in METHODS if m != "compile"))  # fmt: skip


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
            else:
                chosen[key] = {"str": str, "int": int, "float": float}[kinds[key]](value)
        except ValueError:
            raise UsageError(f"{key}: expected {kinds[key]}, got {value!r}") from None
    settings = replace(ON_HOST if given.get("backend") == "host" else Settings(), **chosen)
    plans = agents.PLANNERS
    for key, known in (("workloads", NETWORKS), ("planners", plans), ("train", plans), ("graph", plans),
                       ("stages", STAGES), ("methods", METHODS)):  # fmt: skip
        for name in getattr(settings, key):
            if name not in known:
                raise UsageError(f"{key}: there is no {name!r}; there are {', '.join(known)}")
    if settings.cache not in get_args(Cache):
        raise UsageError(f"cache: expected one of {', '.join(get_args(Cache))}, got {settings.cache!r}")
    if not settings.workloads or not all(0 < f <= 1 for f in settings.limits) or not settings.limits:
        raise UsageError("workloads and limits: expected at least one of each, limits above 0 and at most 1")
    if not settings.stages:
        raise UsageError(f"stages: expected at least one of {', '.join(STAGES)}")
    if settings.steps < 1 or settings.workers < 0 or settings.seconds <= 0:
        raise UsageError("steps and seconds: expected more than 0; workers: at least 0")
    return replace(settings, stages=tuple(stage for stage in STAGES if stage in settings.stages))
