"""Fig. 2 of the SmartPool paper: memory load over several iterations of eager PyTorch, operator by operator."""

from __future__ import annotations

from typing import Any, NamedTuple

from omegaconf import DictConfig

from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.figures.smartpool import MB
from experiments.figures.smartpool_table1 import PAPER
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Rule, Words
from experiments.plotting.palette import ALLOCATORS, FAINT, LOAD
from simulator import Machine


class Operation(NamedTuple):
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


def signature(lines: list[Operation]) -> list[tuple[str, int, int]]:
    """Operations with the tensors renumbered by when each first appears among them."""
    number: dict[int, int] = {}
    return [(line.kind, line.nbytes, number.setdefault(line.tensor, len(number))) for line in lines]


def record(parts: Any, iterations: int) -> tuple[int, list[Operation], list[int]]:
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
            self.lines: list[Operation] = []
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
                self.lines.append(Operation("free", self.number[key], self.live.pop(key)))

        def note(self, kind: str, tensor: Tensor) -> None:
            self.lines.append(
                Operation(
                    kind, self.number[StorageWeakRef(tensor.untyped_storage())], tensor.untyped_storage().nbytes()
                )
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


def numbers(rows: list[Row]) -> Row:
    """What repeats, what does not, and whether the captured program is the iteration that repeats."""
    differs = not any(row["same"][0] for row in rows)
    return {
        "networks": [
            {**row, "label": figures.label(row["network"]), "paper": PAPER[row["network"]]["load"],
             "as_second": [i for i, same in enumerate(row["same"], 1) if same]}
            for row in rows
        ],
        "iterations": rows[0]["iterations"], "count": len(rows),
        "middle": sum(all(row["same"][1:]) for row in rows),
        "exact": sum(row["peaks"][1] == row["captured"] for row in rows),
        "first": max(row["operations"][1] - row["operations"][0] for row in rows) if differs else None,
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """Load by operation; iterations apart and named."""
    row = next(row for row in rows if row["points"])
    total, ink = sum(row["operations"]), ALLOCATORS["smartpool"].colour
    x, y = [0, *(i for i, _ in row["points"]), total], [row["before"] / MB, *(b / MB for _, b in row["points"])]
    y.append(y[-1])
    peak, bounds = row["captured"] / MB, [*row["starts"], total]
    marks: list[Mark] = [
        Line(x, y, ink, step=True, width=1.2, band=(0, y), shade=0.15),
        Rule(peak, across=True, colour=LOAD, label=f"peak of the captured program: {peak:,.0f} MB"),
        *(Rule(start, colour=FAINT, line="-") for start in row["starts"][1:]),
    ]
    for i, (a, b, same) in enumerate(zip(bounds, bounds[1:], row["same"], strict=False), 1):
        words = "" if i == 2 else "\nas the 2nd" if same else "\nno momentum yet" if i == 1 else "\nother"
        marks.append(Words((a + b) / 2, 0.98, f"iteration {i}{words}", top=True))
    panel = Panel(
        "", marks, Axis("operation (malloc, free, read or write)", "{:,.0f}", (0, total)),
        Axis("memory load (MB)", limits=(0, 1.3 * max(y))),
    )  # fmt: skip
    title = f"{figures.label(row['network'])}, batch size 100: load over {row['iterations']} iterations"
    return Chart(title, [panel], size=(10.0, 3.9))


FIGURE = Figure("smartpool_fig2", tasks, run, numbers, chart)
