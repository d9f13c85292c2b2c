"""Train one DQN on many programs, machines and limits, and plan what it has not seen: as it is, after fine-tuning, and
from scratch (agents/learned/program_dqn.py; the DQN paper, section 4.4.2).

    python -m experiments.pretrain out=runs/pretrain                        # makes the programs
    python -m experiments.train_program_dqn programs=runs/pretrain/programs out=runs/program_dqn

What is in ``out`` is not made again: a run goes on where it was stopped. Files: state-<seed>.pt, a training's state;
weights-<seed>.pt; results-<seed>.jsonl, a row per method and task; and program_dqn.json, all of them with their means.
An episode costs one simulator call: rewards are by the clock (envs/compiled_walk.py), its plan is simulated at the end.
"""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig
from rich.table import Table

from agents.floor import floor
from experiments.common import cli, report
from experiments.common.curves import BEST, FEASIBLE, GREEDY, Running
from experiments.common.endings import goes_on
from experiments.figures import program as workload
from experiments.pretrain import LIMITS, random_machine
from simulator.files import write_json, write_text
from simulator.limits import limit_bytes
from simulator.machine import Machine
from simulator.program import Program

if TYPE_CHECKING:
    from agents.learned.program_dqn import Case, Learner, ProgramDQNConfig, QNet

LEAST_GAPS = 4  # that the walk of a task chooses from
TRIED = 500  # simulator calls of the search that says whether a task has a good plan
HEAT = 0.03  # of the walks that are drawn by their Q-values
WHAT = "a program DQN"
Row = dict[str, Any]


@cli.entry("train_program_dqn")
@goes_on
def main(cfg: DictConfig) -> None:
    folder, out = cli.path(cfg, "programs"), cli.path(cfg, "out") or Path("runs/program_dqn")
    files = sorted(folder.glob("*.json*")) if folder is not None else []
    if not files:
        raise cli.UsageError(f"programs: there is no program/1 file in {folder}")
    count, most, calls = (cli.integer(cfg, key, 1) for key in ("tasks", "most_kernels", "calls"))
    seeds = cli.values(cfg, "seeds")
    planners = report.planner_names(cli.values(cfg, "planners"), calls=calls) if cfg.planners else []

    from agents.learned.optimisation import one_thread  # a mistyped key is answered before
    from agents.learned.program_dqn import Learner, ProgramDQNConfig, QNet
    from agents.learned.training_state import read_weights, save_weights

    one_thread()
    config = cli.dataclass_of(ProgramDQNConfig, cfg.training, "training")
    tuning = cli.dataclass_of(ProgramDQNConfig, cfg.tuning, "tuning")
    if tuning.tasks != 1 or calls <= (tuning.iterations + 1) * tuning.walks + tuning.guide_calls:
        raise cli.UsageError("tuning: expected one task, and fewer episodes than there are calls")
    out.mkdir(parents=True, exist_ok=True)
    with report.held(out):
        log, cases = report.console(stderr=True), None
        for seed in seeds:
            weights, state = out / f"weights-{seed}.pt", out / f"state-{seed}.pt"
            if weights.exists():
                continue
            cases = cases or drawn(files, count, most, cli.integer(cfg, "data_seed"))
            learner = Learner(cases, config, int(seed))
            if state.exists():
                learner.load(state)
            train(learner, state, out / f"log-{seed}.jsonl", log)
            save_weights(learner.net, weights)
        rows: list[Row] = []
        for seed in seeds:
            net, path = read_weights(out / f"weights-{seed}.pt", QNet, WHAT), out / f"results-{seed}.jsonl"
            found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            done = {(r["workload"], r["machine"], r["limit_fraction"]) for r in found}
            left = [one for one in tested(cfg) if (one[0].name, one[1].name, one[2]) not in done]
            with report.progress() as bar:
                shown = bar.add_task("planning", total=len(left))
                for program, machine, fraction in left:
                    bar.update(shown, description=f"planning {program.name} on {machine.name}, {fraction:.0%}")
                    found += compared(net, program, machine, fraction, config, tuning, calls, planners, int(seed))
                    write_text(path, "".join(json.dumps(row) + "\n" for row in found))
                    bar.advance(shown)
            rows += found
        means = summarised(rows)
        write_json(out / "program_dqn.json", {
            "command": report.command(), "training": asdict(config), "tuning": asdict(tuning), "calls": calls,
            "trained_s": {str(seed): trained_s(out / f"log-{seed}.jsonl") for seed in seeds},
            "means": means, "rows": rows,
        }, indent=1)  # fmt: skip
        table = Table(
            "method", "calls", "gap, points: mean", "median", "range of the seeds' means", "no plan", box=None
        )
        for m in means:
            low, high = min(m["seeds"]), max(m["seeds"])
            table.add_row(m["method"], f"{m['calls']:,}", f"{m['mean']:.2f}", f"{m['median']:.2f}",
                          f"{low:.2f} to {high:.2f}", str(m["infeasible"]))  # fmt: skip
        report.console().print(table)
        print(out)


