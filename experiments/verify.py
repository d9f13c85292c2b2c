"""Verifies a folder of submitted plans: simulates each on its named task and prints the overheads it really has.

    python -m experiments.verify plans=runs/mine
    python -m experiments.verify plans=runs/mine tasks=[vgg16-45,unet-50]

The folder holds a file TASK.json per task, as ``Plan.save`` writes it. A plan counts if it belongs to the program of
its task (fingerprint) and fits the limit. Nothing else in the file is believed, and no code of the submission is run.
The exit status is 1 if a plan is missing or does not count. The run directory holds results.jsonl and summary.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from agents.floor import floor
from envs.tasks import TASKS, load
from experiments.common import cli, report
from simulator.files import FormatError, write_json
from simulator.plan import Plan, PlanError


@cli.entry("verify")
def main(cfg: DictConfig) -> Path:
    """Verifies the plans and returns the run directory; exits with status 1 if a plan is missing or does not count."""
    folder = cli.path(cfg, "plans")
    if folder is None or not folder.is_dir():
        raise cli.UsageError(f"plans: expected a folder with a file TASK.json per task, got {cfg.plans!r}")
    names = list(TASKS) if cfg.tasks is None else [str(name) for name in cli.values(cfg, "tasks")]
    tasks = {name: cli.named_task("tasks", name) for name in names}
    screen = report.console()
    with report.RunDirectory(cli.path(cfg, "out"), "verify") as out:
        rows = [verify(folder, name, *tasks[name]) for name in report.track(names, "verifying")]
        report.write_rows(out / "results.jsonl", rows)
        write_json(out / "summary.json", {**report.run_info(cfg), "results": rows}, indent=1)
    for name, row in zip(names, rows, strict=True):
        verdict = f"refused: {row.get('reason')}"
        if row["feasible"]:
            verdict = f"{report.percent(row['overhead'])}, {100 * row['gap']:.2f} points above the floor"
        screen.print(f"{name}: {verdict}")
    counted = sum(row["feasible"] for row in rows)
    screen.print(f"{counted} of {len(rows)} plans count")
    print(out)
    if counted < len(rows):
        sys.exit(1)
    return out


def verify(folder: Path, name: str, key: str, fraction: float) -> report.Row:
    """Returns the row of the plan of a task; infeasible, with the reason, if it is missing or does not count.

    Args:
        folder: Folder of the submitted plans.
        name: Name of the task and of its file.
        key, fraction: The task's program, and its limit as a fraction of the peak.

    Returns:
        The row, with the floor.
    """
    program, machine = load(key)
    limit = int(fraction * program.peak_bytes)
    file = folder / f"{name}.json"
    try:
        plan = Plan.load(file)
        plan.check(program)
        row = report.score_plan(plan, program, machine, limit, 0)
    except (FormatError, PlanError) as error:
        row = report.row(program, machine, limit, "plan", 0, None, reason=str(error))
    return report.with_bounds({**row, "task": name}, floor(program, machine, limit))


if __name__ == "__main__":
    main()
