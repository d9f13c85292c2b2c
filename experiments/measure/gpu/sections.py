"""Sections of the 15 minutes on a GPU: each measures one subject beside its prediction and its bars (bars.py).

Plans come from files (plan_files.py), so that no GPU time goes into planning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from executor import PlannedStep, PlannedSteps, StepError
from executor.memory.engines import line
from experiments.measure.gpu import pytorch_baselines as baselines
from experiments.measure.gpu.bars import GRAPH, KERNELS, verdicts
from experiments.measure.gpu.branches import copy_rates
from experiments.measure.gpu.largest_batch import Tries
from experiments.measure.gpu.plan_files import AIMS, Form, load_plans, make_plan, prepare, program_file
from experiments.measure.gpu.pytorch_baselines import Trial, build_eager_graph, build_eager_step, limit_at
from experiments.measure.gpu.stages import HOST, Run
from experiments.measure.gpu.traces import traced
from experiments.measure.gpu.training import Case, time_beside_eager, without_batch_swaps
from experiments.measure.networks import Network, allocated_bytes, build, free_cache, limit_of, timed
from simulator import Machine, Plan, Program, simulate
from simulator.files import write_json
from simulator.schedule import lower

COMMITTED = Path(__file__).resolve().parents[2] / "results" / "gpu_h200"
MACHINE = COMMITTED / "machine_make_gpu.yaml"
FRACTION = 0.7
# Network of a section -> its name, its committed program, and its stand-in with backend=host.
NETWORKS = {
    "resnet": ("resnet50_imagenet_bf16", "resnet50_imagenet_bf16", "tiny_resnet"),
    "llama": ("llama_bf16", "llama_fused_bf16", "tiny_llama_bf16"),
    "gpt2": ("gpt2_medium_bf16", "gpt2_medium_bf16", "tiny_gpt2"),
}
SHORT = ("compile", "gpt2", "tight")  # the sections of five minutes
MARGIN_BYTES = 64 * 2**20  # free beside the limit in section tight
TIGHT_STEPS = 50


@dataclass(frozen=True)
class Probe(Run):
    """One run of one section; its rows have ``section``, ``what``, ``predicted``, ``measured`` and details."""

    section: str

    @property
    def machine(self) -> Machine:
        """Machine that the plans are for: the committed measurement of the GPU, or the host backend's."""
        return Machine.load(MACHINE) if self.settings.backend == "cuda" else HOST

    @property
    def plans(self) -> Path:
        """Folder of programs and plans: committed for a GPU, of this results folder for a rehearsal."""
        return COMMITTED / "plans" if self.settings.backend == "cuda" else self.record.out / "plans"

    def network(self, name: str) -> str:
        """Returns the name of a section's network, or of its tiny stand-in with backend=host."""
        return network_of(name, self.settings.backend)

    def add(self, what: str, **entries: Any) -> None:
        """Adds a row of this section with the verdicts of its bars, unless an earlier command did."""
        row = {"section": self.section, "what": what, **entries}
        if not self.record.has(section=self.section, what=what):
            self.record.add(**row, **verdicts(row))

    def measure(self, what: str, function: Callable[[], dict[str, Any]]) -> None:
        """Adds the row of a measurement with the verdicts of its bars, as ``Record.measure`` does."""
        key = {"section": self.section, "what": what}

        def measured() -> dict[str, Any]:
            row = function()
            return row | verdicts(key | row)

        self.record.measure(key, measured)


def network_of(name: str, backend: str) -> str:
    """Returns the network of a section, by backend."""
    return NETWORKS[name][0 if backend == "cuda" else 2]


def committed_program(name: str) -> Program:
    """Returns the program, with durations measured on an H200, that plans of a section's network are made for."""
    return Program.load(COMMITTED / "traces" / f"{NETWORKS[name][1]}-program.json.gz")


# ------------------------------------------------------------------------------------------- planned steps


