"""Tests data behind the plots, and that every kind of mark of a chart is drawn."""

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import agents
from agents.planner import Family
from experiments.common.curves import GREEDY
from experiments.common.report import MIB
from experiments.plotting import charts, palette, plots
from experiments.plotting.charts import Axis, Bars, Chart, Line, Panel, Rule, Words, groups, pairs
from simulator import Machine, Plan, Program, Swap, simulate

MACHINE = Machine("m", 2**40, 4 * 10**9, 4 * 10**9)


def result(planner: str, limit: float, overhead: float | None, bound: float | None) -> dict:
    """Returns a row with the keys that plots read; no plan fits below 35 % of the peak."""
    return {
        "planner": planner,
        "feasible": overhead is not None,
        "overhead": overhead,
        "limit_fraction": limit,
        "limit_bytes": int(1000 * limit),
        "bound_overhead": bound,
        "bound_bytes": 350,
    }


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collects the saved figures."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or save(self, *a, **k))
    return figures


def test_the_memory_curve_is_that_of_the_last_iteration(program: Program) -> None:
    plan = Plan(tuple(Swap(*gap) for gap in program.gaps(2**20)))
    required = simulate(program, plan, MACHINE, program.peak_bytes).required_bytes
    timeline = simulate(program, plan, MACHINE, required, iterations=3)
    ms, used = plots.steady_memory(timeline)
    assert ms[0] == 0 and np.isclose(ms[-1], timeline.iteration_ns / 1e6)
    assert (np.diff(ms) >= 0).all()
    assert used.max() * MIB <= required
    # The byte-seconds under the curve equal those of the timeline's intervals.
    begin, end = timeline.boundaries[-2:]
    area = 0
    last = (0, 0)
    for time, level in (*timeline.memory, (end, 0)):
        area += max(0, min(time, end) - max(last[0], begin)) * last[1]
        last = (time, level)
    assert np.isclose((np.diff(ms) * used[:-1]).sum() * 1e6 * MIB, area)


def test_pictures_of_nothing_feasible(tmp_path: Path, program: Program) -> None:
    """Plots results without plans or feasible episodes, and leaves no temporary file."""
    row = result("none", 0.1, None, None)
    plots.overhead_by_limit(tmp_path / "overhead.png", [row], "t")
    episode = SimpleNamespace(episode=0, overhead=float("nan"), feasible=False, best_overhead=float("nan"))
    plots.learning_curve(tmp_path / "learning.png", [episode], [row], "dqn", "t")
    plots.edit_learning(tmp_path / "edits.png", [{"hits": 0.0, "calls": 9}], [{"calls": 9, GREEDY: None}], [row], "t")
    pictures = ["edits.png", "learning.png", "overhead.png"]
    assert sorted(f.name for f in tmp_path.iterdir() if f.suffix != ".json") == pictures


def test_a_training_of_the_dqn(tmp_path: Path, saved: list[Figure]) -> None:
    """Plots by simulator calls: greedy policy and controls, hit rates, errors from the first update on."""
    history = [
        {"calls": 100, "hits": 0.1, "hits_random": 0.05},
        {"calls": 200, "hits": 0.2, "hits_random": 0.05, "td": 0.3, "loss": 0.2, "overhead": 0.04},
    ]
    points = [{"calls": 0, GREEDY: 0.05}, {"calls": 120, GREEDY: None}, {"calls": 200, GREEDY: 0.03}]
    rows = [
        result(name, 0.5, overhead, 0.0)
        for name, overhead in (("annealing", 0.01), ("without the network, equal calls", 0.035), ("dqn", 0.03))
    ]
    plots.edit_learning(tmp_path / "p.png", history, points, rows, "title")
    overhead, hits, error = saved[0].axes
    greedy, control = overhead.lines
    assert greedy.get_xydata().tolist() == [[0, 0.05], [200, 0.03]]
    assert (control.get_label(), control.get_ydata()[0]) == ("without the network, equal calls", 0.035)
    assert overhead.collections[0].get_offsets().tolist() == [[200, 0.04]]
    assert [line.get_xydata().tolist() for line in hits.lines] == [[[100, 0.1], [200, 0.2]], [[100, 0.05], [200, 0.05]]]
    assert [line.get_xydata().tolist() for line in error.lines] == [[[200, 0.3]], [[200, 0.2]]]


