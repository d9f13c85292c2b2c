"""What language, credit, horizon and representation are worth to a masked PPO on one program, beside what does not
learn: examples/ppo_single_file.py with one setting changed at a time."""

from __future__ import annotations

import copy
import time
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributions import Categorical

import agents
from agents.floor import floor
from agents.learned.gap_graph import BINS, UNDECIDED, GapGraph
from agents.learned.policy import WEIGHTS
from agents.learned.policy_net import WAYS, batch_of, data_of, trained
from agents.learned.structure2vec import Structure2Vec
from agents.search.local_search import Moves
from agents.search.mutation import Mutation
from envs.graph import OBSERVED
from envs.task import KEEP, Task
from envs.tasks import TASKS, load
from experiments.common import cli
from experiments.common.report import Row, heuristics
from experiments.examples import ppo_single_file
from experiments.examples.behaviour_cloning import walk
from experiments.examples.ppo_single_file import MASKED, Args
from experiments.figures import attempt, chosen, grouped, integers
from experiments.figures.figure import Figure, Range
from experiments.figures.suite import WITHOUT, interval, iqm
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel
from simulator import Machine, simulate
from simulator.modes import KEPT, RECOMPUTED, STAYS, SWAPPED


class Nodes(nn.Module):
    """An agent of PPO that reads every node: ``network`` gives the scores (B, A) of the actions and a state (B, S) of
    nodes (B, N, F) and the current node (B,)."""

    def __init__(self, network: nn.Module, state: int, hidden: int, codes: Tensor, size: int):
        super().__init__()
        self.network, self.codes, self.size = network, codes, size
        self.last = torch.empty(0), torch.empty(0)  # states of ``policy``, and what the network says of them
        self.value = nn.Sequential(nn.Linear(state, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def policy(self, states: Tensor, masks: Tensor) -> Categorical:
        """Of what may be taken."""
        scores, state = self.network(*apart(states))
        self.last = states, state
        every = scores.new_full((len(scores), self.size), MASKED).index_copy(1, self.codes, scores)
        return Categorical(logits=every.masked_fill(~masks, MASKED))

    def critic(self, states: Tensor) -> Tensor:
        """Values (B, 1); what ``policy`` has just read is not read again."""
        state = self.last[1] if self.last[0] is states else self.network(*apart(states))[1]
        self.last = torch.empty(0), state
        out: Tensor = self.value(state)
        return out


def whole(observation: dict[str, np.ndarray]) -> tuple[Tensor, Tensor]:
    """All that is seen: nodes and, in a column behind them, which is the current one; the mask."""
    nodes, current = observation["nodes"], observation["current"]
    here = np.arange(nodes.shape[1]) == current[:, None]
    states = np.concatenate([nodes, here[..., None]], 2, dtype=np.float32)
    return torch.from_numpy(states), torch.from_numpy(observation["action_mask"] != 0)


def apart(states: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and the current node of ``whole``."""
    return states[..., :-1], states[..., -1].argmax(1)


class Graph(nn.Module):
    """structure2vec, as the DQN has it, with all features."""

    def __init__(self, task: Task, forms: int):
        super().__init__()
        self.reads = Structure2Vec(task.graph, OBSERVED, 16, 3, "mean", True, forms)
        self.codes, self.state = self.reads.codes, 32

    def forward(self, nodes: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
        """As of ``Nodes``."""
        return self.reads.with_graph_state(nodes.transpose(0, 1), current)


class Pretrained(nn.Module):
    """The policy's encoder, with the weights of the package, and a light head that reads what moves."""

    def __init__(self, task: Task, forms: int):
        super().__init__()
        graph = GapGraph(
            task.program, task.machine, task.limit, Moves(task.program, task.limit, task.mode, 2**20, 0), task.mode
        )
        self.data = batch_of([data_of(graph, np.full(len(graph), UNDECIDED))])
        self.encoder = copy.deepcopy(trained(WEIGHTS))
        index = {gap: i for i, gap in enumerate(graph.gaps)}
        of_task = np.array([*(index[gap] for gap in task.graph.gaps), len(graph)])  # the last one: do nothing
        ways = ((SWAPPED, task.offloads, task.offload_gap), (RECOMPUTED, task.removals, task.removal_gap),
                *(((KEPT, task.removals, task.removal_gap),) if forms > 1 else ()))  # fmt: skip
        acts = [[[0, -1, STAYS]], *(np.stack([node, gap, np.full(len(gap), way)], 1) for way, node, gap in ways)]
        self.node, gap, self.way = torch.from_numpy(np.concatenate(acts)).T
        self.gap = torch.from_numpy(of_task)[gap]
        self.codes = self.node + len(task.graph) * KEEP * (self.way == KEPT)
        place = np.minimum(task.start_ns * BINS // task.ideal_ns, BINS - 1)
        self.bin = torch.from_numpy(place[task.graph.kernel])
        width = self.state = int(self.encoder.settings["width"])
        self.nothing = nn.Parameter(torch.zeros(width))
        self.of_gap, self.place = nn.Linear(width, WAYS * width), nn.Linear(width, width)
        self.action, self.moment = nn.Linear(OBSERVED, width), nn.Linear(2 * OBSERVED, width)
        self.score = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, nodes: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
        """As of ``Nodes``."""
        gaps, bins = self.encoder.encode(self.data)
        of_gap = self.of_gap(torch.cat([gaps, self.nothing[None]])).unflatten(1, (WAYS, -1))[self.gap, self.way]
        moment = torch.cat([nodes.mean(1), nodes[torch.arange(len(nodes)), current]], 1)
        state = self.place(bins[0])[self.bin[current]] + self.moment(moment)
        return self.score(of_gap + self.action(nodes[:, self.node]) + state[:, None])[..., 0], state


READS = {"structure2vec": Graph, "policy": Pretrained}


def reading(kind: str, args: Args, task: Task, observation: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """What examples/ppo_single_file.py asks ``make`` for, with an agent that reads the graph."""
    size = observation["action_mask"].shape[1]
    network = READS[kind](task, size // len(task.graph))
    return Nodes(network, network.state, args.hidden, network.codes, size), whole


# ------------------------------------------------------------------------------------------ runs


def tasks(settings: DictConfig) -> list[Row]:
    """One per named task, agent and seed; raises UsageError where a setting is wrong."""
    config = cli.plain(settings)
    calls, seeds = cli.integer(settings, "calls", least=1), integers(settings, "seeds", 0)
    out: list[Row] = []
    for task, names in config["tasks"].items():
        if task not in TASKS:
            raise cli.UsageError(f"figure.tasks: there is no task {task!r}{cli.nearest(task, set(TASKS))}")
        for name in chosen(DictConfig({"agents": names}), "agents", config["agents"], "agent "):
            agent = config["agents"][name]
            if agent["agent"] not in RUNS or set(agent) - {"agent", "question", *SETTINGS}:
                known = f"agent, one of {', '.join(RUNS)}, question and {', '.join(SETTINGS)}"
                raise cli.UsageError(f"figure.agents.{name}: expected {known}")
            several = seeds if agent["agent"] not in ONCE else [0]
            out += [{"task": task, "name": name, **agent, "calls": calls, "seed": seed} for seed in several]
    return out


SETTINGS = ("actions", "reward", "reads", "min_bytes")


def run(task: Row, machine: Machine) -> Row:
    """Overheads (None: no plan) of the final policy and of the best plan, simulator calls, decisions an episode."""
    named = TASKS[task["task"]]
    program, on = load(named.program)
    case = Task(program, on, int(named.limit * program.peak_bytes), int(task.get("min_bytes", 2**20)), "joint")
    begin = time.process_time()
    found = RUNS[task["agent"]](task, case)
    bound = floor(program, on, case.limit).overhead
    spent = round(time.process_time() - begin, 1)
    return {"floor": bound, **{key: _kept(value) for key, value in found.items()}, "cpu_s": spent}


def _kept(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(value, 6)


def ppo(row: Row, task: Task) -> Row:
    """A training of examples/ppo_single_file.py: as many decisions as there are calls."""
    kind = {key: row[key] for key in SETTINGS if key in row and key != "reads"}
    args = Args(task=f"GpuMemory/{row['task']}-v0", steps=row["calls"], seed=row["seed"], num_envs=ENVS, hidden=HIDDEN,
                greedy_every=10**9, **kind)  # fmt: skip
    found = ppo_single_file.train(args, *([partial(reading, row["reads"])] if "reads" in row else []))
    return {"greedy": found.greedy, "best": found.best, "simulator_calls": found.calls, "decisions": found.decisions}


def search(row: Row, task: Task) -> Row:
    """A planner: annealing; the walks without a network: mutation; the policy; the DQN, whose best plan is greedy."""
    seed = row["seed"]
    made = {
        "mutation": lambda: Mutation(row["calls"], seed=seed, actions=row["actions"]),
        "annealing": lambda: agents.make("annealing", calls=row["calls"], seed=seed),
        "policy": lambda: agents.make("policy", seed=seed),
        "dqn": lambda: agents.make("dqn", calls=row["calls"], seed=seed),
    }[row["agent"]]()
    plan = attempt(made, task.program, task.machine, task.limit)
    best = None if plan is None else simulate(task.program, plan, task.machine, task.limit).overhead
    greedy = {"greedy": best} if row["agent"] == "dqn" else {}
    return {"best": best, **greedy, "simulator_calls": made.simulator_calls}


def walked(row: Row, task: Task) -> Row:
    """The walk that follows annealing's plan, in all forms: what the environment's actions can say of it."""
    planner = agents.make("annealing", calls=row["calls"], seed=row["seed"])
    found = walk(f"GpuMemory/{row['task']}-v0", planner.plan(task.program, task.machine, task.limit), row["seed"])
    return {"best": -found.rewards.sum(), "simulator_calls": planner.simulator_calls, "decisions": len(found.actions)}


def published(row: Row, task: Task) -> Row:
    """The best heuristic."""
    planners = [agents.make(name) for name in heuristics()]
    plans = [attempt(planner, task.program, task.machine, task.limit) for planner in planners]
    found = [simulate(task.program, plan, task.machine, task.limit).overhead for plan in plans if plan is not None]
    return {"best": min(found, default=None), "simulator_calls": sum(planner.simulator_calls for planner in planners)}


ENVS, HIDDEN = 32, 128  # of PPO: many updates of a small network
RUNS = {"ppo": ppo, "dqn": search, "mutation": search, "annealing": search, "policy": search, "walked": walked,
        "published": published}  # fmt: skip
ONCE = ("published",)  # without a seed


# ------------------------------------------------------------------------------------------ for people


def gaps(rows: list[Row], key: str) -> np.ndarray | None:
    """(1, seeds) points above the floor of the runs of an agent on a task; no plan: WITHOUT. None: there is no such
    number."""
    if not any(key in row for row in rows):
        return None
    points = [WITHOUT if row[key] is None else min(100 * (row[key] - row["floor"]), WITHOUT) for row in rows]
    return np.array([points])


def cell(values: np.ndarray | None) -> str:
    """The mean of the middle half and its interval."""
    return "" if values is None else f"{iqm(values):.2f} ({Range(interval(values)):.2f})"


def numbers(rows: list[Row]) -> Row:
    """Every agent on every task; what each setting is worth, beside the first agent."""
    lines, worth = [], []
    for task, every in grouped(rows, "task").items():
        agents_of = grouped(every, "name")
        base = next(iter(agents_of.values()))
        for name, runs in agents_of.items():
            first = runs[0]
            lines.append({
                "task": task, "name": name, "question": first["question"],
                "calls": round(fmean(run["simulator_calls"] for run in runs)),
                "decisions": round(fmean(run["decisions"] for run in runs)) if "decisions" in first else None,
                "greedy": cell(gaps(runs, "greedy")), "best": cell(gaps(runs, "best")),
                "cpu": fmean(run["cpu_s"] for run in runs),
            })  # fmt: skip
            if first["agent"] == base[0]["agent"] and runs is not base:
                differs = [iqm(gaps(base, key)) - iqm(gaps(runs, key)) for key in ("greedy", "best")]
                worth.append({"task": task, "name": name, "greedy": differs[0], "best": differs[1]})
    return {"lines": lines, "worth": worth, "steps": rows[0]["calls"], "seeds": len({row["seed"] for row in rows})}


def chart(rows: list[Row]) -> Chart:
    """A panel per task: the final policy filled, the best plan hollow."""
    panels = []
    for task, every in grouped(rows, "task").items():
        named, marks = grouped(every, "name"), []
        for y, runs in enumerate(named.values()):
            for key, ink, hollow in (("best", "#1f5fa8", True), ("greedy", "#d6336c", False)):
                values = gaps(runs, key)
                if values is not None:
                    ends = [max(end, LEAST) for end in interval(values)]
                    label = {"best": "best plan", "greedy": "final policy"}[key] if not y else ""
                    marks += [Line(ends, [y, y], ink, width=5, alpha=0.3),
                              Line([max(iqm(values), LEAST)], [y], ink, label, "o", "", hollow=hollow)]  # fmt: skip
        x = Axis("gap to the floor, points", "{:g}", (LEAST, 1.3 * WITHOUT), "log", [0.1, 1, 10, 100])
        panels.append(Panel(task, list[Mark](marks), x, Axis(names=list(named))))
    height = 0.3 * max(len(grouped(panel, "name")) for panel in grouped(rows, "task").values()) + 1.1
    title = "What language, credit, horizon and representation are worth: interquartile means and their intervals"
    return Chart(title, panels, 2, (4.2, height), (2.6, 0.4))


LEAST = 0.03  # of the picture
FIGURE = Figure("actions", tasks, run, numbers, chart, on_demand=True)
