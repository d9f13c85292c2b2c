"""Fig. 2 of "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section II-D: memory load of
VGG16 over five training iterations, by operation index (malloc, free, read, write). It shows that iterations repeat.

The paper's text has no numbers of the figure, only the claim that lifetimes, sizes and the order of reads and writes
are "rather stable across all the middle iterations". Here it is tested, for the other networks too: five iterations run
in eager PyTorch, on tensors without memory (the meta device), and every operator is recorded (``Recorder``). This is
not the captured program, of which one iteration repeats by definition.

1. A new batch is made in each iteration, and the one before dies, as in a training loop with a data loader.
2. Two iterations are the same if their (operation, bytes, tensor) are; a tensor is known by when it first appeared.
3. A kernel is an operator that is no view; it reads its inputs and writes its outputs. A tensor is a storage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.smartpool import MB
from experiments.figures.smartpool_table1 import PAPER
from experiments.plotting.palette import ALLOCATORS, FAINT, INK, LOAD
from experiments.plotting.plots import figure
from simulator import Machine

TITLE = "SmartPool, Fig. 2: memory load over several iterations"


class Line(NamedTuple):
    """One operation: malloc, free, read or write of a tensor, by number in order of appearance."""

    kind: str
    tensor: int
    nbytes: int


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    iterations = cli.integer(settings, "iterations", least=3)
    found = figures.networks(settings)
    return [{"network": name, "iterations": iterations, "curve": name == found[0]} for name in found]


def run(task: Row, machine: Machine) -> Row:
    """Operations and loads of one network, in bytes; the curve's points are (operation, bytes from then on)."""
    from experiments import workloads  # PyTorch is only needed to run the network

    config = figures.workload(task["network"])
    before, lines, starts = record(workloads.build(config), task["iterations"])
    bounds = [*starts, len(lines)]
    parts = [lines[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    loads = [before]
    for line in lines:
        loads.append(loads[-1] + {"malloc": line.nbytes, "free": -line.nbytes}.get(line.kind, 0))
    signatures = [signature(part) for part in parts]
    return {
        "operations": [len(part) for part in parts],
        "peaks": [max(loads[a : b + 1]) for a, b in zip(bounds, bounds[1:], strict=False)],
        "same": [found == signatures[1] for found in signatures],  # as the second
        "starts": starts,
        "before": before,
        "captured": figures.program(task["network"], machine).peak_bytes,
        "points": [[i, b] for i, (a, b) in enumerate(zip(loads, loads[1:], strict=False)) if a != b]
        if task["curve"]
        else [],
    }


def signature(lines: list[Line]) -> list[tuple[str, int, int]]:
    """Operations with the tensors renumbered by when each first appears among them."""
    number: dict[int, int] = {}
    return [(line.kind, line.nbytes, number.setdefault(line.tensor, len(number))) for line in lines]


def record(parts: Any, iterations: int) -> tuple[int, list[Line], list[int]]:
    """Trains for some iterations and records the operations.

    Args:
        parts: model, loss function, optimizer and batch, as of ``workloads.build``.

    Returns:
        Bytes that are there before the first iteration; the operations; where among them each iteration starts.
    """
    import torch

    model, loss_fn, optimizer, (x, y) = parts
    recorder = _recorder()
    before = sum(recorder.know(tensor) for tensor in (*model.parameters(), *model.buffers()))
    starts = []
    with recorder:
        for _ in range(iterations):
            starts.append(len(recorder.lines))
            images, labels = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, y))
            loss_fn(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del images, labels
            recorder.reap()
    return before, recorder.lines, starts


def _recorder() -> Any:
    """A dispatch mode that writes down what every operator does to storages: ``lines``."""
    from torch import Tag, Tensor
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from executor.capture.operators import ALLOCATIONS, mutated, running_statistics

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[Line] = []
            self.number: dict[Any, int] = {}  # of storages, dead ones too
            self.live: dict[Any, int] = {}  # their bytes

        def know(self, tensor: Tensor) -> int:
            """Bytes of a tensor whose storage is new here; 0 of another."""
            key = StorageWeakRef(tensor.untyped_storage())
            if key in self.number:
                return 0
            self.number[key] = len(self.number)
            self.live[key] = tensor.untyped_storage().nbytes()
            return self.live[key]

        def reap(self) -> None:
            """Writes down the storages that died since the last operator."""
            for key in [key for key in self.live if key.expired()]:
                self.lines.append(Line("free", self.number[key], self.live.pop(key)))

        def note(self, kind: str, tensor: Tensor) -> None:
            self.lines.append(
                Line(kind, self.number[StorageWeakRef(tensor.untyped_storage())], tensor.untyped_storage().nbytes())
            )

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.reap()
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            out = func(*args, **(kwargs or {}))
            results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            for result in results:
                if self.know(result):
                    self.note("malloc", result)
            written = mutated(func, args, kwargs or {}) + running_statistics(func, args, kwargs or {})
            inside = {StorageWeakRef(x.untyped_storage()) for x in given}
            fresh = [x for x in results if StorageWeakRef(x.untyped_storage()) not in inside]
            view = Tag.inplace_view in func.tags or not (written or fresh)
            if not view and func._overloadpacket not in ALLOCATIONS:
                for kind, tensors in (("read", given), ("write", [*written, *fresh])):
                    for tensor in unique(tensors):
                        self.note(kind, tensor)
            return out

    def unique(tensors: list[Tensor]) -> list[Tensor]:
        return list({StorageWeakRef(x.untyped_storage()): x for x in tensors}.values())

    return Recorder()


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Per network: operations and peaks of the first and of the middle iterations, and which are the same."""
    heads = [
        "eager PyTorch", "operations, 1st iteration", "2nd", "peak, MB, 1st", "2nd", "captured program", "the paper's",
        "same as the 2nd",
    ]  # fmt: skip
    cells = []
    for row in rows:
        peaks = [f"{peak / MB:,.1f}" for peak in (*row["peaks"][:2], row["captured"])]
        cells.append([
            figures.label(row["network"]), *(f"{count:,}" for count in row["operations"][:2]), *peaks,
            f"{PAPER[row['network']]['load']:,.0f}", _same(row),
        ])  # fmt: skip
    return heads, cells


def _same(row: Row) -> str:
    return ", ".join(str(i) for i, same in enumerate(row["same"], 1) if same)


def notes(rows: list[Row]) -> list[str]:
    """What repeats, what does not, and that the captured program is the iteration that repeats."""
    count = rows[0]["iterations"]
    middle = [all(row["same"][1:]) for row in rows]
    exact = sum(row["peaks"][1] == row["captured"] for row in rows)
    first = max(row["operations"][1] - row["operations"][0] for row in rows)
    out = [
        f'"Rather stable across all the middle iterations (from the second to the second last)": in {sum(middle)} of '
        f"{len(rows)} networks iterations 2 to {count} are the same, operation by operation.",
    ]
    if not any(row["same"][0] for row in rows):
        out.append(
            f"The first iteration differs (by up to {first:,} operations): SGD's momentum does not exist before its "
            "first step. The last does not differ, as nothing is torn down here."
        )
    return [
        *out,
        f"The peak of the iteration that repeats is that of the captured program, to the byte, in {exact} of "
        f"{len(rows)} networks.",
        "The text has no numbers of the figure. The level differs from the paper's by what SINGA keeps besides "
        "(see Table I).",
    ]


def draw(rows: list[Row], path: Path) -> None:
    """Load by operation; iterations apart and named."""
    row = next(row for row in rows if row["points"])
    x, y = [0, *(i for i, _ in row["points"])], [row["before"] / MB, *(b / MB for _, b in row["points"])]
    total, ink = sum(row["operations"]), ALLOCATORS["smartpool"].colour
    with figure(path, 10.0, 4.4) as axes:
        axes.fill_between([*x, total], [*y, y[-1]], step="post", color=ink, alpha=0.15, linewidth=0)
        axes.step([*x, total], [*y, y[-1]], where="post", color=ink, linewidth=1.2)
        top = max(y)
        axes.axhline(row["captured"] / MB, color=LOAD, linewidth=1.1, linestyle=(0, (5, 3)))
        axes.annotate(f"peak of the captured program: {row['captured'] / MB:,.0f} MB", (total, row["captured"] / MB),
                      (0, 4), textcoords="offset points", ha="right", fontsize=9.5, color=LOAD,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
        bounds = [*row["starts"], total]
        for i, (a, b, same) in enumerate(zip(bounds, bounds[1:], row["same"], strict=False), 1):
            if a:
                axes.axvline(a, color=FAINT, linewidth=1)
            words = "" if i == 2 else "\nas the 2nd" if same else "\nno momentum yet" if i == 1 else "\nother"
            axes.text((a + b) / 2, 1.27 * top, f"iteration {i}{words}", ha="center", va="top", fontsize=9.5, color=INK)
        axes.set(
            xlim=(0, total), ylim=(0, 1.3 * top), xlabel="operation (malloc, free, read or write)",
            ylabel="memory load (MB)",
            title=f"{figures.label(row['network'])}, batch size 100: load over {row['iterations']} iterations",
        )  # fmt: skip
        axes.xaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
