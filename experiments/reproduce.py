"""Reproduces figures and tables of the papers, next to the published numbers.

    python -m experiments.reproduce figure=smartpool_table1
    python -m experiments.reproduce figure=all jobs=8 out=experiments/results
    python -m experiments.reproduce figure=all launcher=ray out=experiments/results     # tasks on a Ray cluster
    python -m experiments.reproduce figure=all quick=true                               # smoke test with fewer points
    python -m experiments.reproduce figure=all redraw=true out=experiments/results      # plot existing results

For every figure the directory holds NAME.json (command, settings, a row per task) and NAME.png, and a README.md with
all figures present. Its path is the last line printed. An interrupted run resumes from NAME.jsonl if settings and code
are unchanged. Figures use the GPU of their paper unless ``gpu=`` is given; experiments/figures/README.md has more.
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
SECONDS = "task_seconds"  # key of a row: run time
CODE = (
    "simulator",
    "envs",
    "agents",
    "executor",
    "experiments/workloads",
    "experiments/measured",
)  # packages that every row depends on
SHARED = ("__init__", "figure", "home_networks", "layerwise")  # modules shared by figures of several papers


@cli.entry("reproduce")
def main(cfg: DictConfig) -> None:
    """Computes the chosen figures, or redraws them from their results, into ``out``."""
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
    """Computes and plots figures by their settings into ``out``; prints their tables.

    Args:
        own: settings given by the user, which ``quick`` does not override.
        launcher, jobs: see ``workers.results``.

    Raises:
        UsageError, FormatError: as in ``Work``, or ``out`` cannot be created.
    """
    works = [Work(settings, quick, machine, out, own) for settings in chosen]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cli.UsageError(f"out: {out} cannot be created ({error.strerror})") from None

    with report.held(out):
        wrong = compute(works, launcher, jobs)
    console = report.console()
    for work in works:
        if not work.left:
            heads, cells, notes = work.figure.format_text(work.rows)
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
    """Runs the remaining tasks and finishes every complete figure; returns the exceptions of failed tasks."""
    wrong: list[Exception] = []
    for work in works:
        if not work.left:  # interrupted before plotting
            work.finish()
    beside, alone = (
        [(work, task) for work in works if work.figure.needs_all_cores == one for task in reversed(work.left)]
        for one in (False, True)
    )
    with report.progress() as bar:
        shown = bar.add_task("starting", total=sum(len(work.tasks) for work in works))
        bar.update(shown, advance=sum(len(work.tasks) - len(work.left) for work in works))
        for work, task, row in chain(done(beside, launcher, jobs), done(alone, "processes", 1)):
            if isinstance(row, Exception):  # continue with the others
                row.add_note(f"in {work.name}, {task}")
                wrong.append(row)
            else:
                work.keep(task, row)
            bar.update(shown, advance=1, description=work.name)
            if not work.left:
                work.finish()
    return wrong


def names() -> list[str]:
    """Returns all figures with a configuration in natural order (Fig. 2 before Fig. 10)."""
    found = [path.stem for path in CONFIGS.glob("*.yaml") if path.stem != ALL]
    return sorted(found, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def figure(name: object) -> Figure:
    """Returns the figure of a name; raises UsageError if it does not exist."""
    from experiments.figures.figure import find

    if name not in names():
        raise cli.UsageError(f"figure.name: unknown figure {name!r}{cli.nearest(name, set(names()))}")
    return find(str(name))


class Work:
    """Computation of one figure: all its ``tasks``, and the rows of those done so far.

    Args:
        machine: preset or YAML file that replaces the machine of ``settings``.
        own: settings that ``quick`` does not override.

    Raises:
        UsageError: the figure does not exist, or a setting is invalid.
        FormatError: the machine is malformed.
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
        """Tasks without a row."""
        return [task for task in self.tasks if _key(task) not in self._found]

    @property
    def rows(self) -> list[Row]:
        """Rows in task order."""
        return [self._found[_key(task)] for task in self.tasks]

    def keep(self, task: Row, row: Row) -> None:
        """Stores the row of a finished task in memory and on disk."""
        self._found[_key(task)] = row
        with self._part.open("a") as file:  # the previous line may be incomplete
            file.write("\n" + json.dumps({"code": self._same, "task": task, "row": row}) + "\n")

    def _kept(self) -> Iterator[tuple[str, Row]]:
        lines = self._part.read_text().splitlines() if self._part.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # empty, or incomplete after an interruption
                continue
            if entry["code"] == self._same:
                yield _key(entry["task"]), entry["row"]

    def finish(self) -> None:
        """Writes the JSON and the plot."""
        write_json(self.out / f"{self.name}.json", {
            "command": own_command(self.name), "machine": self.machine.name, "quick": self.quick,
            "settings": self.settings, "rows": self.rows,
        }, indent=1)  # fmt: skip
        self.figure.draw(self.rows, self.out / f"{self.name}.png")

    def forget(self) -> None:
        """Deletes the partial rows; call it once all figures are finished, since they allow resuming."""
        self._part.unlink(missing_ok=True)