def test_every_planner_has_its_color() -> None:
    assert set(agents.PLANNERS) <= set(palette.LOOKS)
    assert len({look.color for look in palette.LOOKS.values()}) == len(palette.LOOKS)
    for family in palette.FAMILIES.values():
        assert len({look.marker for look in family.values()}) == len(family)
    assert set(palette.HUES) == {*palette.FAMILIES, "other"} == set(get_args(Family))


def test_a_few_planners_share_one_picture(tmp_path: Path, saved: list[Figure]) -> None:
    rows = [
        result(p, x, y + 0.001 * (p == "home"), floor)
        for p in ("annealing", "home")
        for x, y, floor in ((0.8, 0.0, 0.0), (0.6, 0.02, 0.01), (0.4, 0.2, 0.1))
    ] + [result("home", 0.3, None, None)]
    plots.overhead_by_limit(tmp_path / "p.png", rows, "title")
    (axes,) = saved[0].axes
    assert axes.get_xlim()[0] > 0.8 > 0.3 > axes.get_xlim()[1]  # tighter to the right
    lines = {to_hex(line.get_color()): line for line in axes.lines}
    assert lines[palette.color("home")].get_xydata().tolist() == [[0.4, 0.201], [0.6, 0.021], [0.8, 0.001]]
    # Between two limits the wider one's floor holds, down to the limit that no plan fits.
    band = axes.collections[0].get_paths()[0]
    inside = [band.contains_point(p) for p in [(0.61, 0.009), (0.59, 0.009), (0.41, 0.09), (0.36, 0.09), (0.34, 0)]]
    assert inside == [False, True, False, True, False]
    # Many planners are split into a panel per family.
    many = [result(name, x, 0.01 * i * (1 - x), 0.0) for i, name in enumerate(agents.untrained()) for x in (0.8, 0.6)]
    plots.overhead_by_limit(tmp_path / "q.png", many, "title")
    assert [axes.get_title(loc="left") for axes in saved[1].axes if axes.axison] == [
        *palette.FAMILIES,
        "the best of each family",
    ]


def test_every_kind_of_mark(tmp_path: Path, saved: list[Figure]) -> None:
    look = palette.Look("HOME", "#ff0000", "^")
    rows = Axis(names=["a", "b"])
    columns = Axis(names=["c", "d"])
    marks = [*pairs(look, [1, 2], [3, None])]
    marks += [Rule(1, 2), Rule(3, text="x"), Words(1, 0, "words")]
    bars = groups([("p", "#0000ff", [1, None], ["one", "none"]), ("q", "#00ffff", [2, 3], ())])
    lines = [
        Line([1, 2, 3], [0.1, None, 0.3], label="p", band=(0, [0.2, 0.2, 0.4]), end="end", texts=["s"]),
        Bars([1], [0.2], horizontal=False, hollow=True),
        Rule(0.2, horizontal=True, text="level"),
    ]
    chart = Chart(
        "title",
        [
            Panel("first", marks, Axis("x"), rows),
            Panel("second", marks, Axis("x"), rows),
            Panel("third", bars, columns, Axis("y")),
            Panel("fourth", lines, Axis("x", scale="log"), Axis("y", "%", (0, 0.5), ticks=[0, 0.25, 0.5])),
        ],
        columns=2,
    )
    charts.draw(tmp_path / "a.png", chart)
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    (fig,) = saved
    first, second, third, fourth = fig.axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["a", "b"] and first.yaxis_inverted()
    assert not any(text.get_text() for text in second.get_yticklabels()), "names that a neighbor has are left out"
    assert [round(bar.get_height()) for bar in third.patches if bar.get_width() < 0.5] == [1, 0, 2, 3]
    keys = [text.get_text() for text in fig.legends[0].get_texts()]
    assert keys == ["HOME, paper", "HOME, ours", "p", "q"]
    assert {"end", "s", "level"} <= {text.get_text() for text in fourth.texts}