def planned_steps(probe: Probe) -> None:
    """Times planned steps of the section's network, as a graph and per kernel, against eager steps."""
    for form in ("graph", "kernels"):
        time_planned(probe, probe.network(probe.section), form)


def time_planned(probe: Probe, name: str, form: Form, fraction: float = FRACTION) -> None:
    """Times a planned step against eager steps and records the row.

    Args:
        probe: settings and record of the section.
        name: network name.
        form: whether the step runs as a CUDA graph (on the CPU kernel by kernel). If its memory exceeds the limit, the
            next plan is tried.
        fraction: limit as a fraction of the activation peak.
    """
    graph = form == "graph"
    device = probe.settings.device
    machine = probe.machine
    costs = machine.in_graph() if graph else machine

    def measured() -> dict[str, Any]:
        row = {}
        if probe.section == "resnet" and device == "cuda":  # its eager steps are limited by the host
            row["eager_graph_ns"] = sorted(timed(build_eager_graph(name), 10, device))[5]
            free_cache()
        eager = build_eager_step(name, device)
        held_bytes = allocated_bytes(device)
        network = build(name, device)
        prepared = prepare(network.captured(machine, check=False), probe.plans, name, fraction, form, device, machine)
        program = prepared.captured.program
        limit = limit_of(program, fraction)
        reasons = []
        for plan in prepared.plans:
            case = Case(name, program, fraction, limit)
            if graph:
                case, plan = without_batch_swaps(case, plan)
            try:
                with PlannedStep(
                    prepared.captured, plan, machine, case.limit, graph=graph and device == "cuda"
                ) as step:
                    steps = 16 if device == "cuda" else 4
                    times = time_beside_eager(step, network.batch, eager, steps, device, held_bytes)
                    if device == "cuda":
                        save_trace(plan, lambda: step(*network.batch))
            except StepError as error:
                reasons.append(f"planned for {plan.limit:,} bytes: {line(error)}")
                continue
            return row | {
                "predicted": simulate(program, plan, costs, executed_limit(program, plan, case.limit)).iteration_ns,
                "measured": times["measured_ns"],
                "eager_ns": times["eager_ns"],
                "host_ns": times["host_ns"],
                "limit": case.limit,
                "planned_for": plan.limit,
                "planned_here": prepared.planned_here,
                "ideal_ns": program.ideal_ns,
                "peak": times["ledger"],
                **({"allocated": times["device_peak"]} if device == "cuda" else {}),
            }
        return {"failed": "; ".join(reasons)[:400]}

    def save_trace(plan: Plan, step: Callable[[], object]) -> None:
        saved = probe.record.out / f"{name}-{fraction}-{form}"
        plan.save(f"{saved}-plan.json")
        try:
            write_json(f"{saved}-trace.json.gz", traced(step, 3, probe.record.out))
        except Exception as error:  # the measurement is complete without it
            probe.add(f"trace of {name}, {form}", failed=line(error))

    probe.measure(f"{name} {fraction} {GRAPH if graph else KERNELS}", measured)


def executed_limit(program: Program, plan: Plan, limit: int) -> int:
    """Returns the limit in bytes whose simulation times a step's copies: the plan's, if its own is feasible."""
    return max(min(limit, plan.limit), lower(program, plan).required_bytes)


# ------------------------------------------------------------------------------------------- a full device


