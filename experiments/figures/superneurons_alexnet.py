"""Fig. 10 and section 4.1.1 of "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks" (2018):
memory and live tensors at each of AlexNet's 46 steps, batch 200, as liveness analysis, offloading of convolutions and
cost-aware recomputation are added one after the other.

The network is counted as the paper counts it (experiments/figures/layerwise.py): one output per layer, gradients in
place where cuDNN allows it, neither images nor parameters nor workspaces. MB is 2^20 bytes. The paper's text gives the
numbers in ``PAPER``; its figure is a picture. Beside it stands the same network as PyTorch runs it, captured
(experiments/workloads/vgg.py), without what lives across iterations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import layerwise
from experiments.figures.layerwise import FREE, MB
from experiments.plotting.palette import INK, TECHNIQUES
from experiments.plotting.plots import figure
from simulator.compiled.engine import simulate
from simulator.machine import Machine

TITLE = "SuperNeurons, Fig. 10: AlexNet's memory step by step"
PLANS: dict[str, dict[str, Any]] = {
    "liveness": {"offload": False},
    "offload": {},
    "recompute": {"strategy": "cost"},
}
LABELS = {
    "liveness": "liveness analysis",
    "offload": "+ prefetch and offload",
    "recompute": "+ cost-aware recomputation",
    "captured": "the step that PyTorch runs, with liveness analysis",
}
POOL5, POOL2 = 32, 39  # steps
PAPER = {  # section 4.1.1
    "baseline, MB": 2189.437, "baseline, tensors": 36,
    "liveness, MB": 1489.355, "liveness, step": 32, "liveness, tensors": 17,
    "outputs of CONV1 to CONV5 at step 32, MB": 1409.277, "tensors of POOL5's backward step, MB": 80.078,
    "liveness, tensors at step 39": 10,
    "offload, MB": 1132.155, "offload, step": 39, "offload, tensors": 9, "offload, MB at step 32": 1075.9,
    "recompute, MB": 886.0, "recompute, step": 44,
}  # fmt: skip


def tasks(settings: DictConfig) -> list[Row]:
    """One per technique, and one for the captured program."""
    found = [str(name) for name in cli.values(settings, "shown")]
    for name in found:
        if name not in LABELS:
            raise cli.UsageError(f"figure.shown: there is no {name!r}{cli.nearest(name, set(LABELS))}")
    return [{"shown": name, "batch_size": settings.batch_size} for name in found]


def run(task: Row, machine: Machine) -> Row:
    """Bytes and tensors at every step."""
    if task["shown"] == "captured":
        return captured(task["batch_size"], machine)
    program = layerwise.program("alexnet", layerwise.alexnet(), task["batch_size"])
    steps, again, peak = layerwise.steps(program, layerwise.plan(program, **PLANS[task["shown"]]))
    most = max(range(len(steps)), key=lambda i: steps[i].nbytes)
    layer = program.kernels[POOL5 - 1]
    return {
        "steps": [[s.name, s.phase, s.nbytes, len(s.tensors)] for s in steps],
        "peak": peak,
        "again": again,
        "at_peak": [[program.tensors[t].name, program.tensors[t].nbytes] for t in steps[most].tensors],
        "tensors": len(program.tensors),
        "all": sum(t.nbytes for t in program.tensors),
        "smallest": min(t.nbytes for t in program.tensors),
        "layer": [[program.tensors[t].name, program.tensors[t].nbytes] for t in layer.accesses],
    }


def captured(batch_size: int, machine: Machine) -> Row:
    """The program that PyTorch runs: bytes at every kernel, and what is in memory at its peak, by who wrote it."""
    program = figures.program("alexnet", machine, batch_size=batch_size)
    kept = sum(t.nbytes for t in program.tensors if t.persistent)
    most = max(range(len(program.kernels)), key=lambda k: program.live_bytes[k])
    at_peak: dict[str, list[int]] = {}
    for t, tensor in enumerate(program.tensors):
        uses = program.accesses[t]
        if not tensor.persistent and uses and uses[0] <= most <= uses[-1]:
            count = at_peak.setdefault(program.kernels[program.writes[t][0]].name, [0, 0])
            count[0] += 1
            count[1] += tensor.nbytes
    plans = {name: layerwise.plan(program, **how) for name, how in PLANS.items()}
    peaks = {name: simulate(program, p, FREE, FREE.memory_bytes).peak_bytes - kept for name, p in plans.items()}
    return {
        "steps": [[k.name, k.phase, n - kept, 0] for k, n in zip(program.kernels, program.live_bytes, strict=True)],
        "peak": program.peak_bytes - kept,
        "peaks": peaks,
        "kept": kept,
        "at_peak": sorted(([name, *count] for name, count in at_peak.items()), key=lambda entry: -entry[2]),
        "tensors": sum(not t.persistent for t in program.tensors),
        "all": sum(t.nbytes for t in program.tensors if not t.persistent),
    }


def found(rows: list[Row]) -> dict[str, float]:
    """Our numbers, by the names of ``PAPER``; of the techniques that were run."""
    out: dict[str, float] = {}
    for row in rows:
        name, steps = row["shown"], row["steps"]
        if name == "captured":
            continue
        most = _most(row)
        out |= {"baseline, MB": row["all"] / MB, "baseline, tensors": row["tensors"]}
        out |= {f"{name}, MB": row["peak"] / MB, f"{name}, step": most + 1, f"{name}, tensors": steps[most][3]}
        if name == "liveness":
            layer = dict(row["layer"])
            others = sum(nbytes for tensor, nbytes in row["at_peak"] if tensor not in layer)
            out["outputs of CONV1 to CONV5 at step 32, MB"] = others / MB
            out["tensors of POOL5's backward step, MB"] = sum(layer.values()) / MB
            out["liveness, tensors at step 39"] = steps[POOL2 - 1][3]
        if name == "offload":
            out["offload, MB at step 32"] = steps[POOL5 - 1][2] / MB
    return out


def _most(row: Row) -> int:
    sizes = [step[2] for step in row["steps"]]
    return sizes.index(max(sizes))


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A row for every number in the paper's text; PyTorch's beside the peaks."""
    ours = found(rows)
    theirs = next((row for row in rows if row["shown"] == "captured"), None)
    peaks = {} if theirs is None else {"baseline, MB": theirs["all"], "baseline, tensors": theirs["tensors"] * MB}
    peaks |= {f"{name}, MB": n for name, n in theirs["peaks"].items()} if theirs else {}
    cells = []
    for key, paper in PAPER.items():
        if key in ours:
            digits = 3 if "MB" in key else 0
            pytorch = f"{peaks[key] / MB:,.{digits}f}" if key in peaks else ""
            cells.append([_words(key), _number(paper), f"{ours[key]:,.{digits}f}", pytorch])
    return ["AlexNet, batch 200", "paper", "ours", "captured from PyTorch"], cells


