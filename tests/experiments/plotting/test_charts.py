"""Tests that every kind of mark is drawn."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments.plotting import charts
from experiments.plotting.charts import Axis, Bars, Chart, Line, Panel, Rule, Words, groups, pairs
from experiments.plotting.palette import Look


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collects the saved figures."""
    found: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: found.append(self) or save(self, *a, **k))
    return found


def test_every_kind_of_mark(tmp_path: Path, drawn: list[Figure]) -> None:
    look = Look("HOME", "#ff0000", "^")
    rows, columns = Axis(names=["a", "b"]), Axis(names=["c", "d"])
    marks = [*pairs(look, [1, 2], [3, None])]
    marks += [Rule(1, 2), Rule(3, text="x"), Words(1, 0, "words")]
    bars = groups([("p", "#0000ff", [1, None], ["one", "none"]), ("q", "#00ffff", [2, 3], ())])
    lines = [Line([1, 2, 3], [0.1, None, 0.3], label="p", band=(0, [0.2, 0.2, 0.4]), end="end", texts=["s"]),
             Bars([1], [0.2], across=False, hollow=True), Rule(0.2, across=True, text="level")]  # fmt: skip
    chart = Chart("title", [
        Panel("first", marks, Axis("x"), rows), Panel("second", marks, Axis("x"), rows),
        Panel("third", bars, columns, Axis("y")),
        Panel("fourth", lines, Axis("x", scale="log"), Axis("y", "%", (0, 0.5), ticks=[0, 0.25, 0.5])),
    ], columns=2)  # fmt: skip
    charts.draw(tmp_path / "a.png", chart)
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    (fig,) = drawn
    first, second, third, fourth = fig.axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["a", "b"] and first.yaxis_inverted()
    assert not any(text.get_text() for text in second.get_yticklabels()), "names that a neighbour has are left out"
    assert [round(bar.get_height()) for bar in third.patches if bar.get_width() < 0.5] == [1, 0, 2, 3]
    keys = [text.get_text() for text in fig.legends[0].get_texts()]
    assert keys == ["HOME, paper", "HOME, ours", "p", "q"]
    assert {"end", "s", "level"} <= {text.get_text() for text in fourth.texts}
