"""Repeat a run from its directory alone, and say what is the same.

    python -m experiments.rerun runs/vgg16-0.45-seed0-20260101-120000
    python -m experiments.rerun RUN out=again

The directory holds all that is needed: the program (program.json), and in summary.json the command, every setting as it
was, the machine among them, and the versions of what it ran with. The new run gets the same settings, whatever the
defaults are now. Plans are compared to the byte, rows without what a clock measured; what was searched for a number of
seconds may differ. Its path is the last line printed; the exit status is 1 where something that should be equal is not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.common import cli, report
from experiments.common.report import Row
from simulator.files import FormatError, load_json, write_json

COMMANDS = ("experiments.train_dqn", "experiments.train_sb3", "experiments.evaluate")
GIVEN = ("program", "workload", "machine", "out", "resume")  # which the directory says instead
CHOICES = ("agent", "algo")  # config groups whose option's name counts
CLOCK = ("plan_ms",)  # keys of rows that a clock measured
SAME = ("planner", "limit_bytes", "mode", "workspace", "seed")  # what says which row is which


@cli.entry("rerun", positional="run")
def main(cfg: DictConfig) -> None:
    run = cli.path(cfg, "run")
    assert run is not None
    module, words, before = repeated(run)
    out = cli.path(cfg, "out") or run.with_name(f"{run.name}-again")
    if out.exists():
        raise cli.UsageError(f"out: {out} is there already; name another directory")
    log = report.console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder) / "machine.json"
        write_json(machine, before["config"]["machine"])
        given = [f"program={(run / 'program.json').absolute()}", f"machine={machine}", f"out={out}"]
        done = subprocess.run([sys.executable, "-m", module, *words, *given], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    after = summary(out)
    for name, version in before["versions"].items():
        if (now := after["versions"].get(name)) != version:
            log.print(f"{name} was {version} and is {now}")
    same, lines = compared(run, out, before, after)
    for line in lines:
        print(line)
    print(out)
    if not same:
        sys.exit(1)


def summary(run: Path) -> Row:
    """The summary of a run directory; raises UsageError where it has none of ours."""

    def check(data: object) -> Row:
        keys = {"command": list, "config": dict, "versions": dict, "program": dict, "results": list}
        wrong = [k for k, kind in keys.items() if not isinstance(data, dict) or not isinstance(data.get(k), kind)]
        if wrong or not isinstance(data, dict):
            raise FormatError(f"summary.{wrong[0]}: missing, this is no summary of a run")
        return data

    try:
        return load_json(run / "summary.json", check)
    except FormatError as error:
        raise cli.UsageError(f"run: {error}") from None


def repeated(run: Path) -> tuple[str, list[str], Row]:
    """The module of a run, the words that give it every setting that its directory does not say, and its summary.

    Raises:
        UsageError: the directory is not of a run that can be repeated.
    """
    data = summary(run)
    command, config = data["command"], data["config"]
    module = str(command[2]) if len(command) > 2 else ""
    if module not in COMMANDS:
        raise cli.UsageError(
            f"run: {run} is of {module or 'an unknown command'}; {', '.join(COMMANDS)} can be repeated"
        )
    if not (run / "program.json").is_file() or not isinstance(config.get("machine"), dict):
        raise cli.UsageError(f"run: {run} has no program.json or no machine; it was made by an older version")
    words = [str(word) for word in command[3:] if str(word).partition("=")[0] in CHOICES]
    for key, value in config.items():
        if key not in GIVEN:
            words += [f"{name}={_written(leaf)}" for name, leaf in _leaves(key, value)]
    return module, words, data


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, entry in value.items():
            yield from _leaves(f"{key}.{name}", entry)
    else:
        yield key, value


def _written(value: Any) -> str:
    """A value in the grammar of overrides."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {_written(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)


def compared(run: Path, out: Path, before: Row, after: Row) -> tuple[bool, list[str]]:
    """Is all equal that should be, and a line for the plan and for each row."""
    same, lines = True, []
    if (run / "plan.json").exists():
        equal = (run / "plan.json").read_bytes() == (out / "plan.json").read_bytes()
        same, text = same and equal, "the same to the byte" if equal else "another one"
        lines.append(f"plan.json: {text}")
    rows = {_which(row): row for row in after["results"]}
    for row in before["results"]:
        other = rows.get(_which(row), {})
        keys = [key for key in row if key not in CLOCK and row[key] != other.get(key)]
        timed = "seconds" in row["planner"]
        same &= timed or not keys
        what = "the same" if not keys else f"other {', '.join(keys)}" + (" (it had seconds)" if timed else "")
        lines.append(f"{row['planner']}, {row['limit_fraction']:.3g} of the peak: {what}")
    return same, lines


def _which(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in SAME)


if __name__ == "__main__":
    main()
