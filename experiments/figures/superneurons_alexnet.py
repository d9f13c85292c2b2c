"""Fig. 10 of the SuperNeurons paper: AlexNet's memory step by step, as techniques are added."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from experiments import figures
from experiments.common.report import Row
from experiments.figures import layerwise
from experiments.figures.figure import Figure
from experiments.figures.layerwise import FREE, MB
from experiments.plotting.charts import Axis, Bars, Chart, Mark, Panel, Rule
from experiments.plotting.palette import TECHNIQUES
from simulator.compiled.engine import simulate
from simulator.machine import Machine

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
    return [{"shown": name, "batch_size": settings.batch_size} for name in figures.chosen(settings, "shown", LABELS)]


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


def lines(rows: list[Row], ours: dict[str, float]) -> list[Row]:
    """A line of the table for every number in the paper's text; PyTorch's beside the peaks."""
    names = {"MB": "peak, MB", "step": "step of the peak", "tensors": "tensors in memory then"}
    theirs = next((row for row in rows if row["shown"] == "captured"), None)
    pytorch = {} if theirs is None else {
        "baseline, MB": theirs["all"] / MB, "baseline, tensors": theirs["tensors"],
        **{f"{name}, MB": n / MB for name, n in theirs["peaks"].items()},
    }  # fmt: skip
    out = []
    for key, paper in PAPER.items():
        if key in ours:
            technique, _, rest = key.partition(", ")
            words = f"{LABELS[technique]}: {names.get(rest, rest)}" if technique in LABELS else key
            digits = 3 if "MB" in key else 0
            out.append({
                "words": f"no sharing of memory: {rest}" if technique == "baseline" else words, "paper": exact(paper),
                "ours": f"{ours[key]:,.{digits}f}",
                "pytorch": f"{pytorch[key]:,.{digits}f}" if key in pytorch else None,
            })  # fmt: skip
    return out


def exact(value: float) -> str:
    """A number of the paper as it is printed."""
    return f"{value:,.3f}".rstrip("0").rstrip(".")


def operator(name: str) -> str:
    """aten.add.Tensor: add."""
    return name.removeprefix("aten.").partition(".")[0]


def numbers(rows: list[Row]) -> Row:
    """Which numbers agree, and by which tensors the others differ; of what was run."""
    ours, by = found(rows), {name: next((row for row in rows if row["shown"] == name), None) for name in LABELS}

    def agrees(key: str) -> bool:
        unit = 0.5 if key == "recompute, MB" or "MB" not in key else 0.0011
        return abs(ours[key] - PAPER[key]) < unit

    live, offload, again, _ = by.values()
    layer = dict(live["layer"]) if live else {}
    return {
        "lines": lines(rows, ours), **by, "of": len(PAPER.keys() & ours),
        "exact": sum(map(agrees, PAPER.keys() & ours)),
        "peak": {name: ours.get(f"{name}, MB") for name in PLANS}, "live_tensors": ours.get("liveness, tensors"),
        "outputs": ours.get("outputs of CONV1 to CONV5 at step 32, MB"), "layer": list(layer),
        "layer_count": len(layer), "layer_bytes": sum(layer.values()),
        "others": live and len(live["at_peak"]) - len(layer),
        "more": offload and PAPER["offload, MB"] - ours["offload, MB"],
        "nine": offload and [f"{name} {nbytes / MB:.3f}" for name, nbytes in offload["at_peak"]],
        "last": again and [name for name, _ in again["at_peak"]], "each": again and again["at_peak"][0][1],
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """A panel per technique: memory at each step, with the number of live tensors above, and the peak marked."""
    top = 1.1 * max((row["all"] for row in rows if row["shown"] in PLANS), default=0) / MB
    panels = []
    for row in rows:
        name, steps, ink = row["shown"], row["steps"], TECHNIQUES[row["shown"]]
        x, sizes, most = range(1, len(steps) + 1), [s[2] / MB for s in steps], _most(row)
        bars = Bars(x, sizes, ink, thick=1.0, across=False, shade=0.35, texts=[f"{s[3] or ''}" for s in steps])
        marks: list[Mark] = [bars, Bars([most + 1], [sizes[most]], ink, thick=1.0, across=False)]
        ends = [sum(s[1] == "forward" for s in steps), sum(s[1] != "optimizer" for s in steps)]
        marks += [Rule(end + 0.5, line="-") for end in ends if end < len(steps)]
        paper = f" (paper: {exact(PAPER[f'{name}, MB'])} MB)" if f"{name}, MB" in PAPER else ""
        where = f"{'step' if name in PLANS else 'kernel'} {most + 1}, {operator(steps[most][0])} {steps[most][1]}"
        title, limits = f"{LABELS[name]}: peak {sizes[most]:,.3f} MB{paper} at {where}", (0.5, len(steps) + 0.5)
        kernels, high = Axis("kernel: forward | backward | optimizer", limits=limits), None
        if name in PLANS:
            whole, high = row["all"] / MB, top
            text = f"all {row['tensors']} tensors at once: {whole:,.3f} MB"
            marks.append(Rule(whole, across=True, text=text, below=True))
            kernels = Axis("forward | backward", limits=limits, ticks=list(x), names=[s[0] for s in steps])
        panels.append(Panel(title, marks, kernels, Axis("memory (MB)", limits=(0, high))))
    title = f"AlexNet, batch {rows[0]['batch_size']}: what is in memory at each step, and how many tensors"
    return Chart(title, panels, 1, (14.0, 3.1), (0.0, 0.4))


FIGURE = Figure("superneurons_alexnet", tasks, run, numbers, chart)
