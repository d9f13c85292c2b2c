"""Figures of the papers: what is computed, that a stopped run goes on, and the page."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from experiments import figures, reproduce
from experiments.common import cli
from experiments.figures import smartpool_fig10 as fig10, smartpool_table1 as table1
from experiments.figures.figure import Figure
from experiments.plotting.charts import Chart, Line, Panel
from experiments.reproduce import Work
from simulator import Kernel, Machine, Program, Tensor
from simulator.pool import program_lifetimes, smartpool

MACHINE = Machine.load("gtx1080ti")


# ------------------------------------------------------------------------------------------- the seam


def test_an_unknown_figure_is_refused_with_the_nearest() -> None:
    with pytest.raises(cli.UsageError, match="'smartpool_table1'"):
        cli.check_overrides("reproduce", ["figure=smartpool_tabel1"], sweep=False)
    with pytest.raises(cli.UsageError, match="there is no figure None"):
        reproduce.figure(None)
    cli.check_overrides("reproduce", ["figure=all", "quick=true", "gpu=k40c"], sweep=False)


TEXT = """# Squares

Fig. 1 of "Numbers".

| x | y |
|---|---:|
| [lines] {x} | {y} |

- There are {count}.

## Choices

More.
"""


def run_square(task: dict[str, Any], machine: Machine) -> dict[str, Any]:
    return {"y": task["x"] ** 2}


def squares_of(run: Any = run_square) -> Figure:
    """A figure of three tasks."""
    numbers = lambda rows: {"lines": [{"x": r["x"], "y": r["y"]} for r in rows], "count": len(rows)}  # noqa: E731
    chart = lambda rows: Chart("Squares", [Panel("", [Line([1], [1])])])  # noqa: E731
    return Figure("squares", lambda config: [{"x": x} for x in config.x], run, numbers, chart, text=TEXT)


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "figure", lambda name: squares_of())
    monkeypatch.setattr(reproduce, "names", lambda: ["squares"])


def start(out: Path, machine: str | None = None, **more: Any) -> Work:
    own = {"name": "squares", "machine": "gtx1080ti", "x": [1, 2, 3], "quick": {"x": [2]}}
    return Work({**own, **more}, False, machine, out)


def test_a_stopped_run_goes_on(squares: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(tmp_path)
    assert first.left == first.tasks == [{"x": 1}, {"x": 2}, {"x": 3}]
    for figure, task, row in reproduce.done([(first, t) for t in first.left[1:]], "processes", 1):
        assert isinstance(row, dict) and row.pop(reproduce.SECONDS) >= 0
        figure.keep(task, row)
    with (tmp_path / "squares.jsonl").open("a") as file:
        file.write('{"code": "sto')  # stopped while writing
    assert start(tmp_path).left == [{"x": 1}]
    assert start(tmp_path, x=[3, 4]).left == [{"x": 4}]
    assert len(start(tmp_path, machine="k40c").left) == 3
    second = start(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(reproduce, "code", lambda name: "changed")
        assert len(start(tmp_path).left) == 3
    second.keep({"x": 1}, {"x": 1, "y": 1})
    assert [row["y"] for row in second.rows] == [1, 4, 9]  # in the order of the tasks
    second.finish()
    assert start(tmp_path).left == []  # until all figures of a run are finished
    second.forget()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["squares.json", "squares.png"]
    assert len(start(tmp_path).left) == 3  # a finished run is not gone on with
    found = json.loads((tmp_path / "squares.json").read_text())
    assert found["rows"] == second.rows and found["settings"] == {"x": [1, 2, 3]} and found["machine"] == "gtx1080ti"


def test_the_others_go_on_where_one_fails(squares: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(task: dict[str, Any], machine: Machine) -> dict[str, Any]:
        return {"y": task["x"] // (2 - task["x"])}

    monkeypatch.setattr(reproduce, "figure", lambda name: squares_of(run))
    made = start(tmp_path)
    (error,) = reproduce.compute([made], "processes", jobs=1)
    assert isinstance(error, ZeroDivisionError) and error.__notes__ == ["in squares, {'x': 2}"]
    assert made.left == start(tmp_path).left == [{"x": 2}] and not (tmp_path / "squares.json").exists()


def test_a_line_cut_off_does_not_swallow_the_next(squares: None, tmp_path: Path) -> None:
    start(tmp_path).keep({"x": 1}, {"x": 1, "y": 1})
    part = tmp_path / "squares.jsonl"
    part.write_text(part.read_text() + '{"code": "sto')
    start(tmp_path).keep({"x": 2}, {"x": 2, "y": 4})
    assert start(tmp_path).left == [{"x": 3}]


def test_quick_takes_fewer_points(squares: None, tmp_path: Path) -> None:
    own = Work({"name": "squares", "x": [1, 2, 3], "quick": {"x": [2]}}, True, "v100", tmp_path, {"x"})
    assert own.settings["x"] == [1, 2, 3]  # typed beside quick=true
    made = Work({"name": "squares", "x": [1, 2, 3], "quick": {"x": [2]}}, True, "v100", tmp_path)
    assert made.tasks == [{"x": 2}] and made.machine.name == "v100"


def test_the_page_shows_what_is_there(squares: None, tmp_path: Path) -> None:
    assert "##" not in reproduce.page(tmp_path)
    made = start(tmp_path, x=[3])
    made.keep({"x": 3}, {"x": 3, "y": 9})
    made.finish()
    page = reproduce.page(tmp_path)
    assert "- [Squares](#squares)" in page
    for words in ("## Squares", 'Fig. 1 of "Numbers".', "![Squares](squares.png)", "| 3 | 9 |", "- There are 1."):
        assert words in page
    assert "More." not in page and "](squares.json)" in page
    (tmp_path / "squares.json").write_text('{"rows": [{"x": 3}], "command": ""}')
    with pytest.raises(reproduce.FormatError, match=r"squares\.json: not a result of this figure"):
        reproduce.page(tmp_path)


def test_the_pictures_are_drawn_again(squares: None, tmp_path: Path) -> None:
    made = start(tmp_path, x=[3])
    made.keep({"x": 3}, {"x": 3, "y": 9})
    made.finish()
    (tmp_path / "squares.png").unlink()
    reproduce.draw_again(["squares"], tmp_path)
    assert (tmp_path / "squares.png").exists() and "| 3 | 9 |" in (tmp_path / "README.md").read_text()


def test_a_figures_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "python -m experiments.reproduce figure=all jobs=2 quick=true"
    monkeypatch.setattr(reproduce.report, "command", lambda: typed)
    assert reproduce.own_command("squares") == "python -m experiments.reproduce figure=squares quick=true"


# ---------------------------------------------------------------------------------- SmartPool, Table I


@pytest.mark.parametrize("name", table1.PAPER)
def test_workloads_are_those_of_the_table(name: str) -> None:
    config, paper = figures.workload(name), table1.PAPER[name]
    assert config["paper_peak_mb"] == paper["load"] and config["batch_size"] == 100
    measured = figures.measured_ms(config, MACHINE)
    speedups = paper["smartpool_speedup"], paper["cnmem_speedup"]
    assert measured == pytest.approx(paper["ms"] / max(speedups), rel=0.025)
    assert figures.measured_ms(config, Machine.load("k40c")) is None


def test_what_singa_keeps() -> None:
    # Weights of 8 x 3 x 3 x 3 floats, 864 bytes, and 16/9 of that transformed. The others are 1x1 or of stride 2.
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, stride=2), nn.Linear(8, 2))
    gradients, filters = table1.kept_by_singa(model)
    assert [t.nbytes for t in filters] == [1536]
    assert sum(t.nbytes for t in gradients) == 4 * sum(p.numel() for p in model.parameters())
    assert all(t.persistent for t in gradients + filters)


def test_a_layer_keeps_its_largest_workspace() -> None:
    # Of weight 1, forward needs 5 and backward 7; the smaller parameter is its bias. Of weight 2, forward needs 3.
    sizes = (10, 40, 40, 4)
    tensors = tuple(Tensor(f"t{i}", n, "parameter" if i else "activation", True) for i, n in enumerate(sizes))
    kernels = (
        Kernel("a", "conv", "forward", (0, 1, 3), (0,), 1, workspace=5),
        Kernel("b", "conv", "forward", (0, 2), (0,), 1, workspace=3),
        Kernel("c", "conv", "backward", (0, 1), (0,), 1, workspace=7),
        Kernel("d", "other", "backward", (0,), (0,), 1),
    )
    assert table1.workspaces(Program("p", tensors, kernels)) == 7 + 3


def test_multiples_of_the_weights() -> None:
    # The paper's load grows by 2824 - 1452 = 1372 units of 10 bytes, ours by 12,000: by 17.2 times the 100 bytes of
    # more weights less, of which it has two times, weights and momentum.
    rows = [
        {"network": "resnet18", "load": 1000, "weights": 50},
        {"network": "resnet34", "load": 13000, "weights": 150},
    ]
    assert table1.multiples(rows, 10) == pytest.approx([19.2])
    assert table1.multiples([*rows[:1], {"network": "vgg11", "load": 1, "weights": 1}], 10) == []


def test_speedup() -> None:
    row = {"ideal_ns": 100, "allocation_ns": {"cudamalloc": 85, "cnmem": 0, "smartpool": 25}}
    assert table1.speedup(row, "cnmem") == 1.85 and table1.speedup(row, "smartpool") == 1.48


def test_ratios() -> None:
    # Three blocks of 600 bytes, two at a time: a load of 1200, 2 x 1024 aligned to 512.
    tensors = tuple(Tensor(f"t{i}", 600) for i in range(3))
    kernels = tuple(
        Kernel(f"k{i}", "other", "forward", (i - 1,) if i else (), (i,) if i < 3 else (), 10) for i in range(4)
    )
    found = table1.ratios(program_lifetimes(Program("p", tensors, kernels)).intervals, MACHINE)
    assert found["smartpool"] == 1.0 and found["aligned"] == 2048 / 1200 and found["cnmem"] >= 2048 / 1200


def test_overlapping_blocks_are_found_out(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    lives = program_lifetimes(program).intervals
    assert figures.packed("smartpool", lives).footprint == lives.peak_bytes
    wrong = smartpool.Packing(0 * lives.nbytes, 0)
    monkeypatch.setattr(figures, "run", lambda *_: (lives, wrong))
    with pytest.raises(AssertionError, match=r"smartpool: blocks \d+ and \d+ share a byte"):
        figures.packed("smartpool", lives)


# --------------------------------------------------------------------------------- SmartPool, Fig. 10


def test_smallest_footprints(program: Program) -> None:
    whole = smartpool.pack(program_lifetimes(program).intervals, 512).footprint
    search = {"overheads": [0.0, 0.1, 10.0], "pool": "smartpool", "seconds": 1.0, "steps": 4}
    found = fig10.smallest(program, MACHINE, search)
    assert [row["at_most"] for row in found] == search["overheads"]
    for row in found:
        assert row["overhead"] <= max(row["at_most"], fig10.ZERO) and row["load"] <= row["footprint"] <= whole
    none, some, much = (row["footprint"] for row in found)
    assert much < some <= none < whole
    # Of a chain's six activations of 32 MiB none but what a kernel touches need stay: at most half of them.
    assert much <= whole / 2


def test_durations_at_another_batch_size() -> None:
    config = {**figures.workload("vgg11"), "iteration_ms": {"gtx1080ti": 80}}
    # The roofline grows with the batch, but for launches and weights.
    assert 40_000_000 < fig10.at_batch(config, 50, MACHINE).ideal_ns < 60_000_000