def tight(probe: Probe) -> None:
    """Trains within the limit while a tensor holds the rest of the device: steps, a schedule, a close, a new shape.

    The allocation that exceeds the limit fails, so a row that is no failure has kept to it.
    """
    device = probe.settings.device
    name = probe.network("gpt2")
    network = build(name, device)
    network.step()  # creates the context, the libraries' memory and the optimizer state
    program, plans = load_plans(probe.plans, name, FRACTION, ("graph",))
    limit = limit_of(program, FRACTION)
    plan = plans[0]
    planned_here: list[str] = []

    def chosen(captured: Program, machine: Machine, nbytes: int) -> Plan:
        if captured.structure == plan.structure:
            return plan.retimed(captured)
        if captured.peak_bytes <= AIMS["graph"][0] * nbytes:  # half a batch fits as it is
            return Plan()
        planned_here.append(f"{name}: the step captured here differs from {program_file(probe.plans, name).name}")
        return make_plan(captured, machine, int(AIMS["graph"][1] * nbytes))

    ballast = hold_all_but(limit, device)
    steps = PlannedSteps(
        network.model, network.loss_fn, network.optimizer, probe.machine, limit, chosen, check=False, name=name
    )
    schedule = torch.optim.lr_scheduler.LinearLR(network.optimizer, 1.0, 0.1, TIGHT_STEPS)

    def trained(batch: tuple[Any, ...], count: int) -> dict[str, Any]:
        retries_before = alloc_retries(device)
        for _ in range(count):
            steps(*batch)
            schedule.step()
        step = steps.step_for(*batch)
        return {
            "steps": count,
            "retries": alloc_retries(device) - retries_before,
            "captures": step.graph.captures if step.graph else 0,
            "not_graph": step.not_graph or "",
            "planned_here": "; ".join(planned_here),
            "limit": limit,
            "peak": step.peak_bytes,
            "free_bytes": free_bytes(device),
        }

    def closed() -> dict[str, Any]:
        steps.finish()
        return {"measured": allocated_bytes(device), "free_bytes": free_bytes(device)}

    count = TIGHT_STEPS if device == "cuda" else 5
    probe.measure(f"{name}: steps", partial(trained, network.batch, count))
    probe.measure(f"{name}: close", closed)
    probe.measure(f"{name}: second shape", partial(trained, half_of(network), 3))
    del ballast


def hold_all_but(nbytes: int, device: str) -> torch.Tensor | None:
    """Returns a tensor that leaves ``nbytes`` and MARGIN_BYTES of the device to this process beside its context.

    On the CPU nothing is held; a planned step's own ledger enforces the limit.
    """
    if device != "cuda":
        return None
    free_cache()
    torch.cuda.synchronize()
    room = nbytes - torch.cuda.memory_reserved() + MARGIN_BYTES
    return torch.empty(free_bytes(device) - room, dtype=torch.uint8, device=device)


