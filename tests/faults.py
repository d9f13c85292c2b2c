"""Random faults in files: ``python -m tests.faults N [--seed S|random]`` (test_faults.py runs a few).

Each of N rounds corrupts a valid file (bytes flipped or cut, entries dropped, duplicated, of another kind or size,
nested deeply) and reads it: the result must be a value or an error of one sentence. Failing rounds are printed with
their seeds, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from agents.learned.checkpoint import TrainingStateError, read_training_state, read_weights, write_training_state
from agents.learned.policy_net import PolicyNet
from experiments.common import cli, own_files
from experiments.common.resume import resume_args
from simulator import FormatError, Machine, Plan, PlanError, Program, Swap, simulate
from simulator.files import write_json
from simulator.pool.files import load
from simulator.timeline import Timeline
from tests.tiny import PROGRAM

ROOT = Path(__file__).resolve().parent.parent
REFUSED = (FormatError, PlanError, TrainingStateError, cli.UsageError)
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**400,
    -(2**63),
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x1b[2J",
    "../../x",
    "${oc.env:HOME}",
    [],
    {},
    [[]],
    {"_target_": "os.mkdir"},
    "1e999",
    "é" * 50,
)
Reader = Callable[[Path], object]


def stirred(rng: random.Random, data: Any) -> Any:
    """Returns JSON data with one random entry replaced, dropped, duplicated or nested."""
    data = copy.deepcopy(data)
    places: list[tuple[Any, Any]] = []
    pending = [data]
    while pending:
        here = pending.pop()
        for key in list(here) if isinstance(here, dict) else range(len(here)):
            places.append((here, key))
            if isinstance(here[key], (dict, list)):
                pending.append(here[key])
    where, key = rng.choice(places)
    what = rng.randrange(6)
    if what == 0:
        del where[key]
    elif what == 1:
        other, at = rng.choice(places)
        where[key] = copy.deepcopy(other[at]) if (other, at) != (where, key) else None
    elif what == 2 and isinstance(where, list):
        where.insert(key, copy.deepcopy(where[key]))
    elif what == 3 and isinstance(where, dict):
        where[str(rng.choice(ODD))] = where[key]
    elif what == 4:
        for _ in range(rng.choice((2, 40))):
            where[key] = [where[key]]
    else:
        where[key] = rng.choice(ODD)
    return data


def damaged(rng: random.Random, raw: bytes) -> bytes:
    """Returns the bytes with some flipped, cut off, duplicated or moved."""
    start, end = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    kind = rng.randrange(5)
    if kind == 0:
        return raw[:start]
    if kind == 4:
        return raw[:start] + b"[" * 100_000 + raw[start:]
    if kind == 1:
        return raw[:end] + raw[start:]
    if kind == 2:
        return raw[:start] + raw[end:]
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 8))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


class Files:
    """Valid files of every kind, each with its reader."""

    def __init__(self, folder: Path) -> None:
        plan = Plan.of(PROGRAM, (Swap(0, 0, 7),))
        machine = Machine("m", 10**9, 10**9, 10**9)
        write_json(folder / "timeline.json", simulate(PROGRAM, Plan(), machine, PROGRAM.peak_bytes).to_dict())
        PROGRAM.save(folder / "program.json")
        plan.save(folder / "plan.json")
        (folder / "machine.yaml").write_text(yaml.safe_dump(machine.to_dict()))
        (folder / "workload.yaml").write_text("family: vgg\nname: vgg16\nbatch: 2\n")
        write_json(
            folder / "summary.json",
            {
                "command": ["python", "-m", "experiments.evaluate"],
                "config": {"limits": [0.5], "planners": ["none"]},
                "versions": {},
            },
        )
        (folder / "blocks.csv").write_text("id,lower,upper,size\n0,0,3,4\n1,1,2,8\n")
        write_training_state(folder / "checkpoint.pt", {"weights": torch.ones(8), "episodes": [1, 2]})
        weights = Path(sys.modules[PolicyNet.__module__].__file__ or "").with_name("policy.pt")
        (folder / "policy.pt").write_bytes(weights.read_bytes())
        self.readers: dict[str, Reader] = {
            "program.json": lambda path: Program.load(path).gaps(),
            "plan.json": lambda path: Plan.load(path).check(PROGRAM),
            "timeline.json": Timeline.load,
            "machine.yaml": Machine.load,
            "workload.yaml": own_files.read_workload,
            "summary.json": lambda path: resume_args(path, []),
            "blocks.csv": load,
            "checkpoint.pt": read_training_state,
            "policy.pt": lambda path: read_weights(path, PolicyNet, "the policy"),
        }
        self.raw = {name: (folder / name).read_bytes() for name in self.readers}

    def changed(self, rng: random.Random, name: str) -> bytes:
        """Returns a corrupted file."""
        raw = self.raw[name]
        if name.endswith((".pt", ".csv")) or rng.random() < 0.3:
            return damaged(rng, raw)
        data = json.loads(raw) if name.endswith(".json") else yaml.safe_load(raw)
        for _ in range(rng.choice((1, 1, 2, 5))):
            data = stirred(rng, data) if data else data
        return (json.dumps(data) if name.endswith(".json") else yaml.safe_dump(data)).encode()


def read(files: Files, folder: Path, seed: int) -> str | None:
    """Corrupts and reads one file; returns a description of the failure, or None."""
    rng = random.Random(seed)
    name = rng.choice(sorted(files.readers))
    path = folder / name
    before = sorted(os.listdir(folder))
    path.write_bytes(files.changed(rng, name))
    try:
        files.readers[name](path)
    except REFUSED as error:
        text = str(error)
        if "\n" in text.strip() or not text.strip() or len(text) > 1000 or not text.replace("\n", " ").isprintable():
            return f"{name}: no sentence: {text[:200]!r}"
    except Exception as error:  # a bug: users would see a traceback
        return f"{name}: {type(error).__name__}: {str(error)[:200]}"
    finally:
        path.write_bytes(files.raw[name])
    after = sorted(os.listdir(folder))
    return None if after == before else f"{name}: left {set(after) ^ set(before)}"


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("rounds", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", default="0", help="of the first round, or 'random'")
    args = parser.parse_args()
    count = args.rounds
    seed = random.randrange(2**40) if args.seed == "random" else int(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder))
        failures = {
            f"python -m tests.faults 1 --seed {i}": read(files, Path(folder), i) for i in range(seed, seed + count)
        }
    lines = [f"{command}: {failure}" for command, failure in failures.items() if failure]
    print(*lines, f"{len(failures):,} rounds, {len(lines)} wrong", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
