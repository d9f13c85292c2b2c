"""Measured peaks and times of compiled steps: ours, PyTorch's memory budgets, checkpointing, and plain compilation.

Each network is measured in a separate process, ``python -m experiments.figures.compiled TASK`` (JSON). The process
compiles all methods from copies of the same model, then runs their steps in turn, on one core or on a GPU.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from operator import truediv
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from executor.compiled import ChainSolver, CompileError, allocated_peak, compile, report
from executor.compiled.backend import CPU
from experiments.common import cli
from experiments.common.report import Row, warm_up
from experiments.figures.figure import Figure, Rows, span
from experiments.measure.networks import timed
from experiments.plotting.charts import Axis, Chart, Line, Panel
from experiments.workloads.llama import Llama, SwiGLU
from experiments.workloads.resnet import Plain
from experiments.workloads.transformers import GPT2, ViT
from simulator.machine import Machine
from simulator.plan import Swap


class WithLoss(nn.Module):
    """Model with its loss in one graph, so the caller holds no tensors between forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)


class Compiled(Figure):
    """Measured peaks and times of compiled steps: ours, PyTorch's memory budgets, checkpointing, and neither."""

    name = "compiled"
    looks: ClassVar = {  # color, label, marker and line of each kind of method
        "ours": ("C0", "ours", "o", "-"),
        "joint": ("C5", "ours, with swaps", "X", ""),
        "budget": ("C1", "PyTorch's budget", "s", ""),
        "chains": ("C4", "its budget, our solver", "P", ""),
        "checkpoint": ("C2", "checkpoint", "^", ""),
        "none": ("C3", "torch.compile", "D", ""),
    }
    needs_all_cores = True
    on_demand = True
    simulated = False

    def tasks(self, settings: DictConfig) -> Rows:
        config = cli.to_dict(settings)
        if config["device"] not in ("cpu", "cuda"):
            raise cli.UsageError(f"figure.device: expected cpu or cuda, got {config['device']}")
        tasks = []
        for workload in config["networks"]:
            options = {key: workload.pop(key, config[key]) for key in ("limits", "budgets", "solvers", "swaps")}
            for key in ("limits", "budgets", "swaps"):
                if not (options[key] or key == "swaps") or not all(
                    isinstance(v, float) and 0 < v <= 1 for v in options[key]
                ):
                    raise cli.UsageError(f"figure.{key}: expected fractions, got {options[key]}")
            if workload["kind"] not in KINDS:
                raise cli.UsageError(f"figure.networks: expected one of {', '.join(KINDS)}, got {workload['kind']}")
            shared = {key: config[key] for key in ("device", "rounds", "planner", "seconds")}
            tasks.append({"network": workload["name"], "workload": workload, **options, **shared})
        return tasks[::-1]

    def run(self, task: Row, machine: Machine) -> Row:
        if task["device"] == "cuda" and not torch.cuda.is_available():
            raise cli.UsageError("figure.device: no CUDA GPU found; figure=compiled measures on the CPU")
        with tempfile.TemporaryDirectory() as cache:  # an empty cache, so that compilation is timed
            command = [sys.executable, "-m", "experiments.figures.compiled", json.dumps(task)]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
            process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
        result: Row = json.loads(process.stdout.splitlines()[-1])
        return result

    def template_values(self, rows: Rows) -> Row:
        lines = []
        results = []
        lowest = 0
        for row in rows:
            methods = [(name, look_key(name, m), m) for name, m in row["methods"].items()]
            plain_bytes = row["methods"]["none"]["peak_bytes"]
            for name, method_kind, m in methods:
                line = {"network": row["network"], "method": name, "peak": "refused", "time": ""}
                if method_kind:
                    line |= {"peak": f"{m['peak_bytes'] / plain_bytes:.1%}", "time": f"{m['ratio']:.3f}"}
                    results.append({**m, "kind": method_kind, "of": m["peak_bytes"] / plain_bytes})
                lines.append(line)
            ours, theirs = (
                [m["peak_bytes"] for _, method_kind, m in methods if method_kind in kinds]
                for kinds in (("ours",), ("none", "budget", "chains", "checkpoint"))
            )
            lowest += min(ours, default=plain_bytes) < min(theirs)
        planned = [m for m in results if m["kind"] in ("ours", "joint")]
        pairs = [m["against"] for m in results if "against" in m]
        swapped = [m["of"] for m in results if m.get("swaps")]
        return {
            "lines": lines,
            "points": len(planned),
            "networks": len(rows),
            "lowest": lowest,
            "error": max(abs(m["peak_bytes"] / m["predicted_bytes"] - 1) for m in planned),
            "over": sum(m["peak_bytes"] > m["limit_bytes"] for m in planned),
            "refused": sum("refused" in m and m.get("mode") != "joint" for r in rows for m in r["methods"].values()),
            "swapped": len(swapped) or None,
            "least": min(swapped, default=None),
            "pair": span(pairs),
            "pairs": len(pairs),
            "faster": sum(p <= 1.0 for p in pairs),
            "within": sum(p <= 1.03 for p in pairs),
            "differ": sum(not m["bits"] for m in planned),
        }

    def chart(self, rows: Rows) -> Chart:
        panels = []
        device = rows[0]["on"]
        text, measure = ("on the CPU", "CPU time") if device == "CPU" else (f"on an {device}", "time")
        axes = Axis("real peak", "{:.0%}"), Axis(f"{measure} of a step", "{:.2f}")
        for row in rows:
            methods = row["methods"]
            marks = []
            for method_kind, look in self.looks.items():
                points = sorted(
                    (m["peak_bytes"] / methods["none"]["peak_bytes"], m["ratio"])
                    for name, m in methods.items()
                    if look_key(name, m) == method_kind
                )
                marks.append(Line([a for a, _ in points], [b for _, b in points], *look))
            panels.append(Panel(row["network"], marks, *axes))
        return Chart(f"torch.compile within a memory, {text}", panels, 2, (5.2, 3.6), keys=2 if len(panels) == 1 else 3)


