"""Make weights: capture programs; then train the policy on annealing's plans and its own (expert_iteration.py), or the
DQN on edits (pretrain_edits.py), whose start plans are the policy's.

    python -m experiments.pretrain out=runs/pretrain
    python -m experiments.pretrain out=runs/pretrain seed=1 training.width=32
    python -m experiments.pretrain out=runs/pretrain agent=dqn dqn.message_passing=false

What is in ``out`` is not made again: a run goes on where it was stopped, and trainings share programs and plans. Files:
programs/0000.json.gz, …; times/0000.json, … with the kernel times of its tasks; edits.jsonl, tasks of the DQN;
lessons-0.jsonl, annealing's plans, a line per task; lessons-1.jsonl, those that the first network to get there found,
too; structure2vec-<seed>/ and dqn-<seed>/ with the state, log.jsonl and the weights. See agents/learned/README.md.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig
from rich.progress import Progress, TaskID

from experiments.common import cli, report, workers
from experiments.common.endings import goes_on
from simulator.files import FormatError, load_json, write_json
from simulator.machine import PRESETS, Machine
from simulator.program import Program

if TYPE_CHECKING:
    from agents.learned.expert_iteration import Lesson

Network = dict[str, list[Any]]  # the values of each setting of a workload

MOST_KERNELS, LEAST_GAPS, MOST_GAPS = 2600, 8, 1500  # of a program
LIMITS = 0.3, 0.8  # of the peak
JOINT = 0.8  # of the tasks; the rest swap or recompute
# What each direction (in, out) carries of its own rate while both are busy: nvbandwidth has about 0.5 and 0.95 of
# A100s, 0.95 and 0.62 of H800s.
SHARES = *[(1.0, 1.0)] * 3, (0.5, 0.95), (0.95, 0.62), (0.75, 0.75), (0.85, 0.85)
CAPTURED_ON = "v100"  # the durations are set by the machine of each task
MODELLED = 0.6  # of the tasks: kernel times are the model's of some GPU, the others' a roofline's
SCATTER = 0.2  # of the logarithm of a modelled GPU's rates
SHARES_OF_PEAK = ("elementwise", "norm", "pool", "pool_backward", "conv", "conv_backward", "conv_1x1",
                  "conv_1x1_backward", "conv_bandwidth", "conv_float32", "conv_float32_backward", "matmul",
                  "matmul_float32", "attention")  # fmt: skip
VALIDATED = 48  # tasks of the families that are held out


def words_of(typed: list[str]) -> list[str]:
    """The words of a command line: ``agent=`` is ``network=`` here, since it names a group of configs elsewhere."""
    return [f"network={word[6:]}" if word.startswith("agent=") else word for word in typed]


@cli.entry("pretrain", prepare=words_of)
@goes_on
def main(cfg: DictConfig) -> None:
    sets = [check_set(i, one) for i, one in enumerate(cli.values(cfg, "sets"))]
    held_out = set(cli.values(cfg, "held_out"))
    unknown = held_out - {name for _, networks in sets for network in networks for name in network["family"]}
    if unknown:
        raise cli.UsageError(f"held_out: no network is of family {sorted(unknown)[0]!r}")
    each, seed = cli.integer(cfg, "tasks", 1), cli.integer(cfg, "data_seed")
    net_seed, rounds, at = cli.integer(cfg, "seed"), cli.integer(cfg, "rounds"), cli.launcher(cfg)
    out = cli.path(cfg, "out") or Path("runs/pretrain")
    edits = cli.choice(cfg, "network", ("policy", "dqn")) == "dqn"
    some = cli.values(cfg, "dqn_programs")
    fits = len(some) == len(sets) and all(type(n) is int and 0 <= n <= sets[i][0] for i, n in enumerate(some))
    if edits and not fits:
        raise cli.UsageError(f"dqn_programs: expected {len(sets)} integers, at most those of each set, got {some}")

    from agents.learned import expert_iteration as learning  # a mistyped key is answered before
    from agents.learned.checkpoint import save_weights
    from agents.learned.dqn_config import Args
    from agents.learned.optimisation import one_thread

    settings = cli.dataclass_of(learning.Training, cfg.training, "training")
    args = cli.dataclass_of(Args, cfg.dqn, "dqn")
    one_thread()
    folder = out / f"structure2vec-{net_seed}"
    for made in (out / "programs", out / "times", *(() if edits else (folder,))):
        made.mkdir(parents=True, exist_ok=True)
    with report.held(out):
        drawn_from = [networks for programs, networks in sets for _ in range(programs)]  # of each program
        count = len(drawn_from)
        first = [sum(programs for programs, _ in sets[:k]) for k in range(len(sets))]
        chosen = [i for k, n in enumerate(some) for i in range(first[k], first[k] + n)] if edits else range(count)
        todo = [(out, drawn_from[i], seed, i, each) for i in chosen if timed(out, i) < each]
        run(capture_one, todo, at, "capturing programs", lambda _: None)
        if edits:
            from experiments import pretrain_edits

            with Lines(out / "edits.jsonl") as lines:
                jobs = [(out, seed, i, j) for i in chosen for j in range(each)]
                run(pretrain_edits.prepare, jobs[lines.count :], at, "preparing tasks", lines.add)
            print(pretrain_edits.train(out, args, net_seed, cli.path(cfg, "weights")))
            return
        with Lines(out / "lessons-0.jsonl") as lines:
            tasks = [(out, seed, i, j) for j in range(each) for i in range(count)]  # more of them: the first ones stay
            run(plan_one, tasks[lines.count :], at, "planning tasks", lines.add)

        log, net = report.console(stderr=True), None
        for round_ in range(rounds + 1):
            if round_ and net is not None:
                save_weights(net, folder / f"round-{round_ - 1}.pt")
                with Lines(out / f"lessons-{round_}.jsonl") as lines:
                    before = (out / f"lessons-{round_ - 1}.jsonl").read_text().splitlines()
                    tasks = [(out, line, folder / f"round-{round_ - 1}.pt", i) for i, line in enumerate(before)]
                    run(plan_again, tasks[lines.count :], at, "planning them with the network", lines.add)
            lessons = [lesson for lesson in read_lessons(out, round_) if lesson.teaches]
            kept = [lesson for lesson in lessons if family(lesson) in held_out][:VALIDATED]
            examples = [learning.Example(lesson) for lesson in lessons if family(lesson) not in held_out]
            if not examples or not kept:
                raise cli.UsageError(
                    f"{out}: too few tasks to learn from, or none to validate with: make more programs"
                )
            if net is None:
                net = learning.network(examples, settings, net_seed)
            log.print(f"round {round_}: {len(examples)} tasks to learn from, {len(kept)} to validate with")

            bar = report.progress(log)
            shown = bar.add_task("training", total=settings.epochs)

            def watch(entry: dict[str, Any], round_: int = round_, bar: Progress = bar, shown: TaskID = shown) -> None:
                bar.update(shown, completed=entry["epoch"])
                log.print(
                    f"epoch {entry['epoch']}: loss {entry['loss']:.4f}, {entry['validation']:.3f} points above the best"
                )
                with (folder / "log.jsonl").open("a") as file:
                    file.write(json.dumps({"round": round_, **entry}) + "\n")

            state = folder / f"state-{round_}.pt"
            with bar:
                net = learning.train(net, examples, kept, settings, net_seed + 1000 * round_, state, watch)
        weights = cli.path(cfg, "weights") or folder / "policy.pt"
        save_weights(net, weights)
        print(weights)


def check_set(i: int, entry: Any) -> tuple[int, list[Network]]:
    """How many programs, and the networks to draw them from; raises UsageError naming the entry."""
    if not isinstance(entry, dict) or set(entry) != {"programs", "networks"}:
        raise cli.UsageError(f"sets[{i}]: expected a mapping with programs and networks, got {entry!r}")
    programs, networks = entry["programs"], entry["networks"]
    if isinstance(programs, bool) or not isinstance(programs, int) or programs < 1:
        raise cli.UsageError(f"sets[{i}].programs: expected an integer of at least 1, got {programs!r}")
    if not isinstance(networks, list) or not networks:
        raise cli.UsageError(f"sets[{i}].networks: expected a list of networks, got {networks!r}")
    return programs, [check_network(f"sets[{i}].networks[{j}]", one) for j, one in enumerate(networks)]


def check_network(where: str, entry: Any) -> Network:
    """Lists of the values of each setting; raises UsageError that says ``where``."""
    if not isinstance(entry, dict) or not isinstance(entry.get("family"), str):
        raise cli.UsageError(f"{where}: expected a mapping with family, got {entry!r}")
    lists = {str(key): value if isinstance(value, list) else [value] for key, value in entry.items()}
    for key, values in lists.items():
        if not values:
            raise cli.UsageError(f"{where}.{key}: expected at least one value")
    return lists


def program_path(out: Path, i: int) -> Path:
    """Where program ``i`` is kept."""
    return out / "programs" / f"{i:04d}.json.gz"


def times_path(out: Path, i: int) -> Path:
    """Where the kernel times of the tasks of program ``i`` are kept."""
    return out / "times" / f"{i:04d}.json"


def timed(out: Path, i: int) -> int:
    """The tasks of a program whose kernel times are known; raises FormatError."""
    return len(read_times(times_path(out, i))) if times_path(out, i).exists() else 0


def run(
    work: Callable[[Any], Any], tasks: Sequence[Any], at: tuple[str, int | None], what: str, done: Callable[[Any], None]
) -> None:
    """``done`` with the result of each task, in their order. ``at``: a launcher, and how many at once
    (common/workers.py); this process does them where one process is to."""
    if not tasks:
        return
    waiting: dict[int, Any] = {}
    following = 0
    with report.progress() as bar:
        shown = bar.add_task(what, total=len(tasks))
        here = ((i, work(task)) for i, task in enumerate(tasks))
        for i, result in here if at == ("processes", 1) else workers.results(*at, work, [(task,) for task in tasks]):
            if isinstance(result, Exception):
                raise result
            waiting[i] = result
            while following in waiting:
                done(waiting.pop(following))
                following += 1
            bar.advance(shown)


class Lines:
    """A file of JSON lines that grows; the last one is dropped where it was cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines(True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        self.count = len(whole)
        if len(whole) < len(lines):  # else it is left as it is: another training may read it
            path.write_text("".join(whole))

    def __enter__(self) -> Lines:
        self.file = self.path.open("a")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def add(self, entry: Any) -> None:
        """Writes an entry as one line of JSON, at once."""
        self.file.write(json.dumps(entry, separators=(",", ":")) + "\n")
        self.file.flush()


def capture_one(task: tuple[Path, list[Network], int, int, int]) -> None:
    """Captures a network drawn at random, again where it is too small or too large, and writes the program and the
    durations of its kernels on the machine of each task."""
    from experiments import workloads

    out, networks, seed, i, each = task
    rng = random.Random(f"{seed}:{i}")
    machine = Machine.load(CAPTURED_ON)
    while True:
        chosen = {key: rng.choice(values) for key, values in rng.choice(networks).items()}
        captured = workloads.load({"name": chosen["family"], **chosen}, machine)
        program = captured.program
        gaps = len(program.gaps(2**20))
        if len(program.kernels) <= MOST_KERNELS and LEAST_GAPS <= gaps <= MOST_GAPS:
            machines = [drawn_machine(task_rng(seed, i, j)) for j in range(each)]
            write_json(
                times_path(out, i),
                [[k.duration_ns for k in captured.on(machine).program.kernels] for machine in machines],
            )
            program.save(program_path(out, i))
            return


def task_rng(seed: int, i: int, j: int) -> random.Random:
    """What draws a task: its machine first."""
    return random.Random(f"{seed}:{i}:{j}")


def drawn_machine(rng: random.Random) -> Machine:
    """Of MODELLED of ten a machine with the time model, else one with a roofline."""
    return modelled_machine(rng) if rng.random() < MODELLED else random_machine(rng)


def modelled_machine(rng: random.Random) -> Machine:
    """A GPU with a model of kernel times, its rates and shares off by SCATTER, on a random machine's link."""
    link = random_machine(rng)
    gpu = rng.choice([m for m in map(Machine.load, sorted(p.stem for p in PRESETS.glob("*.yaml"))) if m.kernel_times])
    times = gpu.kernel_times
    assert times is not None

    def off(rate: float, most: float = math.inf) -> float:
        return min(most, rate * math.exp(rng.gauss(0, SCATTER)))

    shares = {name: off(value, 1.0) for name, value in vars(times).items() if name in SHARES_OF_PEAK}
    return replace(
        link, memory_bytes_per_s=int(off(gpu.memory_bytes_per_s)), kernel_times=replace(times, **shares),
        flops_per_s={dtype: int(off(rate)) for dtype, rate in gpu.flops_per_s.items()},
    )  # fmt: skip


def random_machine(rng: random.Random) -> Machine:
    """FLOP rates from a small GPU's to a large one's, links of 4 to 60 GB/s, one copy engine or two."""

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    flops, link = between(4e12, 2e14), between(4e9, 6e10)
    kinds = ("conv", "matmul", "default", "norm", "elementwise", "reduce")
    h2d, (h2d_share, d2h_share) = link * rng.uniform(0.85, 1.1), rng.choice(SHARES)
    latency_ns = rng.choice([5_000, 10_000, 20_000])
    return Machine(
        name="random", memory_bytes=2**50, d2h_bytes_per_s=int(link), h2d_bytes_per_s=int(h2d),
        d2h_latency_ns=latency_ns, h2d_latency_ns=latency_ns, copy_engines=1 if rng.random() < 0.1 else 2,
        duplex_h2d_bytes_per_s=int(h2d_share * h2d), duplex_d2h_bytes_per_s=int(d2h_share * link),
        host_bytes=2**50, flops_per_s={"float32": int(flops), "bfloat16": int(flops)},
        memory_bytes_per_s=int(flops * between(0.03, 0.12)), launch_ns=int(between(1_500, 8_000)),
        efficiency={kind: rng.uniform(0.35, 0.95) for kind in kinds},
    )  # fmt: skip


def plan_one(task: tuple[Path, int, int, int]) -> dict[str, Any]:
    """The teacher's plans of a task drawn at random: a line of lessons-0.jsonl. No plans: nothing is to be learned."""
    from agents.learned.expert_iteration import first_plans, reachable
    from simulator.modes import MODES

    out, seed, i, j = task
    rng = task_rng(seed, i, j)
    machine = drawn_machine(rng)
    program = on_task(out, i, j)
    mode = "joint" if rng.random() < JOINT else rng.choice([m for m in MODES if m != "joint"])
    limit = reachable(program, machine, int(rng.uniform(*LIMITS) * program.peak_bytes), mode)
    plans = first_plans(program, machine, limit, mode)
    return {"program": i, "task": j, "machine": machine.to_dict(), "limit": limit, "mode": mode,
            "plans": [[ns, rows.tolist()] for ns, rows in plans]}  # fmt: skip


def plan_again(task: tuple[Path, str, Path, int]) -> dict[str, Any]:
    """A line of the next lessons: a task's plans, and those that the search finds with the network."""
    from agents.learned.expert_iteration import better_plans
    from agents.learned.policy_net import trained

    out, line, weights, seed = task
    entry: dict[str, Any] = json.loads(line)
    lesson = lesson_of(out, entry)
    if lesson.teaches:
        entry["plans"] = [[ns, rows.tolist()] for ns, rows in better_plans(trained(weights), lesson, seed)]
    return entry


def read_lessons(out: Path, round_: int) -> list[Lesson]:
    """All lessons of a round; raises FormatError naming the line."""
    path, found = out / f"lessons-{round_}.jsonl", []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            found.append(lesson_of(out, json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path}: line {number} is no task with plans ({error})") from None
    return found


@cache
def captured(out: Path, i: int) -> Program:
    """Program ``i``, read once."""
    return Program.load(program_path(out, i))


def read_times(path: Path) -> list[list[int]]:
    """Of each task of a program, ns per kernel."""

    def read(data: object) -> list[list[int]]:
        if not isinstance(data, list) or any(not isinstance(row, list) for row in data):
            raise FormatError("expected a list of ns per kernel for each task")
        return data

    return load_json(path, read)


@cache
def kernel_times(out: Path, i: int) -> list[list[int]]:
    """See ``read_times``; read once."""
    return read_times(times_path(out, i))


def on_task(out: Path, i: int, j: int) -> Program:
    """A program with the kernel times of its task ``j``."""
    return captured(out, i).with_durations(kernel_times(out, i)[j])


def lesson_of(out: Path, entry: dict[str, Any]) -> Lesson:
    """What the policy learns of a line of plans."""
    from agents.learned.expert_iteration import Lesson

    machine = Machine.from_dict(entry["machine"])
    program = on_task(out, entry["program"], entry["task"])
    plans = [(int(ns), np.array(rows, np.int64).reshape(-1, 6)) for ns, rows in entry["plans"]]
    return Lesson(program, machine, int(entry["limit"]), str(entry["mode"]), plans)


def family(lesson: Lesson) -> str:
    """Programs are named after their family."""
    return lesson.program.name


if __name__ == "__main__":
    main()
