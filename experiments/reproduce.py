"""Reproduce figures and tables of the papers: ours beside the paper's numbers, and why they differ.

    python -m experiments.reproduce figure=smartpool_table1
    python -m experiments.reproduce figure=all jobs=8 out=experiments/results
    python -m experiments.reproduce figure=all launcher=ray out=experiments/results     # tasks on a Ray cluster
    python -m experiments.reproduce figure=all quick=true                  # fewer points, to see that it runs
    python -m experiments.reproduce figure=all redraw=true out=experiments/results  # of the JSON that is there

The directory holds NAME.json (the command, the settings, a row per task) and NAME.png of every figure, and README.md,
which shows all that are there. Its path is the last line printed. A run that was stopped goes on from NAME.jsonl if
neither the settings nor the code have changed. Each figure is for the GPU of its paper, unless ``gpu=`` names another.

A figure is a YAML in configs/figure/, and a class and a section of a page in experiments/figures/; see the README.md
there.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.table import Table

from experiments.common import cli, report, workers
from experiments.common.endings import goes_on
from experiments.common.report import Row
from simulator.files import FormatError, read_json, write_json, write_text
from simulator.machine import Machine

if TYPE_CHECKING:
    from experiments.figures.figure import Figure

CONFIGS = cli.CONFIGS / "figure"
ALL = "all"
SECONDS = "task_seconds"  # of a row: what it took
CODE = (
    "simulator",
    "envs",
    "agents",
    "executor",
    "experiments/workloads",
    "experiments/measured",
)  # that every row depends on
SHARED = ("__init__", "figure", "home_networks", "layerwise")  # modules that figures of several papers have


@cli.entry("reproduce")
def main(cfg: DictConfig) -> None:
    quick, redraw = (cli.choice(cfg, key, (False, True)) for key in ("quick", "redraw"))
    asked = cli.plain(cfg.figure)
    every = asked.get("name") == ALL
    out = cli.path(cfg, "out") or Path("runs/reproduce")
    if redraw:
        draw_again(names() if every else [str(asked.get("name"))], out)
        print(out)
        return
    chosen = [name for name in names() if not figure(name).on_demand] if every else []
    several = [cli.plain(OmegaConf.load(CONFIGS / f"{name}.yaml")) for name in chosen]
    typed = [word.lstrip("+").partition("=")[0] for word in HydraConfig.get().overrides.task]
    own = {key.split(".")[1] for key in typed if key.startswith("figure.")}
    make(several or [asked], quick, cfg.gpu, *cli.launcher(cfg), out, own)


@goes_on
def make(
    chosen: list[dict[str, Any]], quick: bool, machine: str | None, launcher: str, jobs: int | None, out: Path,
    own: Collection[str] = (),
) -> None:  # fmt: skip
    """Computes and draws figures, by their settings, into ``out``; prints their tables.

    Args:
        own: settings that the caller chose: ``quick`` leaves them.
        launcher, jobs: as of ``workers.results``.

    Raises:
        UsageError, FormatError: as ``Work``; ``out`` cannot be made.
    """
    works = [Work(settings, quick, machine, out, own) for settings in chosen]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cli.UsageError(f"out: {out} cannot be made ({error.strerror})") from None

    with report.held(out):
        wrong = compute(works, launcher, jobs)
    console = report.console()
    for work in works:
        if not work.left:
            heads, cells, notes = work.figure.say(work.rows)
            console.print(rich_table(work.figure.title, heads, cells))
            for note in notes:
                console.print(f"- {note}", highlight=False)
    write_text(out / "README.md", page(out))
    if wrong:
        raise wrong[0]
    for work in works:
        work.forget()
    print(out)


def compute(works: list[Work], launcher: str, jobs: int | None) -> list[Exception]:
    """Runs what is left of the figures, and finishes each that has all; returns what tasks raised."""
    wrong: list[Exception] = []
    for work in works:
        if not work.left:  # stopped when it only had to be drawn
            work.finish()
    beside, alone = (
        [(work, task) for work in works if work.figure.alone == one for task in reversed(work.left)]
        for one in (False, True)
    )
    with report.progress() as bar:
        shown = bar.add_task("starting", total=sum(len(work.tasks) for work in works))
        bar.update(shown, advance=sum(len(work.tasks) - len(work.left) for work in works))
        for work, task, row in chain(done(beside, launcher, jobs), done(alone, "processes", 1)):
            if isinstance(row, Exception):  # the others go on
                row.add_note(f"in {work.name}, {task}")
                wrong.append(row)
            else:
                work.keep(task, row)
            bar.update(shown, advance=1, description=work.name)
            if not work.left:
                work.finish()
    return wrong


def names() -> list[str]:
    """Every figure that has a configuration; Fig. 2 before Fig. 10."""
    found = [path.stem for path in CONFIGS.glob("*.yaml") if path.stem != ALL]
    return sorted(found, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def figure(name: object) -> Figure:
    """The figure of a name; raises UsageError where there is none."""
    from experiments.figures.figure import find

    if name not in names():
        raise cli.UsageError(f"figure.name: there is no figure {name!r}{cli.nearest(name, set(names()))}")
    return find(str(name))


class Work:
    """One figure under way.

    Attributes:
        tasks: all of them; ``left``: those that have no row yet; ``rows``: in the order of the tasks.

    Args:
        machine: a preset or a YAML file in the place of the one that ``settings`` names.
        own: settings that are not made fewer by ``quick``.

    Raises:
        UsageError: there is no such figure, or a setting is wrong.
        FormatError: the machine is wrong.
    """

    def __init__(
        self, settings: dict[str, Any], quick: bool, machine: str | None, out: Path, own: Collection[str] = ()
    ):
        self.name = settings.pop("name", None)
        self.figure = figure(self.name)
        fewer, default = settings.pop("quick", {}), settings.pop("machine", None)
        self.settings = {**settings, **({key: fewer[key] for key in fewer if key not in own} if quick else {})}
        self.quick, self.machine, self.out = quick, Machine.load(machine or default), out
        self.tasks: list[Row] = self.figure.tasks(OmegaConf.create(self.settings))
        self._part = out / f"{self.name}.jsonl"
        self._same = hashlib.sha256(
            json.dumps([code(self.name), self.machine.to_dict()], sort_keys=True).encode()
        ).hexdigest()
        self._found = dict(self._kept())

    @property
    def left(self) -> list[Row]:
        """The tasks that have no row yet."""
        return [task for task in self.tasks if _key(task) not in self._found]

    @property
    def rows(self) -> list[Row]:
        """A row per task, in their order."""
        return [self._found[_key(task)] for task in self.tasks]

    def keep(self, task: Row, row: Row) -> None:
        """Takes a finished task's row, and writes it down at once."""
        self._found[_key(task)] = row
        with self._part.open("a") as file:  # the line before may have been cut off
            file.write("\n" + json.dumps({"code": self._same, "task": task, "row": row}) + "\n")

    def _kept(self) -> Iterator[tuple[str, Row]]:
        lines = self._part.read_text().splitlines() if self._part.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # empty, or the line that was being written when the run was stopped
                continue
            if entry["code"] == self._same:
                yield _key(entry["task"]), entry["row"]

    def finish(self) -> None:
        """Writes the JSON and the picture."""
        write_json(self.out / f"{self.name}.json", {
            "command": own_command(self.name), "machine": self.machine.name, "quick": self.quick,
            "settings": self.settings, "rows": self.rows,
        }, indent=1)  # fmt: skip
        self.figure.draw(self.rows, self.out / f"{self.name}.png")

    def forget(self) -> None:
        """Removes the rows of the unfinished run; only once every figure is finished, so that it can go on."""
        self._part.unlink(missing_ok=True)