def look_key(name: str, method: Row) -> str:
    """Returns the key of a method in ``Compiled.looks``, or "" if its limit was refused."""
    if "refused" in method:
        return ""
    if method.get("ours"):
        return "joint" if method.get("mode") == "joint" else "ours"
    return "chains" if name.startswith("chains") else "budget" if "budget" in method else name


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
    reference_bits: list[Tensor] = []

    def add(name: str, make: Callable[[nn.Module], Any], **details: Any) -> None:
        model_copy = copy.deepcopy(model)
        begin = _seconds()
        compiled = make(model_copy)

        def step() -> Tensor:
            model_copy.zero_grad()
            torch.manual_seed(1)
            loss: Tensor = compiled(x, y)
            loss.backward()
            return loss

        try:
            step()
        except CompileError as error:
            rows[name] = {"refused": str(error).split("\n")[0], **details}
            return
        rows[name] = row = {"compile_s": round(_seconds() - begin, 2), **details}
        gradients = [p.grad.clone() for p in model_copy.parameters() if p.grad is not None]
        model_copy.zero_grad()
        row["peak_bytes"] = allocated_peak(step, device)
        if details.get("ours"):
            (graph,) = report(compiled).graphs
            row |= {
                "predicted_bytes": graph.peak_bytes,
                "limit_bytes": graph.limit,
                "without": graph.without_bytes,
                "plan_s": round(graph.seconds, 2),
                "looking_s": round(graph.looking_s, 2),
                "swaps": sum(isinstance(d, Swap) for d in graph.plan.decisions) if graph.plan else 0,
            }
        reference_bits[:] = reference_bits or gradients
        row["bits"] = all(map(torch.equal, gradients, reference_bits))
        runs[name] = step

    def add_ours(name: str, memory: int | float, mode: str = "recompute", **details: Any) -> None:
        settings = {"memory": memory, "planner": task["planner"], "seconds": task["seconds"], "mode": mode}
        add(name, lambda model_copy: compile(model_copy, **settings), ours=True, mode=mode, **details)

    def add_at_peak_of(name: str) -> None:
        """Measures our plan at the peak of a rival, unless another rival has the same peak."""
        peak_bytes = rows[name]["peak_bytes"]
        has_match = any("beside" in m and abs(m["asked"] / peak_bytes - 1) < 0.005 for m in rows.values())
        if peak_bytes < rows["none"]["peak_bytes"] and not has_match:
            add_ours(f"at {name}", peak_bytes, beside=name, asked=peak_bytes)

    warm_up(CPU, task["planner"])
    add("none", _compile_plain)
    add("checkpoint", lambda model_copy: _compile_plain(_checkpoint_blocks(model_copy)))
    add_at_peak_of("checkpoint")
    points = [("dp", budget) for budget in task["budgets"]]
    points += [(solver, task["budgets"][-1]) for solver in task["solvers"]]
    for solver, budget in points:
        name = f"{solver} {budget:g}"
        add(name, partial(_compile_budgeted, budget=budget, solver=solver), budget=budget)
        if solver != "chains":
            add_at_peak_of(name)
    for limit in task["limits"]:
        add_ours(f"ours {limit:g}", limit, limit=limit)
    for limit in task["swaps"]:
        add_ours(f"with swaps {limit:g}", limit, "joint", limit=limit)
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
    """Returns a small network with its loss, and a random batch."""
    sizes = {key: value for key, value in workload.items() if key not in ("name", "kind", "batch_size", "dtype")}
    dtype = workload.get("dtype", "float32")
    torch.manual_seed(0)
    model = WithLoss(KINDS[workload["kind"]](**sizes)).to(getattr(torch, dtype))
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


def _compile_plain(model: nn.Module) -> Any:
    return torch.compile(model, dynamic=False)


def _compile_budgeted(model: nn.Module, budget: float, solver: str) -> Any:
    """Compiles with torch.compile under PyTorch's memory budget."""

    def backend(gm: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        options = {
            "activation_memory_budget": budget,
            "activation_memory_budget_solver": ChainSolver() if solver == "chains" else solver,
        }
        with torch._functorch.config.patch(options):
            return compile_fx(gm, inputs)

    return torch.compile(model, backend=backend, dynamic=False)


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


def _seconds() -> float:
    """Returns the CPU time of this process and of the compiler processes it has waited for."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


class CompiledGpu(Compiled):
    """Same on a GPU: larger networks in bfloat16, with real copies to the host."""

    name = "compiled_gpu"

    @property
    def text(self) -> str:
        return Compiled().text.replace("on the CPU", "on a GPU", 1)


if __name__ == "__main__":
    print(json.dumps(measure_task(json.loads(sys.argv[1]))))
