"""Measured peaks and times of compiled training steps: ours, PyTorch's memory budgets, and checkpointing.

Each network is measured in a separate process, ``python -m experiments.figures.compiled TASK`` (JSON). The process
compiles all methods from copies of the same model, then runs their steps in turn, on one core or on a GPU. A step is
forward, loss, backward and update.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from operator import truediv
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from executor.compiled import ChainSolver, CompileError, allocated_peak, compile, compile_step, report
from executor.compiled.backend import CPU, WithLoss
from executor.compiled.regions import regions
from executor.fit import FitError, fit, planned_in_mode
from experiments.common import cli
from experiments.common.report import Row, warm_up
from experiments.figures.figure import Figure, Rows, span
from experiments.measure.networks import timed
from experiments.plotting.charts import Axis, Chart, Line, Panel
from experiments.workloads.llama import Llama, SwiGLU
from experiments.workloads.resnet import Plain
from experiments.workloads.transformers import GPT2, ViT
from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Program

LIMITED = {  # setting with limits of our plans -> their kind
    "limits": "ours",
    "swaps": "joint",
    "regional": "regional",
    "in_backward": "in backward",
    "fit": "fit",
}


class Compiled(Figure):
    """Measured peaks and times of compiled steps: ours, PyTorch's memory budgets, checkpointing, and neither."""

    name = "compiled"
    looks: ClassVar = {  # color, label, marker and line of each kind of method
        "ours": ("C0", "ours", "o", "-"),
        "in backward": ("C9", "ours, update in backward", "v", ""),
        "regional": ("C6", "ours, by blocks", "p", ""),
        "joint": ("C5", "ours, with swaps", "X", ""),
        "fit": ("C8", "fit (eager kernels)", "*", ""),
        "budget": ("C1", "PyTorch's budget", "s", ""),
        "chains": ("C4", "its budget, our solver", "P", ""),
        "checkpoint": ("C2", "checkpoint", "^", ""),
        "none": ("C3", "torch.compile", "D", ""),
        "blocks": ("C7", "torch.compile by blocks", "d", ""),
    }
    ours = ("ours", "in backward", "regional")
    rivals = ("none", "blocks", "checkpoint", "budget", "chains")
    needs_all_cores = True
    on_demand = True
    simulated = False

    def tasks(self, settings: DictConfig) -> Rows:
        config = cli.to_dict(settings)
        if config["device"] not in ("cpu", "cuda"):
            raise cli.UsageError(f"figure.device: expected cpu or cuda, got {config['device']}")
        tasks = []
        for workload in config["networks"]:
            options = {key: workload.pop(key, config[key]) for key in (*LIMITED, "budgets", "solvers")}
            for key in (*LIMITED, "budgets"):
                is_missing = key == "limits" and not options[key]
                if is_missing or not all(isinstance(v, float) and 0 < v <= 1 for v in options[key]):
                    raise cli.UsageError(f"figure.{key}: expected fractions, got {options[key]}")
            if workload["kind"] not in KINDS:
                raise cli.UsageError(f"figure.networks: expected one of {', '.join(KINDS)}, got {workload['kind']}")
            shared = {key: config[key] for key in ("device", "rounds", "planner", "seconds")}
            tasks.append({"network": workload["name"], "workload": workload, **options, **shared})
        return tasks

    def run(self, task: Row, machine: Machine) -> Row:
        if task["device"] == "cuda" and not torch.cuda.is_available():
            raise cli.UsageError("figure.device: no CUDA GPU found; figure=compiled measures on the CPU")
        command = [sys.executable, "-m", "experiments.figures.compiled", json.dumps(task)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
        result: Row = json.loads(process.stdout.splitlines()[-1])
        return result

    def template_values(self, rows: Rows) -> Row:
        lines = []
        results = []
        lowest = []
        for row in rows:
            plain_bytes = row["methods"]["none"]["peak_bytes"]
            least = {}
            for name, m in row["methods"].items():
                line = {"network": row["network"], "method": name, "peak": "refused", "time": ""}
                if "refused" not in m:
                    part = m["peak_bytes"] / plain_bytes
                    line |= {"peak": f"{part:.1%}", "time": f"{m['ratio']:.3f}"}
                    results.append({**m, "of": part})
                    least[m["kind"]] = min(part, least.get(m["kind"], part))
                lines.append(line)
            ours, theirs = (min(least.get(kind, 1.0) for kind in kinds) for kinds in (self.ours, self.rivals))
            lowest.append({"network": row["network"], "ours": ours, "theirs": theirs})
        planned = [m for m in results if m["kind"] in (*self.ours, "joint")]
        pairs = [m["against"] for m in results if "against" in m]
        swapped = [m["of"] for m in results if m["kind"] == "joint" and m["swaps"]]
        fitted = [m for m in results if m["kind"] == "fit"]
        return {
            "lines": lines,
            "points": len(planned),
            "networks": len(rows),
            "least": lowest,
            "lowest": sum(entry["ours"] < entry["theirs"] for entry in lowest),
            "error": max(abs(m["peak_bytes"] / m["predicted_bytes"] - 1) for m in planned),
            "over": sum(m["peak_bytes"] > m["limit_bytes"] for m in planned),
            "refused": sum("refused" in m for row in rows for m in row["methods"].values()),
            "swapped": span(swapped),
            "pair": span(pairs),
            "pairs": len(pairs),
            "faster": sum(p <= 1.0 for p in pairs),
            "differ": sum(not m["bits"] for m in planned),
            "fitted": len(fitted) or None,
            "fit_time": span(m["ratio"] for m in fitted),
            "fit_part": span(m["peak_bytes"] / m["limit_bytes"] for m in fitted),
            "fit_bits": sum(m["bits"] for m in fitted),
        }

    def chart(self, rows: Rows) -> Chart:
        panels = []
        device = rows[0]["on"]
        measure = "CPU time" if device == "CPU" else f"time on an {device}"
        axes = Axis("real peak of a whole step", "{:.0%}"), Axis(f"{measure} of a step", "{:.2f}")
        for row in rows:
            methods = row["methods"]
            plain_bytes = methods["none"]["peak_bytes"]
            marks = []
            for kind, look in self.looks.items():
                points = sorted(
                    (m["peak_bytes"] / plain_bytes, m["ratio"])
                    for m in methods.values()
                    if m["kind"] == kind and "refused" not in m
                )
                if points:
                    marks.append(Line([a for a, _ in points], [b for _, b in points], *look))
            panels.append(Panel(row["network"], marks, *axes))
        values = self.template_values(rows)
        title = (
            f"Ours: lowest peak in {values['lowest']} of {values['networks']} networks;\n"
            f"at equal peaks no slower in {values['faster']} of {values['pairs']} points"
        )
        return Chart(
            title,
            panels,
            2,
            (4.8, 3.4),
            (0.0, 1.3),
            keys=2 if len(panels) == 1 else 3,
            note="Times: medians of ratios of alternating steps.",
        )


def measure_task(task: Row) -> Row:
    """Measures every method on one network.

    Returns:
        Peak in bytes, and minimum, median and maximum seconds of a step (CPU time, or GPU time), by method.
    """
    device = task["device"]
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # one code object, compiled by every method
    torch._functorch.config.enable_autograd_cache = False
    model, x, y = (part.to(device) for part in network(task["workload"]))
    runs: dict[str, Callable[[], Tensor]] = {}
    rows: dict[str, Row] = {}
    results: dict[str, list[Tensor]] = {}  # loss, parameters and gradients after the first step

    def add(
        name: str,
        make: Callable[[nn.Module, Optimizer], Callable[..., Tensor]],
        kind: str = "",
        base: str = "none",
        updates: bool = False,
        **details: Any,
    ) -> None:
        """Compiles a method, executes a step of it and measures the peak of another one.

        Args:
            make: Returns a callable that takes a batch and returns its loss; with ``updates`` it is a whole step.
            base: The method with the same kernels without a plan, whose bits are expected.
        """
        print(f"{task['network']}: {name}", file=sys.stderr, flush=True)
        rows[name] = row = {"kind": kind or name, **details}
        model_copy = copy.deepcopy(model)
        parameters = list(model_copy.parameters())
        optimizer = AdamW(parameters)
        gradients: list[Tensor] = []

        def step(keeps_gradients: bool = False) -> Tensor:
            torch.manual_seed(1)
            loss = run(x, y)
            if not updates:
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if keeps_gradients:
                    gradients.extend(p.grad for p in parameters if p.grad is not None)
                optimizer.zero_grad()
            return loss.detach()

        try:
            run = make(model_copy, optimizer)
            loss = step(keeps_gradients=True)
        except (CompileError, FitError) as error:
            row["refused"] = str(error).split("\n")[0]
            return
        results[name] = [loss, *(p.detach().clone() for p in parameters), *gradients]
        # A step that updates in its backward pass has no gradients to compare.
        row["bits"] = all(map(torch.equal, results[name], results[base]))
        gradients.clear()
        state = [value for values in optimizer.state.values() for value in values.values()]
        held = sum(t.nbytes for t in (*parameters, *model_copy.buffers(), *state, x, y))
        row["peak_bytes"] = held + allocated_peak(step, device)
        if kind in (*Compiled.ours, "joint"):
            graphs = [graph for graph in report(run).graphs if not graph.skip_reason]
            row |= {
                "predicted_bytes": max(graph.peak_bytes + sum(graph.held.values()) for graph in graphs),
                "plan_s": round(sum(graph.seconds for graph in graphs), 2),
                "looking_s": round(sum(graph.looking_s for graph in graphs), 2),
                "swaps": sum(isinstance(d, Swap) for graph in graphs if graph.plan for d in graph.plan.decisions),
            }
        runs[name] = step

    def without_swaps(program: Program, machine: Machine, limit: int) -> Plan:
        """Returns a plan for ``fit``; on the CPU, tensors that it swaps out would still count."""
        return planned_in_mode(program, machine, limit, task["planner"], task["seconds"])[0]

    planner = {"planner": task["planner"], "seconds": task["seconds"]}

    def compile_planned(model: nn.Module, optimizer: Optimizer, memory: int, **options: Any) -> Any:
        return compile(model, F.cross_entropy, memory=memory, optimizer=optimizer, **planner, **options)

    makers: dict[str, Callable[..., Any]] = {
        "ours": compile_planned,
        "joint": partial(compile_planned, mode="joint"),
        "regional": partial(compile_planned, regional=True),
        "in backward": lambda m, o, memory: compile_step(m, F.cross_entropy, o, memory=memory, **planner),
        "fit": lambda m, o, memory: fit(
            m,
            F.cross_entropy,
            o,
            (x, y),
            memory,
            machine=CPU if device == "cpu" else None,
            planner=without_swaps,
            optimizer_in_backward=True,
        ),
    }

    def add_planned(name: str, kind: str, memory: int, **details: Any) -> None:
        base = {"regional": "blocks", "fit": "eager"}.get(kind, "none")
        updates = kind in ("in backward", "fit")
        add(name, partial(makers[kind], memory=memory), kind, base, updates, limit_bytes=memory, **details)

    def add_at_peak_of(name: str) -> None:
        """Measures our plan at the peak of a rival, unless another rival has the same peak."""
        peak_bytes = rows[name]["peak_bytes"]
        has_match = any("beside" in m and abs(m["limit_bytes"] / peak_bytes - 1) < 0.005 for m in rows.values())
        if peak_bytes < rows["none"]["peak_bytes"] and not has_match:
            add_planned(f"at {name}", "ours", peak_bytes, beside=name)

    warm_up(CPU, task["planner"])
    add("none", _compile_plain)
    if task["regional"]:
        add("blocks", _compile_blocks, base="blocks")
    if task["fit"]:
        add("eager", lambda m, o: WithLoss(m, F.cross_entropy), base="eager")
    for key, kind in LIMITED.items():
        for limit in task[key]:
            add_planned(f"{kind} {limit:g}", kind, int(limit * rows["none"]["peak_bytes"]), limit=limit)
    add("checkpoint", lambda m, o: _compile_plain(_checkpoint_blocks(m), o))
    add_at_peak_of("checkpoint")
    points = [("dp", budget) for budget in task["budgets"]]
    points += [(solver, task["budgets"][-1]) for solver in task["solvers"]]
    for solver, budget in points:
        name = f"{solver} {budget:g}"
        kind = "chains" if solver == "chains" else "budget"
        add(name, partial(_compile_budgeted, budget=budget, solver=solver), kind, budget=budget)
        if kind == "budget":
            add_at_peak_of(name)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(task["rounds"]):
        for name, step in runs.items():
            times[name].append(_step_seconds(step, device))
    for name, step_s in times.items():
        rows[name]["step_s"] = [min(step_s), statistics.median(step_s), max(step_s)]
        rows[name]["ratio"] = statistics.median(map(truediv, step_s, times["none"]))
        if (rival := rows[name].get("beside")) is not None:
            rows[name]["against"] = statistics.median(map(truediv, step_s, times[rival]))
    return {"methods": rows, "on": torch.cuda.get_device_name() if device == "cuda" else "CPU"}


def network(workload: Row) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a small network and a random batch, for ``cross_entropy``."""
    sizes = {key: value for key, value in workload.items() if key not in ("name", "kind", "batch_size", "dtype")}
    dtype = workload.get("dtype", "float32")
    torch.manual_seed(0)
    model = KINDS[workload["kind"]](**sizes).to(getattr(torch, dtype))
    if "image" in workload:
        x = torch.randn(workload["batch_size"], 3, workload["image"], workload["image"])
        return model, x, torch.randint(0, workload["classes"], (workload["batch_size"],))
    words = torch.randint(0, workload["vocabulary"], (2, workload["batch_size"], workload["length"]))
    return model, words[0], words[1].flatten()


def _llama(hidden: int, **sizes: int) -> nn.Module:
    return Llama(**sizes, feed=lambda: SwiGLU(sizes["width"], hidden))


def _gpt2(length: int, **sizes: int) -> nn.Module:
    return GPT2(**sizes, context=length)


def _vit(patch: int, image: int, **sizes: int) -> nn.Module:
    return ViT(**sizes, patch=patch, image=image, rate=0.0)


def _resnet(stages: str, width: int, classes: int, **_: int) -> nn.Module:
    return Plain(tuple(map(int, stages.split("-"))), width, residual=True, classes=classes)


KINDS: dict[str, Callable[..., nn.Module]] = {"gpt2": _gpt2, "llama": _llama, "resnet": _resnet, "vit": _vit}


def _compile_plain(model: nn.Module, _: Optimizer) -> Any:
    return torch.compile(WithLoss(model, F.cross_entropy), dynamic=False)


def _compile_blocks(model: nn.Module, _: Optimizer) -> Any:
    """Compiles with torch.compile in regions: each block, what is outside of blocks, and the loss."""
    for region in regions(model):
        for module in region.modules:
            module.compile(dynamic=False)
    return WithLoss(model, torch.compile(F.cross_entropy, dynamic=False))


def _compile_budgeted(model: nn.Module, _: Optimizer, budget: float, solver: str) -> Any:
    """Compiles with torch.compile under PyTorch's memory budget."""

    def backend(gm: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        options = {
            "activation_memory_budget": budget,
            "activation_memory_budget_solver": ChainSolver() if solver == "chains" else solver,
        }
        with torch._functorch.config.patch(options):
            return compile_fx(gm, inputs)

    return torch.compile(WithLoss(model, F.cross_entropy), backend=backend, dynamic=False)


def _checkpoint_blocks(model: nn.Module) -> nn.Module:
    """Wraps each member of the model's longest list of modules in ``checkpoint``."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    for block in max(lists, key=len):
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    return model


def _step_seconds(step: Callable[[], object], device: str) -> float:
    """Returns the seconds of one step."""
    if device != "cpu":
        return timed(step, 1, device)[0] / 1e9
    begin = time.process_time()
    step()
    return time.process_time() - begin


class CompiledGpu(Compiled):
    """Same on a GPU: larger networks in bfloat16, with real copies to the host."""

    name = "compiled_gpu"

    @property
    def text(self) -> str:
        return Compiled().text.replace("on the CPU", "on a GPU", 1)


if __name__ == "__main__":
    print(json.dumps(measure_task(json.loads(sys.argv[1]))))