def _key(task: Row) -> str:
    return json.dumps(task, sort_keys=True)


def code(name: str) -> str:
    """sha256 of what a figure's rows depend on: code of the packages and its own, and the workloads' settings."""
    root = cli.CONFIGS.parent
    files = [path for folder in CODE for path in (root / folder).rglob("*.py")]
    files += (cli.CONFIGS / "workload").glob("*.yaml")
    folder, module = root / "experiments" / "figures", type(figure(name)).__module__.rpartition(".")[2]
    paper = module.partition("_")[0]
    files += {*folder.glob(f"{paper}*.py"), *(folder / f"{shared}.py" for shared in SHARED)}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


def own_command(name: str) -> str:
    """What was typed, for one of several figures; without who did it."""
    typed = re.sub(r" (figure|jobs|launcher)=\S+", "", report.command())
    return typed.replace("experiments.reproduce", f"experiments.reproduce figure={name}")


def draw_again(figures: list[str], out: Path) -> None:
    """Pictures and page of what is in ``out``; raises FormatError where a JSON is not one of ours."""
    for name in figures:
        if (path := out / f"{name}.json").exists():
            figure(name).draw(result(path)["rows"], out / f"{name}.png")
    write_text(out / "README.md", page(out))


def done(tasks: list[tuple[Work, Row]], launcher: str, jobs: int | None) -> Iterator[tuple[Work, Row, Row | Exception]]:
    """Every task and its row, or what it raised, as they are done; one of this computer alone is done here."""
    if launcher == "processes" and (jobs == 1 or len(tasks) <= 1):
        for work, task in tasks:
            try:
                yield work, task, _run(work.name, task, work.machine)
            except Exception as error:
                yield work, task, error
        return
    calls = [(work.name, task, work.machine) for work, task in tasks]
    for i, row in workers.results(launcher, jobs, _run, calls):
        yield *tasks[i], row


