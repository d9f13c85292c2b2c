"""Reproduces figures and tables of the papers, next to the published numbers.

    python -m experiments.reproduce figure=smartpool_table1
    python -m experiments.reproduce figure=all jobs=8 out=experiments/results
    python -m experiments.reproduce figure=all launcher=ray out=experiments/results     # tasks on a Ray cluster
    python -m experiments.reproduce figure=all quick=true                               # smoke test with fewer points
    python -m experiments.reproduce figure=all redraw=true out=experiments/results      # plot existing results

For every figure the directory holds NAME.json (command, settings, a row per task) and NAME.png. README.md lists the
claims of all figures present, with verdicts, and a page per paper has their tables and pictures. The path of the
directory is the last line printed. An interrupted run resumes from NAME.jsonl if settings and code are unchanged.
Figures use the GPU of their paper unless ``gpu=`` is given; experiments/figures/README.md has more.
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
from experiments.common.errors import resumable
from experiments.common.report import Row
from simulator.files import FormatError, read_json, write_json, write_text
from simulator.machine import Machine

if TYPE_CHECKING:
    from experiments.figures.figure import Figure

CONFIGS = cli.CONFIGS / "figure"
ALL = "all"
SECONDS = "task_seconds"  # key of a row: run time
GENERATED = "This page is generated."
UNPUBLISHED = ("own", "torchtune")  # pages of no paper, which come last


@cli.entry("reproduce")
def main(cfg: DictConfig) -> None:
    """Computes the chosen figures, or redraws them from their results, into ``out``."""
    quick, redraw = (cli.choice(cfg, key, (False, True)) for key in ("quick", "redraw"))
    settings = cli.to_dict(cfg.figure)
    is_all = settings.get("name") == ALL
    out = cli.path(cfg, "out") or Path("runs/reproduce")
    if redraw:
        redraw_figures(names() if is_all else [str(settings.get("name"))], out)
        print(out)
        return
    chosen = [name for name in names() if not figure(name).on_demand] if is_all else []
    all_settings = [cli.to_dict(OmegaConf.load(CONFIGS / f"{name}.yaml")) for name in chosen]
    overrides = [word.lstrip("+").partition("=")[0] for word in HydraConfig.get().overrides.task]
    typed_keys = {key.split(".")[1] for key in overrides if key.startswith("figure.")}
    make(all_settings or [settings], quick, cfg.gpu, *cli.launcher(cfg), out, typed_keys)


@resumable
def make(
    chosen: list[dict[str, Any]],
    quick: bool,
    machine: str | None,
    launcher: str,
    jobs: int | None,
    out: Path,
    typed_keys: Collection[str] = (),
) -> None:
    """Computes and plots figures by their settings into ``out``; prints their tables.

    Args:
        chosen: settings of each figure.
        quick: whether to use the settings of a quick run.
        machine: machine for all figures; None: their own.
        out: directory to write.
        typed_keys: settings given by the user, which ``quick`` does not override.
        launcher, jobs: see ``workers.results``.

    Raises:
        UsageError, FormatError: as in ``FigureRun``, or ``out`` cannot be created.
    """
    runs = [FigureRun(settings, quick, machine, out, typed_keys) for settings in chosen]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cli.UsageError(f"out: {out} cannot be created ({error.strerror}); choose another directory") from None

    with report.lock_directory(out):
        errors = compute(runs, launcher, jobs)
    console = report.console()
    for run in runs:
        if not run.remaining:
            heads, cells, notes = run.figure.format_text(run.rows)
            console.print(rich_table(run.figure.title, heads, cells))
            for note in notes:
                console.print(f"- {note}", highlight=False)
            for claim in run.figure.claims(run.rows):
                console.print(
                    f"- {claim.verdict_shown}: {claim.claim} (paper: {claim.paper}; ours: {claim.ours})",
                    highlight=False,
                )
    write_pages(out)
    if errors:
        raise errors[0]
    for run in runs:
        run.delete_partial()
    print(out)


def compute(runs: list[FigureRun], launcher: str, jobs: int | None) -> list[Exception]:
    """Runs the remaining tasks and finishes every complete figure; returns the exceptions of failed tasks."""
    errors: list[Exception] = []
    for run in runs:
        if not run.remaining:  # interrupted before plotting
            run.finish()
    parallel, serial = (
        [(run, task) for run in runs if run.figure.needs_all_cores == is_alone for task in reversed(run.remaining)]
        for is_alone in (False, True)
    )
    with report.progress() as bar:
        progress_task = bar.add_task("starting", total=sum(len(run.tasks) for run in runs))
        bar.update(progress_task, advance=sum(len(run.tasks) - len(run.remaining) for run in runs))
        for run, task, row in chain(run_tasks(parallel, launcher, jobs), run_tasks(serial, "processes", 1)):
            if isinstance(row, Exception):  # continue with the others
                row.add_note(f"in {run.name}, {task}")
                errors.append(row)
            else:
                run.record(task, row)
            bar.update(progress_task, advance=1, description=run.name)
            if not run.remaining:
                run.finish()
    return errors


def names() -> list[str]:
    """Returns all figures with a configuration in natural order (Fig. 2 before Fig. 10)."""
    stems = [path.stem for path in CONFIGS.glob("*.yaml") if path.stem != ALL]
    return sorted(stems, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def figure(name: object) -> Figure:
    """Returns the figure of a name; raises UsageError if it does not exist."""
    from experiments.figures.figure import find

    if name not in names():
        raise cli.UsageError(f"figure.name: unknown figure {name!r}{cli.nearest(name, set(names()))}")
    return find(str(name))


class FigureRun:
    """Computation of one figure: all its ``tasks``, and the rows of those done so far.

    Args:
        machine: preset or YAML file that replaces the machine of ``settings``.
        typed: settings that ``quick`` does not override.

    Raises:
        UsageError: the figure does not exist, or a setting is invalid.
        FormatError: the machine is malformed.
    """

    def __init__(
        self, settings: dict[str, Any], quick: bool, machine: str | None, out: Path, typed: Collection[str] = ()
    ):
        self.name = settings.pop("name", None)
        self.figure = figure(self.name)
        small = settings.pop("quick", {})
        default = settings.pop("machine", None)
        self.settings = {**settings, **({key: small[key] for key in small if key not in typed} if quick else {})}
        self.quick = quick
        self.machine = Machine.load(machine or default)
        self.out = out
        self.tasks: list[Row] = self.figure.tasks(OmegaConf.create(self.settings))
        self._partial_file = out / f"{self.name}.jsonl"
        self._digest = hashlib.sha256(
            json.dumps([code(self.name), self.machine.to_dict()], sort_keys=True).encode()
        ).hexdigest()
        self._rows = dict(self._load_rows())

    @property
    def remaining(self) -> list[Row]:
        """Tasks without a row."""
        return [task for task in self.tasks if _key(task) not in self._rows]

    @property
    def rows(self) -> list[Row]:
        """Rows in task order."""
        return [self._rows[_key(task)] for task in self.tasks]

    def record(self, task: Row, row: Row) -> None:
        """Stores the row of a finished task in memory and on disk."""
        self._rows[_key(task)] = row
        with self._partial_file.open("a") as file:  # the previous line may be incomplete
            file.write("\n" + json.dumps({"code": self._digest, "task": task, "row": row}) + "\n")

    def _load_rows(self) -> Iterator[tuple[str, Row]]:
        lines = self._partial_file.read_text().splitlines() if self._partial_file.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # empty, or incomplete after an interruption
                continue
            if entry["code"] == self._digest:
                yield _key(entry["task"]), entry["row"]

    def finish(self) -> None:
        """Writes the JSON and the plot."""
        from experiments.figures.fingerprint import fingerprint

        write_json(
            self.out / f"{self.name}.json",
            {
                "command": figure_command(self.name),
                "machine": self.machine.name,
                "quick": self.quick,
                "settings": self.settings,
                "fingerprint": fingerprint(type(self.figure).__module__, self.settings, self.machine.to_dict()),
                "rows": self.rows,
            },
            indent=1,
        )
        self.figure.draw(self.rows, self.out / f"{self.name}.png")

    def delete_partial(self) -> None:
        """Deletes the partial rows; call it once all figures are finished, since they allow resuming."""
        self._partial_file.unlink(missing_ok=True)


def _key(task: Row) -> str:
    return json.dumps(task, sort_keys=True)


def code(figure_name: str) -> str:
    """Returns the SHA-256 of the code and workload settings that a figure's rows depend on."""
    root = cli.CONFIGS.parent
    packages = ("simulator", "envs", "agents", "executor", "experiments/workloads", "experiments/measure")
    shared = ("__init__", "core", "figure", "home_networks", "layerwise")  # modules of several papers
    kinds = ("*.py", "*.yaml")
    files = [path for package in packages for kind in kinds for path in (root / package).rglob(kind)]
    files += (cli.CONFIGS / "workload").glob("*.yaml")
    folder = root / "experiments" / "figures"
    module = type(figure(figure_name)).__module__.rpartition(".")[2]
    paper = module.partition("_")[0]
    files += {
        *folder.glob(f"{paper}*.py"),
        *folder.glob(f"{paper}.yaml"),
        *(folder / f"{module}.py" for module in shared),
    }
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