def _number(value: float) -> str:
    return f"{value:,.3f}".rstrip("0").rstrip(".")


def _words(key: str) -> str:
    technique, _, rest = key.partition(", ")
    if technique == "baseline":
        return f"no sharing of memory: {rest}"
    names = {"MB": "peak, MB", "step": "step of the peak", "tensors": "tensors in memory then"}
    return f"{LABELS[technique]}: {names.get(rest, rest)}" if technique in LABELS else key


def notes(rows: list[Row]) -> list[str]:
    """Which numbers agree, and by which tensors the others differ."""
    ours, by_name = found(rows), {row["shown"]: row for row in rows}
    exact = [key for key in ours if key in PAPER and abs(ours[key] - PAPER[key]) < _unit(key)]
    out = [f"{len(exact)} of the {sum(key in PAPER for key in ours)} numbers agree to the last digit that is printed."]
    if row := by_name.get("liveness"):
        most, layer = max(step[3] for step in row["steps"]), dict(row["layer"])
        out.append(
            f"Of the {ours['liveness, tensors']:.0f} tensors at the peak, "
            f"{ours['outputs of CONV1 to CONV5 at step 32, MB']:.3f} MB are {len(row['at_peak']) - len(layer)} and "
            f"{sum(layer.values()) / MB:.3f} MB are the {len(layer)} that POOL5's backward step takes "
            f"({', '.join(layer)}). The text says 5 and 3, with which neither sum comes out. At another step there are "
            f"more tensors, {most}, but smaller ones."
        )
    if row := by_name.get("offload"):
        names = ", ".join(f"{name} {nbytes / MB:.3f}" for name, nbytes in row["at_peak"])
        smallest = min(nbytes for _, nbytes in row["at_peak"]) / MB
        out.append(
            f"After offloading the paper has {PAPER['offload, MB']} MB, "
            f"{PAPER['offload, MB'] - ours['offload, MB']:.3f} MB more than its nine tensors are together ({names}). "
            f"The smallest of them has {smallest:.3f} MB, the smallest in the network {row['smallest'] / MB:.3f} MB: "
            "no tensor explains it. One wrong digit, 1132.155 for 1132.055, would (inferred)."
        )
        out.append(
            f"The paper's {PAPER['offload, MB at step 32']} MB at step 32 are its peak less CONV1, CONV2 and CONV3, "
            "although it names CONV4, too, as offloaded; without CONV4's 49.512 MB they are ours."
        )
    if row := by_name.get("recompute"):
        names = ", ".join(name for name, _ in row["at_peak"])
        out.append(
            f"The last peak, 4 x {row['at_peak'][0][1] / MB:.3f} = {ours['recompute, MB']:.3f} MB, are {names}. LRN1's "
            "step itself takes three of them: CONV1 is there because RELU1 was recomputed from it and needs it next. "
            "The paper's bound for one layer is the same number, since the authors' code adds up LRN's gradient, which "
            "is changed in place, twice."
        )
    if row := by_name.get("captured"):
        parts = ", ".join(f"{n} of {_operator(name)} {nbytes / MB:,.0f}" for name, n, nbytes in row["at_peak"][:11])
        out.append(
            f"PyTorch's step needs {row['peak'] / MB:,.0f} MB beside {row['kept'] / MB:,.0f} MB of images, parameters "
            "and momentum. It has no LRN kernel: seven others make it up, and what three of them write "
            "(constant_pad_nd, add, pow) is kept beside the output. It also keeps the positions of maxima as 8-byte "
            "integers, and all gradients of weights. In memory at its peak, by the kernel that wrote it, in MB: "
            f"{parts}."
        )
    return out