def _key(task: Row) -> str:
    return json.dumps(task, sort_keys=True)


def code(name: str) -> str:
    """Returns the SHA-256 of the code and workload settings that a figure's rows depend on."""
    root = cli.CONFIGS.parent
    files = [path for folder in CODE for path in (root / folder).rglob("*.py")]
    files += (cli.CONFIGS / "workload").glob("*.yaml")
    folder, module = root / "experiments" / "figures", type(figure(name)).__module__.rpartition(".")[2]
    paper = module.partition("_")[0]
    files += {*folder.glob(f"{paper}*.py"), *(folder / f"{shared}.py" for shared in SHARED)}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


def own_command(name: str) -> str:
    """Returns the typed command restricted to one figure, without jobs and launcher."""
    typed = re.sub(r" (figure|jobs|launcher)=\S+", "", report.command())
    return typed.replace("experiments.reproduce", f"experiments.reproduce figure={name}")


def draw_again(figures: list[str], out: Path) -> None:
    """Plots existing results in ``out`` and writes the page; raises FormatError for other JSON files."""
    for name in figures:
        if (path := out / f"{name}.json").exists():
            figure(name).draw(result(path)["rows"], out / f"{name}.png")
    write_text(out / "README.md", page(out))


def done(tasks: list[tuple[Work, Row]], launcher: str, jobs: int | None) -> Iterator[tuple[Work, Row, Row | Exception]]:
    """Yields every task with its row or exception as it finishes; runs a single local task in this process."""
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


# ------------------------------------------------------------------------------------------ output


def rich_table(title: str, heads: list[str], cells: list[list[str]]) -> Table:
    """Renders a figure's table for a terminal."""
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(heads):
        out.add_column(head, justify="right" if i else "left", overflow="fold")
    for row in cells:
        out.add_row(*row)
    return out


def page(out: Path) -> str:
    """Returns README.md with a section per result in ``out``; raises FormatError for other JSON files."""
    there = {path.stem: result(path) for name in names() if (path := out / f"{name}.json").exists()}
    minutes = sum(row.get(SECONDS, 0) for found in there.values() for row in found["rows"]) / 60
    parts = [
        "# The papers' tables and figures, reproduced",
        "This page is generated. Every section ends with the command that made it; `python -m experiments.reproduce "
        f"figure=all out=experiments/results` makes them all ({minutes:,.0f} minutes of one core). Tables show a "
        "selection; the JSON has all. experiments/figures/README.md names the papers. Capuchin, GeePS, memonger, "
        "TFLMS and vDNN are reconstructions from descriptions in other papers.",
        ", ".join(f"[{name}](#{name})" for name in there),
    ]
    for name, found in there.items():
        parts += _section(out / f"{name}.json", found, figure(name))
    return "\n\n".join(parts) + "\n"


def result(path: Path) -> dict[str, Any]:
    """Reads a figure's JSON; raises FormatError if it is not a result."""
    found = read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list) or "command" not in found:
        raise FormatError(f"{path}: not a result of a figure (expected `rows` and `command`)")
    return found


def _section(path: Path, found: dict[str, Any], figure: Figure) -> list[str]:
    rows = found["rows"]
    try:
        heads, cells, notes = figure.format_text(rows, brief=True)
    except (KeyError, TypeError) as error:
        raise FormatError(f"{path}: not a result of this figure ({error})") from None
    lines = [f"| {' | '.join(line)} |" for line in (heads, *cells)]
    return [
        f'<a id="{path.stem}"></a>',
        f"## {figure.title}",
        figure.introduction,
        f"![{path.stem}]({path.stem}.png)",
        "\n".join([lines[0], f"|---|{'---:|' * (len(heads) - 1)}", *lines[1:]]),
        "\n".join(f"- {note}" for note in notes),
        f"`{found['command']}` ([JSON]({path.name}))",
    ]


if __name__ == "__main__":
    main()