def figure_command(name: str) -> str:
    """Returns the typed command restricted to one figure, without jobs and launcher."""
    words = re.sub(r" (figure|jobs|launcher)=\S+", "", report.command())
    return words.replace("experiments.reproduce", f"experiments.reproduce figure={name}")


def redraw_figures(figures: list[str], out: Path) -> None:
    """Plots existing results in ``out`` and writes the page; raises FormatError for other JSON files."""
    for name in figures:
        if (path := out / f"{name}.json").exists():
            figure(name).draw(result(path)["rows"], out / f"{name}.png")
    write_pages(out)


def run_tasks(
    tasks: list[tuple[FigureRun, Row]], launcher: str, jobs: int | None
) -> Iterator[tuple[FigureRun, Row, Row | Exception]]:
    """Yields every task with its row or exception as it finishes; runs a single local task in this process."""
    if launcher == "processes" and (jobs == 1 or len(tasks) <= 1):
        for run, task in tasks:
            try:
                yield run, task, _run(run.name, task, run.machine)
            except Exception as error:
                yield run, task, error
        return
    calls = [(run.name, task, run.machine) for run, task in tasks]
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


def write_pages(out: Path) -> None:
    """Writes README.md and a page per paper for the results in ``out``; raises FormatError for other JSON files."""
    for name, text in pages(out).items():
        write_text(out / name, text)