def _unit(key: str) -> float:
    return 0.5 if key == "recompute, MB" else 0.0011 if "MB" in key else 0.5


def _operator(name: str) -> str:
    return name.removeprefix("aten.").partition(".")[0]


def draw(rows: list[Row], path: Path) -> None:
    """A panel per technique: memory as steps, live tensors as a line, over the names of the 46 steps."""
    with figure(path, 14.0, 2.9 * len(rows) + 0.9, len(rows)) as made:
        panels = list(made) if len(rows) > 1 else [made]
        top = 1.1 * max((row["all"] for row in rows if row["shown"] in PLANS), default=0) / MB
        for axes, row in zip(panels, rows, strict=True):
            _panel(axes, row)
            if row["shown"] in PLANS:
                _layers(axes, row, top)
        panels[0].figure.suptitle(f"AlexNet, batch {rows[0]['batch_size']}: what is in memory at each step",
                                  x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)  # fmt: skip


def _panel(axes: Any, row: Row) -> None:
    """Memory, with the peak marked and its numbers in the title."""
    name, steps = row["shown"], row["steps"]
    sizes, most, colour = [s[2] / MB for s in steps], _most(row), TECHNIQUES[name]
    edges = [i + 0.5 for i in range(len(steps) + 1)]
    axes.stairs(sizes, edges, color=colour, fill=True, alpha=0.35)
    axes.stairs(sizes, edges, color=colour, linewidth=1.6)
    axes.stairs(sizes[most : most + 1], edges[most : most + 2], color=colour, fill=True)
    for end in (sum(s[1] == "forward" for s in steps), sum(s[1] != "optimizer" for s in steps)):
        if end < len(steps):
            axes.axvline(end + 0.5, color=INK, linewidth=1.0)
    paper = f" (paper: {_number(PAPER[f'{name}, MB'])} MB)" if f"{name}, MB" in PAPER else ""
    where = f"{'step' if name in PLANS else 'kernel'} {most + 1}, {_operator(steps[most][0])} {steps[most][1]}"
    axes.set(xlim=(0.5, len(steps) + 0.5), ylabel="memory (MB)", xlabel="kernel: forward | backward | optimizer",
             title=f"{LABELS[name]}: peak {sizes[most]:,.3f} MB{paper} at {where}")  # fmt: skip
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axes.grid(axis="x", visible=False)


def _layers(axes: Any, row: Row, top: float) -> None:
    """The names of the steps, the number of tensors, and the memory of all tensors at once."""
    steps, whole = row["steps"], row["all"] / MB
    forward = sum(s[1] == "forward" for s in steps)
    axes.set(ylim=(0, top), xlabel="")
    axes.set_xticks(range(1, len(steps) + 1), [s[0] for s in steps], rotation=90, fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.axhline(whole, color=INK, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.text(0.8, 0.985 * whole, f"all {row['tensors']} tensors at once: {whole:,.3f} MB", va="top", color=INK)
    for x, side, word in ((forward + 0.2, "right", "forward "), (forward + 0.8, "left", " backward")):
        axes.text(x, 0.985 * whole, word, ha=side, va="top", color=INK)
    right = axes.twinx()
    right.plot(range(1, len(steps) + 1), [s[3] for s in steps], color=INK, linewidth=1.0, marker="o", markersize=3)
    right.set(ylim=(0, 40), ylabel="tensors in memory (dots)")
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