def _run(name: str, task: Row, machine: Machine) -> Row:
    begin = time.perf_counter()
    row = figure(name).run(task, machine)
    return {**task, **row, SECONDS: round(time.perf_counter() - begin, 1)}


# ------------------------------------------------------------------------------------------ for people


def rich_table(title: str, heads: list[str], cells: list[list[str]]) -> Table:
    """A figure's table for a terminal."""
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(heads):
        out.add_column(head, justify="right" if i else "left", overflow="fold")
    for row in cells:
        out.add_row(*row)
    return out


def page(out: Path) -> str:
    """README.md: a section for every figure whose JSON is in ``out``; raises FormatError where one is not ours."""
    there = {path.stem: result(path) for name in names() if (path := out / f"{name}.json").exists()}
    minutes = sum(row.get(SECONDS, 0) for found in there.values() for row in found["rows"]) / 60
    parts = [
        "# The papers' tables and figures, reproduced",
        "This page is generated. Every section ends with the command that made it; `python -m experiments.reproduce "
        f"figure=all out=experiments/results` makes them all ({minutes:,.0f} minutes of one core). Capuchin, GeePS, "
        "memonger, TFLMS and vDNN are reconstructions from descriptions in other papers.",
        "\n".join(f"- [{figure(name).title}](#{name})" for name in there),
    ]
    for name, found in there.items():
        parts += _section(out / f"{name}.json", found, figure(name))
    return "\n\n".join(parts) + "\n"


def result(path: Path) -> dict[str, Any]:
    """A figure's JSON; raises FormatError where it is none."""
    found = read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list) or "command" not in found:
        raise FormatError(f"{path}: not a result of a figure (expected rows and command)")
    return found


def _section(path: Path, found: dict[str, Any], figure: Figure) -> list[str]:
    rows = found["rows"]
    try:
        heads, cells, notes = figure.say(rows)
    except (KeyError, TypeError) as error:
        raise FormatError(f"{path}: not a result of this figure ({error})") from None
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *cells]
    return [
        f'<a id="{path.stem}"></a>',
        f"## {figure.title}",
        figure.about,
        f"![{figure.title}]({path.stem}.png)",
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
        "\n".join(f"- {note}" for note in notes),
        f"`{found['command']}` ([JSON]({path.name}))",
    ]


if __name__ == "__main__":
    main()
