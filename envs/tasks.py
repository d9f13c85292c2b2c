"""Named tasks: programs and their machines, stored as files of the package.

``gymnasium.make("GpuMemory/vgg16-45-v1")`` is ``GpuMemory-v1`` with ``program="vgg16", limit=0.45`` on the machine
stored in the file. A capture depends on the PyTorch version, so programs are files, and loading checks each file's
fingerprint. README.md says when a version ends.
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

# Fingerprints of the program and machine in programs/NAME.json.gz.
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


class NamedTask(NamedTuple):
    """Definition of ``GpuMemory/NAME-v1``."""

    program: str  # a key of FINGERPRINTS
    limit: float  # fraction of the program's peak
    split: str  # "train" or "test": no network of a test task's family is in a train task

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the task for GpuMemory-v1."""
        return {"program": self.program, "limit": self.limit}


TASKS = {
    "vgg16-45": NamedTask("vgg16", 0.45, "train"),
    "vgg16-40": NamedTask("vgg16", 0.40, "train"),
    "resnet50-30": NamedTask("resnet50", 0.30, "train"),
    "densenet121-50": NamedTask("densenet121", 0.50, "train"),
    "bert-50": NamedTask("bert", 0.50, "train"),
    "squeezenet-40": NamedTask("squeezenet", 0.40, "test"),
    "unet-50": NamedTask("unet", 0.50, "test"),
    "mobilenet-40": NamedTask("mobilenet", 0.40, "test"),
    "gpt2_small-50": NamedTask("gpt2_small", 0.50, "test"),
}
SUITES = {
    split: tuple(f"GpuMemory/{name}-v1" for name, task in TASKS.items() if task.split == split)
    for split in ("train", "test")
}


def fingerprint(program: Program, machine: Machine) -> str:
    """Returns a fingerprint of everything that a task's returns depend on, except the limit."""
    # Fields added later are 0 in old files, but for graph_copies, which the simulator ignores.
    figures = {key: value for key, value in machine.to_dict().items() if value and key != "graph_copies"}
    if machine.kernel_times is not None:
        figures["kernel_times"] = {key: value for key, value in vars(machine.kernel_times).items() if value}
    return sha256(json.dumps([program.fingerprint, figures], sort_keys=True).encode()).hexdigest()[:12]


def save(name: str, program: Program, machine: Machine) -> str:
    """Writes the file of a named program and returns its fingerprint."""
    write_json(PROGRAMS / f"{name}.json.gz", {"program": program.to_dict(), "machine": machine.to_dict()})
    return fingerprint(program, machine)


@cache
def load(name: str) -> tuple[Program, Machine]:
    """Returns a named program and its machine.

    Raises:
        FormatError: if the name is unknown or the file's fingerprint differs from FINGERPRINTS.
    """
    if name not in FINGERPRINTS:
        matches = get_close_matches(name, FINGERPRINTS, 1)
        hint = f"; did you mean {matches[0]!r}?" if matches else ""
        raise FormatError(f"program: {name!r} is neither a .json file nor one of {', '.join(FINGERPRINTS)}{hint}")
    path = PROGRAMS / f"{name}.json.gz"

    def read(data: object) -> tuple[Program, Machine]:
        entries = fields(data, "task", {"program": dict, "machine": dict}, {})
        return Program.from_dict(entries["program"]), Machine.from_dict(entries["machine"])

    program, machine = load_json(path, read)
    if (actual := fingerprint(program, machine)) != FINGERPRINTS[name]:
        raise FormatError(f"{path}: expected fingerprint {FINGERPRINTS[name]}, got {actual}; restore the file")
    return program, machine


def program_and_machine(program: Program | str | Path, machine: Machine | str | Path | None) -> tuple[Program, Machine]:
    """Resolves a program and a machine that may be given by name, preset or path.

    Args:
        program: a Program, a name or the path of a .json or .json.gz.
        machine: a Machine, a preset or a path; None: the named program's machine.

    Returns:
        The program and the machine.

    Raises:
        FormatError: if the program or machine does not exist.
        ValueError: if no machine is given and the program is not named.
    """
    stored_machine = None
    if not isinstance(program, Program):
        if str(program).endswith((".json", ".json.gz")):
            program = Program.load(program)
        else:
            program, stored_machine = load(str(program))
    if machine is None and stored_machine is None:
        raise ValueError("machine: required, because the program is not a named one")
    resolved = stored_machine if machine is None else machine if isinstance(machine, Machine) else Machine.load(machine)
    assert resolved is not None
    return program, resolved
