"""Profiles: measured durations and workspaces of a captured program's kernels, as files.

profile = measure(captured, "cuda", machine="h200")  # profiler.py
profile.save(path_of(profile))                       # configs/profiles/<program>-<machine>.json
program = with_profile(captured.program, profile)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from simulator.files import FormatError, fields, integers, load_json, write_json
from simulator.program import Program

FORMAT = "profile/1"
PROFILES = Path(__file__).resolve().parents[2] / "configs" / "profiles"

Cache = Literal["cold", "hot", "step"]


class ProfileError(RuntimeError):
    """Raised if a kernel or step cannot be profiled; the message is one sentence."""


@dataclass(frozen=True)
class Profile:
    """Measurements of one program on one device.

    Attributes:
        program: Name of the program.
        fingerprint: Fingerprint of the program without durations, workspaces and variants (``shape_of``).
        machine: Name of the machine, as in ``configs/machine``.
        device: Description of the device.
        torch: PyTorch version.
        durations_ns: Duration of each kernel in ns.
        workspaces: Workspace of each kernel in bytes; None if the device does not report it.
        cache: State of the cache before each kernel (``measure``).
        event_ns: Overhead of the events around a kernel in ns, already subtracted from the durations.
        step_ns: Duration in ns of all kernels of a step without events in between, at sustained clocks if the host
            keeps the device busy; an upper bound of the sum of ``durations_ns``; 0 if not measured (on the CPU, or with
            each kernel alone).
    """

    program: str
    fingerprint: str
    machine: str
    device: str
    torch: str
    durations_ns: tuple[int, ...]
    workspaces: tuple[int, ...] | None = None
    cache: Cache = "hot"
    event_ns: int = 0
    step_ns: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the ``profile/1`` dictionary; the key ``workspaces`` is optional.

        Older files lack ``cache`` (it was "hot"), ``event_ns`` and ``step_ns``.
        """
        out = {
            "format": FORMAT,
            "program": self.program,
            "fingerprint": self.fingerprint,
            "machine": self.machine,
            "device": self.device,
            "torch": self.torch,
            "cache": self.cache,
            "event_ns": self.event_ns,
            "step_ns": self.step_ns,
            "durations_ns": list(self.durations_ns),
        }
        return out if self.workspaces is None else {**out, "workspaces": list(self.workspaces)}

    @classmethod
    def from_dict(cls, data: object) -> Profile:
        """Reads a ``profile/1`` dictionary.

        Raises:
            FormatError: If an entry is malformed; the message names the first one.
        """
        words = ("format", "program", "fingerprint", "machine", "device", "torch")
        optional: dict[str, tuple[Any, Any]] = {
            "workspaces": (list, None),
            "cache": (Cache, "hot"),
            "event_ns": (int, 0),
            "step_ns": (int, 0),
        }
        top = fields(data, "profile", {**dict.fromkeys(words, str), "durations_ns": list}, optional)
        if (found := top.pop("format")) != FORMAT:
            raise FormatError(f"profile.format: expected {FORMAT!r}, got {found!r}")
        top["durations_ns"] = integers(top["durations_ns"], "profile.durations_ns")
        if top["workspaces"] is not None:
            top["workspaces"] = integers(top["workspaces"], "profile.workspaces", len(top["durations_ns"]))
        for name in ("durations_ns", "workspaces"):
            for i, value in enumerate(top[name] or ()):
                if value < 0:
                    raise FormatError(f"profile.{name}[{i}]: expected an integer of at least 0, got {value}")
        return cls(**top)

    def save(self, path: str | Path) -> None:
        """Writes ``profile/1`` JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads ``profile/1`` JSON.

        Raises:
            FormatError: If an entry is malformed; the message names the file and the entry.
        """
        return load_json(path, cls.from_dict)


def path_of(profile: Profile) -> Path:
    """Returns ``configs/profiles/<program>-<machine>.json``, with ``_`` for characters unsafe in file names."""
    return PROFILES / (re.sub(r"[^\w.+-]", "_", f"{profile.program}-{profile.machine}") + ".json")


def shape_of(program: Program) -> Program:
    """Returns the program without durations, workspaces and variants: its fingerprint is equal on every machine."""
    kernels = tuple(replace(k, duration_ns=0, workspace=0, variants=()) for k in program.kernels)
    return Program(program.name, program.tensors, kernels)


def with_profile(program: Program, profile: Profile) -> Program:
    """Returns the program with the profile's durations and, if the profile has them, workspaces.

    Variants are dropped, because their durations are modeled rather than measured.

    Raises:
        FormatError: If the profile belongs to another program.
    """
    shape = shape_of(program)
    if profile.fingerprint != shape.fingerprint or len(profile.durations_ns) != len(program.kernels):
        raise FormatError(
            f"the profile is of another program ({profile.program!r}, fingerprint {profile.fingerprint[:12]}; "
            f"{program.name!r} has {shape.fingerprint[:12]}); profile this program"
        )
    spaces = profile.workspaces or [k.workspace for k in program.kernels]
    kernels = tuple(
        replace(k, duration_ns=ns, workspace=space)
        for k, ns, space in zip(shape.kernels, profile.durations_ns, spaces, strict=True)
    )
    return Program(program.name, program.tensors, kernels)


def limit_to_row(times: Sequence[int], row_ns: int) -> list[int]:
    """Returns kernel times (ns) corrected so that their sum is at most ``row_ns``, their duration in a row.

    The excess is subtracted in equal parts, at most half of each time; any rest is removed proportionally.
    """
    excess = (sum(times) - row_ns) / max(1, sum(ns > 0 for ns in times))
    if excess <= 0:
        return list(times)
    shorter = [max(ns / 2, ns - excess) for ns in times]
    scale = min(1.0, row_ns / sum(shorter))
    return [max(round(ns * scale), min(before, 1)) for ns, before in zip(shorter, times, strict=True)]


def slow_down(times: Sequence[int], bound: Sequence[bool], excess: int) -> list[int]:
    """Returns kernel times (ns) with ``excess`` ns, if positive, spread over the ``bound`` ones in proportion."""
    total = sum(ns for ns, is_bound in zip(times, bound, strict=True) if is_bound)
    scale = 1 + max(0, excess) / max(total, 1)
    return [round(ns * scale) if is_bound else ns for ns, is_bound in zip(times, bound, strict=True)]
