"""Tasks with names: programs and their machines, as files that come with the package.

``gymnasium.make("GpuMemory/vgg16-45-v0")`` is ``GpuMemory-v0`` with ``program="vgg16", limit=0.45``, on the machine
that the file has. They are files because a capture depends on the PyTorch that made it, and each is frozen by a
fingerprint: a file that is another one is refused. README.md says when ``v0`` becomes ``v1``.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from simulator import FormatError, Machine, Program
from simulator.files import fields, load_json, write_json

PROGRAMS = Path(__file__).with_name("programs")

# Of the program and the machine in programs/NAME.json.gz.
FINGERPRINTS = {
    "vgg16": "2c125fe6b7a3",
    "resnet50": "d15bbc45bce8",
    "densenet121": "a148a7390be8",
    "bert": "6fcb1381ba62",
    "squeezenet": "a3408919eada",
    "unet": "99399dd9176e",
    "mobilenet": "202b91d82063",
    "gpt2_small": "50b071e1daa0",
}


class Named(NamedTuple):
    """What ``GpuMemory/NAME-v0`` is made of."""

    program: str  # a key of FINGERPRINTS
    limit: float  # of the program's peak
    split: str  # "train" or "test": no network of a test task's family is in a train task

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments of GpuMemory-v0 that it stands for."""
        return {"program": self.program, "limit": self.limit}


TASKS = {
    "vgg16-45": Named("vgg16", 0.45, "train"),
    "vgg16-40": Named("vgg16", 0.40, "train"),
    "resnet50-30": Named("resnet50", 0.30, "train"),
    "densenet121-50": Named("densenet121", 0.50, "train"),
    "bert-50": Named("bert", 0.50, "train"),
    "squeezenet-40": Named("squeezenet", 0.40, "test"),
    "unet-50": Named("unet", 0.50, "test"),
    "mobilenet-40": Named("mobilenet", 0.40, "test"),
    "gpt2_small-50": Named("gpt2_small", 0.50, "test"),
}
SUITES = {
    split: tuple(f"GpuMemory/{name}-v0" for name, task in TASKS.items() if task.split == split)
    for split in ("train", "test")
}


def fingerprint(program: Program, machine: Machine) -> str:
    """Of all that a task's returns depend on but the limit."""
    figures = {key: value for key, value in machine.to_dict().items() if value}  # a figure that is new here is 0 there
    if machine.kernel_times is not None:
        figures["kernel_times"] = {key: value for key, value in vars(machine.kernel_times).items() if value}
    return sha256(json.dumps([program.fingerprint, figures], sort_keys=True).encode()).hexdigest()[:12]


def save(name: str, program: Program, machine: Machine) -> str:
    """Writes the file of a named program; returns its fingerprint."""
    write_json(PROGRAMS / f"{name}.json.gz", {"program": program.to_dict(), "machine": machine.to_dict()})
    return fingerprint(program, machine)


@cache
def load(name: str) -> tuple[Program, Machine]:
    """A named program and its machine.

    Raises:
        FormatError: there is none of this name, or its file is not the one that was frozen.
    """
    if name not in FINGERPRINTS:
        near = get_close_matches(name, FINGERPRINTS, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise FormatError(f"program: {name!r} is neither a .json file nor one of {', '.join(FINGERPRINTS)}{meant}")
    path = PROGRAMS / f"{name}.json.gz"

    def both(data: object) -> tuple[Program, Machine]:
        got = fields(data, "task", {"program": dict, "machine": dict}, {})
        return Program.from_dict(got["program"]), Machine.from_dict(got["machine"])

    program, machine = load_json(path, both)
    if (found := fingerprint(program, machine)) != FINGERPRINTS[name]:
        raise FormatError(f"{path}: expected the program {FINGERPRINTS[name]}, got {found}")
    return program, machine


def program_and_machine(program: Program | str | Path, machine: Machine | str | Path | None) -> tuple[Program, Machine]:
    """What is meant by a program, a name or a path of one; and by a machine, a preset, a path, or None: the named
    program's own.

    Raises:
        FormatError: there is no such program or machine.
        ValueError: a program that is not named needs a machine.
    """
    own = None
    if not isinstance(program, Program):
        if str(program).endswith((".json", ".json.gz")):
            program = Program.load(program)
        else:
            program, own = load(str(program))
    if machine is None and own is None:
        raise ValueError("machine: needed with a program that is not named")
    on = own if machine is None else machine if isinstance(machine, Machine) else Machine.load(machine)
    assert on is not None
    return program, on