def drawn(files: list[Path], count: int, most: int, seed: int) -> list[Case]:
    """Tasks of programs of at most ``most`` kernels, of random machines and limits, for which there is a good plan."""
    from agents.learned.expert_iteration import MOST, reachable
    from agents.learned.program_dqn import Case
    from executor.capture.roofline import with_roofline

    programs = [p for p in map(Program.load, files) if len(p.kernels) <= most]
    if not programs:
        raise cli.UsageError(f"most_kernels: no program has as few as {most}")
    rng, out = random.Random(f"{seed}"), []
    for turn in range(4 * count):
        machine = random_machine(rng)
        program = with_roofline(programs[turn % len(programs)], machine)
        limit = reachable(program, machine, int(rng.uniform(*LIMITS) * program.peak_bytes), "joint")
        case = Case(program, machine, limit)
        if len(case.gap) >= LEAST_GAPS and case.annealed(TRIED, 0)[1] < MOST:  # infinite where none fits
            out.append(case)
        if len(out) == count:
            break
    return out


def train(learner: Learner, state: Path, log: Path, console: Any) -> None:
    """All iterations that are left; the state is kept every 20th, and a line of the log written."""
    start = time.perf_counter()
    lines: list[Row] = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    lines = [line for line in lines if line["iteration"] <= learner.iteration]
    before = lines[-1]["seconds"] if lines else 0.0
    greedy: list[float] = []
    running, config = Running(), learner.config
    for _ in report.tracked(range(learner.iteration, learner.config.iterations), "training, iteration", console):
        overheads = learner.iterate().overhead.tolist()
        greedy += overheads[:: config.walks]
        for overhead in overheads:
            running.episode(overhead)
        if learner.iteration % 20 == 0 or learner.iteration == learner.config.iterations:
            best = [overhead for overhead, _ in learner.guides.values() if np.isfinite(overhead)]
            searched = config.guide_calls * len(learner.guides) if config.guided else 0
            found = [overhead for overhead in greedy if np.isfinite(overhead)]
            scalars = {**running.values(), BEST: np.mean(best) if best else math.nan,
                       GREEDY: np.mean(found) if found else math.nan}  # fmt: skip
            lines.append({
                "iteration": learner.iteration, "seconds": round(before + time.perf_counter() - start, 1),
                "calls": learner.iteration * config.tasks * config.walks + searched, "train/loss": learner.loss,
                **{key: float(v) if math.isfinite(v) else None for key, v in scalars.items()},
            })  # fmt: skip
            learner.save(state)
            write_text(log, "".join(json.dumps(line) + "\n" for line in lines))
            console.print(
                f"iteration {learner.iteration}: loss {learner.loss:.3f}, greedy overhead {scalars[GREEDY]:.2%}, "
                f"{scalars[FEASIBLE]:.0%} of the last walks feasible, {lines[-1]['seconds']:.0f} s"
            )
            greedy = []