def pages(out: Path) -> dict[str, str]:
    """Returns the text of each page by file name; raises FormatError for JSON files that are no results."""
    from experiments.figures.figure import page_title
    from experiments.figures.verdicts import OURS, VERDICTS, count_verdicts

    results = {name: result(path) for name in names() if (path := out / f"{name}.json").exists()}
    by_page: dict[str, list[str]] = {}
    for name in sorted(results, key=lambda name: figure(name).page in UNPUBLISHED):
        by_page.setdefault(figure(name).page, []).append(name)
    texts = {}
    counts = []
    claims = []
    for page, members in by_page.items():
        sections = [part for name in members for part in _section(out / f"{name}.json", results[name], figure(name))]
        title = page_title(page)
        texts[f"{page}.md"] = "\n\n".join([f"# {title}", GENERATED, *sections]) + "\n"
        lines = [(name, claim) for name in members for claim in figure(name).claims(results[name]["rows"])]
        if lines:
            cells = count_verdicts(claim.verdict for _, claim in lines if claim.paper != OURS)
            counts.append([f"[{title}]({page}.md)", *(str(count) if count else "" for count in cells)])
        claims += [[f"[{c.claim}]({page}.md#{name})", c.paper, c.ours, c.verdict_shown] for name, c in lines]
    minutes = sum(row.get(SECONDS, 0) for data in results.values() for row in data["rows"]) / 60
    texts["README.md"] = "\n\n".join(
        [
            "# What the papers claim, and what comes out here",
            f"{GENERATED} `python -m experiments.reproduce figure=all out=experiments/results` makes the "
            f"results that need no GPU and less than hours; all rows took {minutes:,.0f} minutes in sum. "
            "Verdicts follow from the numbers (rules: experiments/figures/verdicts.py); the counts are of the papers' "
            "claims, without controls and claims of ours (paper: –). Capuchin, GeePS, memonger, "
            "TFLMS and vDNN are reconstructions "
            "from descriptions in other papers.",
            _table(["paper", *VERDICTS], counts),
            _table(["claim", "paper", "ours", "verdict"], claims, "---"),
            "Pages: " + ", ".join(f"[{page_title(page)}]({page}.md)" for page in by_page) + ".",
        ]
    )
    texts["README.md"] += "\n"
    return texts


def _table(heads: list[str], cells: list[list[str]], align: str = "---:") -> str:
    lines = [f"| {' | '.join(line)} |" for line in (heads, *cells)]
    return "\n".join([lines[0], f"|---|{f'{align}|' * (len(heads) - 1)}", *lines[1:]])


def result(path: Path) -> dict[str, Any]:
    """Reads a figure's JSON; raises FormatError if it is not a result."""
    data = read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list) or "command" not in data:
        raise FormatError(f"{path}: not a result of a figure (expected `rows` and `command`)")
    return data


def _section(path: Path, data: dict[str, Any], figure: Figure) -> list[str]:
    rows = data["rows"]
    try:
        heads, cells, notes = figure.format_text(rows, brief=True)
    except (KeyError, TypeError) as error:
        raise FormatError(f"{path}: not a result of this figure ({error}); run it again") from None
    pictures = [path.with_name(f"{path.stem}{suffix}.png") for suffix in figure.pictures]
    parts = [
        f'<a id="{path.stem}"></a>',
        f"## {figure.title}",
        figure.introduction,
        "\n\n".join(f"![{picture.stem}]({picture.name})" for picture in pictures),
        _table(heads, cells),
        "\n".join(f"- {note}" for note in notes),
        f"Choices: {figure.choices}" if figure.choices else "",
        f"`{data['command']}` ([JSON]({path.name}))",
    ]
    return [part for part in parts if part]


if __name__ == "__main__":
    main()