def half_of(network: Network) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first half of a network's batch."""
    x, y = network.batch
    return x[: len(x) // 2].clone(), y[: len(y) // 2].clone()


def alloc_retries(device: str) -> int:
    """Returns how often PyTorch has freed its cache and tried an allocation again; 0 on the CPU."""
    return int(torch.cuda.memory_stats()["num_alloc_retries"]) if device == "cuda" else 0


def free_bytes(device: str) -> int:
    """Returns the free memory of the device in bytes; 0 on the CPU."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


# ------------------------------------------------------------------------------------------- other methods


def compared(probe: Probe, methods: tuple[str, ...]) -> None:
    """Compares methods with a planned step at an equal peak of the memory that PyTorch reserves (Llama)."""
    name = probe.network("llama")
    probe.measure(f"{name} eager", lambda: _renamed(baselines.eager_row(name, probe.settings.device, None)))
    for eager in probe.record.successful(section=probe.section, what=f"{name} eager"):
        limit = limit_at(FRACTION, Trial(eager["measured"], eager["measured_peak"], eager["between"]))
        for method in ("ours", *methods):
            probe.measure(f"{name} {FRACTION} {method}", partial(method_row, probe, name, method, limit))
        compare_with_fastest(probe, name, methods)


def method_row(probe: Probe, name: str, method: str, limit: int) -> dict[str, Any]:
    """Returns the row of one method within ``limit`` bytes."""
    device = probe.settings.device
    search: baselines.Ours | baselines.Levels = baselines.Levels(name, device, method)
    plans: tuple[Plan, ...] = ()
    if method == "ours":
        program, plans = load_plans(probe.plans, name, FRACTION, ("graph",))
        search = baselines.Ours(name, device, probe.machine, program, graph=device == "cuda")
    steps = 20 if device == "cuda" else 2
    return {**_renamed(baselines.row(search, limit, plans, steps)), "limit": limit}


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of pytorch_baselines.py with the entry ``measured`` of a section's rows."""
    return {"measured": row.pop("measured_ns"), **row}


def compare_with_fastest(probe: Probe, name: str, methods: tuple[str, ...]) -> None:
    """Adds the row that compares ours with the fastest other method that reached the limit."""
    rows = {
        m: probe.record.successful(section=probe.section, what=f"{name} {FRACTION} {m}") for m in ("ours", *methods)
    }
    others = {m: found[0]["measured"] for m, found in rows.items() if found and m != "ours"}
    what = "ours against the fastest other"
    if rows["ours"] and others:
        fastest = min(others, key=lambda method: float(others[method]))
        missing = [method for method in methods if method not in others]
        entries = {"fastest_other": others[fastest], "other": fastest, "missing": missing}
        probe.add(what, measured=rows["ours"][0]["measured"], **entries)
    else:
        probe.add(what, failed="ours, or every other method, has no time")


def branches(probe: Probe) -> None:
    """Measures copies of graphs beside waiting branches."""
    for label, rates in copy_rates(probe.settings.device, probe.record.out):
        probe.add(label, predicted=probe.machine.d2h_bytes_per_s, measured=min(rates), rates=rates)


def largest(probe: Probe) -> None:
    """Finds the largest batch of each method within the memory that eager training needs for its own batch."""
    name = probe.network("resnet")
    methods = ("eager", "ours", "checkpoint")
    caps: dict[str, int] = {}

    def searched(method: str, seconds: float) -> dict[str, Any]:
        tries = Tries(name, method, probe.settings.device, probe.machine)
        row = tries.row(seconds, caps)
        if method == "ours" and (eager := probe.record.successful(section=probe.section, what=f"{name} eager")):
            row["eager_batch"] = eager[0]["measured"]
        return {"measured": row.pop("batch"), **row} if "batch" in row else row

    for i, method in enumerate(methods):
        seconds = probe.record.seconds_left() / (len(methods) - i)
        probe.measure(f"{name} {method}", partial(searched, method, seconds))


# ------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Section:
    """One part of the probe: its command (step 1 or 2), its time in seconds, its question and its environment."""

    step: int
    seconds: int
    run: Callable[[Probe], None]
    question: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def limit_s(self, backend: str) -> int:
        """Returns the time limit in seconds; a rehearsal shares a CPU and has four times as much."""
        return self.seconds * (4 if backend == "host" else 1)


ONE_CONNECTION = {"CUDA_DEVICE_MAX_COPY_CONNECTIONS": "1"}
SECTIONS = {
    "compile": Section(1, 150, partial(compared, methods=("compile",)), "torch.compile at equal reserved peak, Llama"),
    "gpt2": Section(1, 80, planned_steps, "planned against eager steps of GPT-2"),
    "tight": Section(1, 60, tight, "50 steps, a schedule, a close and a second shape on a full device"),
    "llama": Section(1, 95, planned_steps, "planned against eager steps of Llama"),
    "rivals": Section(
        2,
        250,
        partial(compared, methods=("selective", "checkpoint", "offload")),
        "methods at equal reserved peak, Llama",
    ),
    "resnet": Section(2, 50, planned_steps, "planned steps of ResNet-50 against eager ones as a graph"),
    "branches": Section(2, 30, branches, "copies in a graph beside waiting branches"),
    "one_connection": Section(2, 30, branches, "the same with one copy connection", ONE_CONNECTION),
    "largest": Section(2, 75, largest, "the largest batch of ResNet-50"),
}