def trained_s(log: Path) -> float:
    """Seconds of training, by the last line of the log."""
    return float(json.loads(log.read_text().splitlines()[-1])["seconds"])


def tested(cfg: DictConfig) -> Iterator[tuple[Program, Machine, float]]:
    """The tasks of ``test``: a program, a machine, and the limit as a fraction."""
    for name in cli.values(cfg.test, "workloads"):
        for preset in cli.values(cfg.test, "machines"):
            machine = Machine.load(preset)
            program = workload(str(name), machine)
            for limit in cli.values(cfg.test, "limits"):
                yield program, machine, float(limit)


def compared(
    net: QNet, program: Program, machine: Machine, fraction: float, config: ProgramDQNConfig,
    tuning: ProgramDQNConfig, calls: int, planners: list[str], seed: int,
) -> list[Row]:  # fmt: skip
    """Rows of all methods on a task: the greedy policy, the best plan of so many episodes, and the search from it."""
    from agents.learned.program_dqn import Case, Learner, fresh

    limit = limit_bytes(fraction, program)
    case, rows = Case(program, machine, limit), []
    bound = floor(program, machine, limit)

    def add(method: str, overhead: float, spent: int, began: float) -> None:
        fits = bool(np.isfinite(overhead))
        rows.append({
            "workload": program.name, "machine": machine.name, "limit_fraction": fraction, "seed": seed,
            "method": method, "calls": spent, "seconds": round(time.perf_counter() - began, 3),
            "overhead": float(overhead) if fits else None, "bound_overhead": bound.overhead,
            "gap": float(overhead) - bound.overhead if fits else None,
        })  # fmt: skip

    kept = replace(tuning, width=config.width, layers=config.layers, encoder=config.encoder)
    starts = {"zero-shot": (copy.deepcopy(net), 0), "fine-tuned": (copy.deepcopy(net), kept.iterations),
              "from scratch": (fresh([case], kept, seed), kept.iterations)}  # fmt: skip
    for name, (start, iterations) in starts.items():
        began = time.perf_counter()
        learner = Learner([case], kept, seed, start)
        found = [learner.iterate() for _ in range(iterations)]
        heat = np.where(np.arange(kept.walks), HEAT, 0.0)
        last, _ = learner.walk(np.zeros(kept.walks, np.int64), np.zeros(kept.walks), heat)
        add(f"{name}, greedy", last.overhead[0], 1 + kept.walks * iterations, began)
        overhead, plan = min(
            ((o, p) for one in [*found, last] for o, p in zip(one.overhead, one.plans, strict=True)),
            key=lambda pair: pair[0],
        )
        spent = kept.walks * (iterations + 1)
        add(f"{name}, best walk", overhead, spent, began)
        _, overhead = case.annealed(calls - spent, seed, plan if np.isfinite(overhead) else None)
        add(f"{name}, and search", overhead, calls, began)
    began = time.perf_counter()
    add("search alone", case.annealed(calls, seed)[1], calls, began)
    for name in planners:
        began = time.perf_counter()
        row, _ = report.score(name, program, machine, limit, seed, calls=calls)
        add(name, row["overhead"] if row["feasible"] else np.inf, row["simulator_calls"], began)
    return rows


def summarised(rows: list[Row]) -> list[Row]:
    """Of each method: mean and median gap in points over the tasks where it has a plan, of each seed the mean."""
    out = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        gaps = [100 * row["gap"] for row in mine if row["gap"] is not None]
        seeds = dict.fromkeys(row["seed"] for row in mine)
        each = [[100 * r["gap"] for r in mine if r["seed"] == seed and r["gap"] is not None] for seed in seeds]
        out.append({
            "method": method, "calls": max(row["calls"] for row in mine), "mean": float(np.mean(gaps)),
            "median": float(np.median(gaps)), "seeds": [float(np.mean(g)) for g in each],
            "infeasible": len(mine) - len(gaps), "seconds": float(np.mean([row["seconds"] for row in mine])),
        })  # fmt: skip
    return out


if __name__ == "__main__":
    main()
