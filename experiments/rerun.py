"""Repeat a run from its directory alone, and say what is the same.

    python -m experiments.rerun runs/vgg16-0.45-seed0-20260101-120000
    python -m experiments.rerun RUN out=again

The directory holds all that is needed: the program (program.json; of pack the file, in input/), and in summary.json
the command, every setting as it was, the machine among them, and the versions of what it ran with. The new run gets the
same settings, whatever the defaults are now. What a number of calls decides is compared to the byte; what a clock
measured, or seconds decided, is not (experiments/README.md). Its path is the last line printed; the exit status is 1
where something that should be equal is not.
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import agents
from experiments.common import cli, report
from experiments.common.report import Row
from simulator.files import FormatError, load_json, write_json
from simulator.pool import ALLOCATORS

PLAN, PACK = "experiments.plan", "experiments.pack"
COMMANDS = ("experiments.train_dqn", "experiments.train_sb3", "experiments.evaluate", PLAN, PACK)
GIVEN = (
    "program",
    "workload",
    "task",
    "target",
    "file",
    "machine",
    "out",
    "resume",
)  # which the directory says instead
CHOICES = ("agent", "algo")  # config groups whose option's name counts
CLOCK = ("plan_ms",)  # keys of rows that a clock measured
FLOOR = ("bound_overhead", "gap")  # and, of plan, those of a floor that had seconds
SAME = ("planner", "limit_bytes", "mode", "workspace", "seed")  # what says which row is which
SECONDS = " (it had seconds)"
FACTS = ("fits", "least_bytes")  # of plan's summary: no seconds decide them

Compared = tuple[bool, list[str]]  # is all equal that should be, and what is said


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
        given = [
            f"{key}={_written(str(path.absolute()))}" for key, path in (inputs(run, module) | {"out": out}).items()
        ]
        command = [sys.executable, "-m", module, *words, f"machine={machine}", *given]
        status = subprocess.run(command, check=False).returncode
    if status and not (out / "summary.json").exists():  # plan says with its status whether it fits
        sys.exit(status)
    after = summary(out)
    for name, version in before["versions"].items():
        if (now := after["versions"].get(name)) != version:
            log.print(f"{name} was {version} and is {now}")
    same, lines = {PLAN: compared_plan, PACK: compared_pack}.get(module, compared)(run, out, before, after)
    for line in lines:
        print(line)
    print(out)
    if not same:
        sys.exit(1)


def summary(run: Path) -> Row:
    """The summary of a run directory; raises UsageError where it has none of ours."""

    def check(data: object) -> Row:
        keys = {"command": list, "config": dict, "versions": dict}
        wrong = [k for k, kind in keys.items() if not isinstance(data, dict) or not isinstance(data.get(k), kind)]
        if wrong or not isinstance(data, dict):
            raise FormatError(f"summary.{wrong[0]}: missing, this is no summary of a run")
        more = {PLAN: ("results", "families", "recommended", *FACTS), PACK: ("best",)}
        for key in more.get(_module(data), ("results",)):
            if key not in data:
                raise FormatError(f"summary.{key}: missing, it is not of this version")
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
    config, module = data["config"], _module(data)
    if module not in COMMANDS:
        raise cli.UsageError(
            f"run: {run} is of {module or 'an unknown command'}; {', '.join(COMMANDS)} can be repeated"
        )
    inputs(run, module)
    if not isinstance(config.get("machine"), dict):
        raise cli.UsageError(f"run: {run} has no machine; it was made by an older version")
    return module, settings(run / "summary.json", data), data


def settings(file: Path, data: Row, typed: Sequence[str] = ()) -> list[str]:
    """The words that give a command every setting of a run, but those in GIVEN.

    Args:
        data: what ``file`` has: the command and its config.
        typed: keys that were typed.

    Raises:
        UsageError: they are not of this version, or name Python to be imported, which no file may.
    """
    module = _module(data)
    chosen = [str(word).partition("=") for word in data["command"][3:]]
    words = [f"{group}={_checked(option)}" for group, _, option in chosen if group in CHOICES]
    known = cli.keys(module.rpartition(".")[2])
    for key, value in data["config"].items():
        if key not in known:
            raise cli.UsageError(f"run: {file}: config: {module} has no key {key!r}")
        if key == "network" and value is not None and key not in typed:
            raise cli.UsageError(f"run: {file}: config: network is Python, which only a command that is typed may name")
        if key not in GIVEN:
            words += [f"{name}={_written(leaf)}" for name, leaf in _leaves(key, value)]
    return words


def resumed_words(file: Path, typed: list[str]) -> list[str]:
    """The words that resume the run whose settings ``file`` has: these, but where ``typed`` says otherwise."""
    data = load_json(file, lambda data: data if isinstance(data, dict) else {})
    if not isinstance(data.get("command"), list) or not isinstance(data.get("config"), dict):
        raise cli.UsageError(f"resume: {file} does not say the settings of a run")
    keys = [word.partition("=")[0] for word in typed]
    words = settings(file, data, keys)
    program, machine = file.with_name("program.json"), data["config"].get("machine")
    if program.is_file() and not {"program", "workload", "target"} & {*keys}:
        words.append(f"program={_written(str(program.absolute()))}")
    if isinstance(machine, dict):
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # it is read once this has returned
        write_json(Path(folder) / "machine.json", machine)
        words.append(f"machine={folder}/machine.json")
    return [w for w in words if not any(w.startswith((f"{key}=", f"{key}.")) for key in keys)] + typed


def inputs(run: Path, module: str) -> dict[str, Path]:
    """The file that a run worked on, by the key that names it; raises UsageError where its directory has none."""
    key, files = "program", [run / "program.json"]
    if module == PACK:
        key, files = "file", list((run / report.INPUT).glob("*"))
    if len(files) != 1 or not files[0].is_file():
        name = f"one file in {report.INPUT}/" if module == PACK else "program.json"
        raise cli.UsageError(f"run: {run} has no {name}; it was made by an older version")
    return {key: files[0]}


def _module(data: Row) -> str:
    command = data["command"]
    return str(command[2]) if len(command) > 2 else ""


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, entry in value.items():
            _checked(name)
            yield from _leaves(f"{key}.{name}", entry)
    else:
        yield key, value


def _checked(key: object) -> str:
    """A key that means nothing to Hydra; raises UsageError for another."""
    if not isinstance(key, str) or not re.fullmatch(r"\w+", key):
        raise cli.UsageError(f"run: config: {str(key)[:40]!r} is no key of a setting")
    return key


def _written(value: Any) -> str:
    """A value in the grammar of overrides."""
    if isinstance(value, str):
        if "${" in value:  # OmegaConf would put something else in its place
            raise cli.UsageError(f"run: config: {value[:40]!r} is no setting")
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_checked(key)}: {_written(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)


def compared(run: Path, out: Path, before: Row, after: Row) -> Compared:
    """A line for the plan and for each row of a training or an evaluation."""
    found = [_file("plan.json", run, out)] if (run / "plan.json").exists() else []
    rows = {_which(row): row for row in after["results"]}
    found += [_row(_name(row), row, rows.get(_which(row), {}), CLOCK, "seconds" in row["planner"])
              for row in before["results"]]  # fmt: skip
    return _all(found)


def compared_plan(run: Path, out: Path, before: Row, after: Row) -> Compared:
    """A line for each fact, for each family's best method and for plan.json.

    A method without a budget of seconds has the same row and the same plan. Which is the best of its family is the
    same where there was time for the same ones, and none had seconds; which is recommended, where that holds of all.
    """
    found = [(False, f"other {key}: {before[key]} and {after[key]}") for key in FACTS if before[key] != after[key]]
    rows = {_which(row): row for row in after["results"]}
    kept, now = ({family["family"]: family for family in data["families"]} for data in (before, after))
    by_time = {name for name in kept.keys() & now.keys()
               if any(_budget(each[name]["planner"]) for each in (kept, now))
               or kept[name]["left_out"] != now[name]["left_out"]}  # fmt: skip
    for name in [name for name in kept if name in now]:
        found += _choice(name, kept[name]["planner"], now[name]["planner"], name in by_time)
    for row in before["results"]:
        if _which(row) in rows:
            found.append(_row(_name(row), row, rows[_which(row)], CLOCK + FLOOR, _budget(row["planner"])))
    was, planner = before["recommended"], after["recommended"]
    found += _choice("recommended", was, planner, bool(by_time))
    if was is not None and was == planner:
        found.append(_file("plan.json", run, out, f", by {was}", _budget(was)))
    same, lines = _all(found)
    same &= kept.keys() == now.keys()
    return same, [*lines, "the largest batch: not compared, it takes the model"]


def compared_pack(run: Path, out: Path, before: Row, after: Row) -> Compared:
    """A line for each allocator and for solution.csv; what searches for seconds is compared where it was proven."""
    found = []
    rows, others = (load_json(path / "results.json", _rows) for path in (run, out))
    for name, row in rows.items():
        other = others.get(name, {})
        timed = name not in ALLOCATORS or (ALLOCATORS[name].timed and not (row["proven"] and other.get("proven")))
        found.append(_row(name, row, other, ("seconds",), timed))
    was, best = before["best"], after["best"]
    timed = any(name not in ALLOCATORS or ALLOCATORS[name].timed for name in (was, best))
    return _all([*found, _file("solution.csv", run, out, f", by {best}", timed)])


def _rows(data: object) -> dict[str, Row]:
    if not isinstance(data, dict) or not all(isinstance(row, dict) and "proven" in row for row in data.values()):
        raise FormatError("expected an object of allocators")
    return data


def _all(found: list[tuple[bool, str]]) -> Compared:
    return all(same for same, _ in found), [line for _, line in found]


def _row(name: str, row: Row, now: Row, but: tuple[str, ...], timed: bool) -> tuple[bool, str]:
    """Is a row the same but for some keys, or may it differ as it had seconds; and a line that says so."""
    keys = [key for key in row if key not in but and row[key] != now.get(key)]
    if not keys:
        return True, f"{name}: the same"
    return timed, f"{name}: other {', '.join(keys)}{SECONDS * timed}"


def _choice(name: str, was: str | None, now: str | None, by_time: bool) -> list[tuple[bool, str]]:
    """Of what was chosen: [] where it is the same."""
    return [] if was == now else [(by_time, f"{name}: {now} in the place of {was}{' (by time)' * by_time}")]


def _file(name: str, run: Path, out: Path, by: str = "", timed: bool = False) -> tuple[bool, str]:
    """As ``_row``, of a file."""
    equal = (out / name).is_file() and (run / name).read_bytes() == (out / name).read_bytes()
    what = "the same to the byte" if equal else "another one"
    return equal or timed, f"{name}: {what}{by}{SECONDS * (timed and not equal)}"


def _name(row: Row) -> str:
    return f"{row['planner']}, {row['limit_fraction']:.3g} of the peak"


def _budget(planner: str | None) -> bool:
    """Does a planner stop by the clock?"""
    return planner is not None and "seconds" in agents.options(planner.partition(",")[0])


def _which(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in SAME)


if __name__ == "__main__":
    main()
