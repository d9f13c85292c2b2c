"""Tests that ``reproduce`` resumes runs, continues after failed tasks, and shows all results on its page."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import reproduce
from experiments.common import cli
from experiments.figures.figure import Figure
from experiments.plotting.charts import Chart, Line, Panel
from experiments.reproduce import FigureRun
from simulator import Machine
from tests.experiments.conftest import figure_settings

TEXT = """## Squares

Fig. 1 of "Numbers".

| x | y |
|---|---:|
{%for line in lines%}
| {{line.x}} | {{line.y}} |
{%endfor%}

- There are {{count}}.

### Claims

| squares are at least x | always | {{above}} of {{count}} | {{holds(above, count)}} |
| control: as many cubes | – | {{above}} of {{count}} | {{holds(above, count)}} |
| VGG16 is a square | always | yes | {{holds(count, count)}} |

### Choices

More.
"""


def square(task: dict[str, Any], machine: Machine) -> dict[str, Any]:
    return {"y": task["x"] ** 2}


def squares_of(run: Any = square) -> Figure:
    """Returns a figure with three tasks."""

    class Squares(Figure):
        name = "squares"
        text = TEXT
        page = "own"

        def tasks(self, settings: Any) -> list[dict[str, Any]]:
            return [{"x": x} for x in settings.x]

        def run(self, task: dict[str, Any], machine: Machine) -> dict[str, Any]:
            return run(task, machine)

        def template_values(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
            above = sum(row["y"] >= row["x"] for row in rows)
            return {"lines": [{"x": row["x"], "y": row["y"]} for row in rows], "count": len(rows), "above": above}

        def chart(self, rows: list[dict[str, Any]]) -> Chart:
            return Chart("Squares", [Panel("", [Line([1], [1])])])

    return Squares()


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "figure", lambda name: squares_of())
    monkeypatch.setattr(reproduce, "names", lambda: ["squares"])


def start(out: Path, machine: str | None = None, **more: Any) -> FigureRun:
    own = {"name": "squares", "machine": "gtx1080ti", "x": [1, 2, 3], "quick": {"x": [2]}}
    return FigureRun({**own, **more}, False, machine, out)


def test_an_unknown_figure_is_refused_with_the_nearest() -> None:
    with pytest.raises(cli.UsageError, match="'smartpool_table1'"):
        reproduce.figure("smartpool_tabel1")


def test_a_figure_from_its_settings_to_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called = dict(figure_settings("superneurons_table3"))
    out = tmp_path / "out"
    reproduce.make([{**called, "quick": {"batches": [256]}}], True, None, "processes", 1, out)
    assert sorted(path.name for path in out.iterdir() if path.is_file()) == [
        "README.md",
        "superneurons.md",
        "superneurons_table3.json",
        "superneurons_table3.png",
    ]
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    (row,) = json.loads((out / "superneurons_table3.json").read_text())["rows"]
    assert row["batch_size"] == 256 and "| 256 | 2.56 | 1.33 |" in (out / "superneurons.md").read_text()
    claim = (
        "[copies without the Tensor Cache, GB](superneurons.md#superneurons_table3) | 2.56 | 1.33 | not reproduced |"
    )
    assert claim in (out / "README.md").read_text()


def test_a_stopped_run_resumes(squares: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(tmp_path)
    assert first.remaining == first.tasks == [{"x": 1}, {"x": 2}, {"x": 3}]
    for figure, task, row in reproduce.run_tasks([(first, t) for t in first.remaining[1:]], "processes", 1):
        assert isinstance(row, dict) and row.pop(reproduce.SECONDS) >= 0
        figure.record(task, row)
    with (tmp_path / "squares.jsonl").open("a") as file:
        file.write('{"code": "sto')  # interrupted while writing
    assert start(tmp_path).remaining == [{"x": 1}]
    assert start(tmp_path, x=[3, 4]).remaining == [{"x": 4}]
    assert len(start(tmp_path, machine="k40c").remaining) == 3
    second = start(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(reproduce, "code", lambda name: "changed")
        assert len(start(tmp_path).remaining) == 3
    second.record({"x": 1}, {"x": 1, "y": 1})
    assert [row["y"] for row in second.rows] == [1, 4, 9]  # in task order
    second.finish()
    assert start(tmp_path).remaining == []  # kept until all figures of the run are finished
    second.delete_partial()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["squares.json", "squares.png"]
    assert len(start(tmp_path).remaining) == 3  # a finished run is not resumed
    found = json.loads((tmp_path / "squares.json").read_text())
    assert len(found["fingerprint"]["code"]) == 16
    assert found["rows"] == second.rows and found["settings"] == {"x": [1, 2, 3]} and found["machine"] == "gtx1080ti"


def test_other_figures_continue_after_a_failure(squares: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(task: dict[str, Any], machine: Machine) -> dict[str, Any]:
        return {"y": task["x"] // (2 - task["x"])}

    monkeypatch.setattr(reproduce, "figure", lambda name: squares_of(run))
    made = start(tmp_path)
    (error,) = reproduce.compute([made], "processes", jobs=1)
    assert isinstance(error, ZeroDivisionError) and error.__notes__ == ["in squares, {'x': 2}"]
    assert made.remaining == start(tmp_path).remaining == [{"x": 2}] and not (tmp_path / "squares.json").exists()


def test_quick_takes_fewer_points(squares: None, tmp_path: Path) -> None:
    own = FigureRun({"name": "squares", "x": [1, 2, 3], "quick": {"x": [2]}}, True, "v100", tmp_path, {"x"})
    assert own.settings["x"] == [1, 2, 3]  # typed beside quick=true
    made = FigureRun({"name": "squares", "x": [1, 2, 3], "quick": {"x": [2]}}, True, "v100", tmp_path)
    assert made.tasks == [{"x": 2}] and made.machine.name == "v100"


def test_the_page_shows_what_is_there(squares: None, tmp_path: Path) -> None:
    assert list(reproduce.pages(tmp_path)) == ["README.md"]
    made = start(tmp_path, x=[3])
    made.record({"x": 3}, {"x": 3, "y": 9})
    made.finish()
    pages = reproduce.pages(tmp_path)
    assert "| [squares are at least x](own.md#squares) | always | 1 of 1 | reproduced |" in pages["README.md"]
    assert "| [control: as many cubes](own.md#squares) | – | 1 of 1 | holds |" in pages["README.md"]  # not counted
    assert "| [Figures of our own](own.md) | 1 |  |  |  |  |" in pages["README.md"]
    page = pages["own.md"]
    for words in ("## Squares", 'Fig. 1 of "Numbers".', "![squares](squares.png)", "| 3 | 9 |", "- There are 1."):
        assert words in page
    assert "Choices: More." in page and "](squares.json)" in page
    (tmp_path / "squares.png").unlink()
    reproduce.redraw_figures(["squares"], tmp_path)
    assert (tmp_path / "squares.png").exists() and (tmp_path / "own.md").read_text() == page
    (tmp_path / "squares.json").write_text('{"rows": [{"x": 3}], "command": ""}')
    with pytest.raises(reproduce.FormatError, match=r"squares\.json: not a result of this figure"):
        reproduce.pages(tmp_path)


def test_a_figures_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "python -m experiments.reproduce figure=all jobs=2 quick=true"
    monkeypatch.setattr(reproduce.report, "command", lambda: typed)
    assert reproduce.figure_command("squares") == "python -m experiments.reproduce figure=squares quick=true"
