"""The committed results are those that the code of today gives: the cheapest of experiments/results, made again.

Compared to the last digit and in the order of the keys; left out by name (TIMED) is what a clock measured. Left out
are the figures whose cheapest row takes longest, what was trained, and searches that stop by the clock. A picture
depends on the version of Matplotlib that drew it (fonts, antialiasing), which stands in the PNG: it is compared to the
pixel where that is the installed one, and roughly elsewhere.
"""

import json
import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

import agents
from experiments import evaluate, pack, reproduce, workloads
from experiments.benchmark import packing
from experiments.common import report
from simulator import Machine, Program
from simulator.pool import files, smartpool
from tests.experiments.conftest import ROOT, Run

RESULTS = ROOT / "experiments" / "results"
CHEAP = ("home_fig6", "home_table3", "smartpool_fig2", "smartpool_fig8", "smartpool_fig10",
         "smartpool_fig11", "smartpool_table1", "superneurons_alexnet", "superneurons_table1", "superneurons_table2",
         "tensile_table1")  # fmt: skip
CHEAPEST = "superneurons_table3"  # made again as a whole, as a user does it
DRAWN = ("home_fig7", "home_table3", "smartpool_fig9", "superneurons_table1")  # bars, points, lines, columns
LETTERS = 0.5  # of what a blank page differs by: the pictures of Matplotlib 3.10 and 3.11 differ by 0.08 to 0.40
TIMED = (reproduce.SECONDS, "search_s", "evaluation_s", "processor", "plan_ms", "seconds")
SLOW = (
    "random_search",
    "autoswap_bo",
    "smartpool+autoswap",
    "home",
    "mutation",
    "annealing",
    "lp_round",
    "rerun_search",
    "policy",
    "policy_search",
    "best",
)


def committed(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def text(row: dict[str, Any]) -> str:
    """A row as a file has it, without what a clock measured."""
    return json.dumps({key: value for key, value in row.items() if key not in TIMED}, indent=1)


@cache
def vgg16(settings: str) -> tuple[Machine, Program]:
    config = json.loads(settings)
    machine = Machine.from_dict(config["machine"])
    return machine, workloads.load(config["workload"], machine).program


def same_picture(made: Path, name: str) -> None:
    """The same pixels, by the Matplotlib that drew ours; by another one, whose letters differ, nearly the same grey in
    squares of 8 x 8 pixels."""
    with Image.open(RESULTS / f"{name}.png") as ours, Image.open(made) as now:
        if f"version{metadata.version('matplotlib')}," in ours.info["Software"] and platform.machine() == "x86_64":
            assert np.array_equal(np.asarray(ours), np.asarray(now))
            return
        assert np.allclose(now.size, ours.size, rtol=0.01)
        assert coarsely_differ(ours, now) < LETTERS * coarsely_differ(ours, Image.new("L", ours.size, 255))


def coarsely_differ(ours: Image.Image, now: Image.Image) -> float:
    """Mean difference of the grey of 8 x 8 pixels, of 255."""
    size = ours.width // 8, ours.height // 8
    a, b = (np.asarray(image.convert("L").resize(size, Image.Resampling.BOX), float) for image in (ours, now))
    return float(np.abs(a - b).mean())


# -------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("name", CHEAP)
def test_the_cheapest_row_of_a_figure(name: str) -> None:
    found = committed(name)
    config = OmegaConf.load(reproduce.CONFIGS / f"{name}.yaml")
    assert found["machine"] == config.machine and found["settings"] == {key: config[key] for key in found["settings"]}
    made, rows = reproduce.figure(name), found["rows"]
    tasks = made.tasks(OmegaConf.create(found["settings"]))
    assert len(tasks) == len(rows)
    i = min(range(len(rows)), key=lambda i: rows[i][reproduce.SECONDS])
    assert text({**tasks[i], **made.run(tasks[i], Machine.load(found["machine"]))}) == text(rows[i])


def test_a_figure_as_a_whole(run: Run, tmp_path: Path) -> None:
    done = run("reproduce", f"figure={CHEAPEST}", "jobs=1", f"out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path) and "without cache, GB: paper" in done.stdout
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"README.md", f"{CHEAPEST}.json", f"{CHEAPEST}.png"}

    def lines(folder: Path) -> list[str]:
        every = (folder / f"{CHEAPEST}.json").read_text().splitlines()
        return [line for line in every if f'"{reproduce.SECONDS}"' not in line]

    assert lines(tmp_path) == lines(RESULTS)
    same_picture(tmp_path / f"{CHEAPEST}.png", CHEAPEST)


def test_every_result_has_a_chart() -> None:
    assert set(reproduce.names()) - {path.stem for path in RESULTS.glob("*.json")} == {"compiled_gpu"}  # not run yet
    for name in set(reproduce.names()) - {"compiled_gpu"}:
        chart = reproduce.figure(name).chart(committed(name)["rows"])
        assert chart.panels and all(panel.marks for panel in chart.panels), name


def test_the_page_is_that_of_the_results() -> None:
    """``python -m experiments.reproduce redraw=true out=experiments/results`` writes it again."""
    assert reproduce.page(RESULTS) == (RESULTS / "README.md").read_text()


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_of_the_results(name: str, tmp_path: Path) -> None:
    reproduce.figure(name).draw(committed(name)["rows"], tmp_path / "a.png")
    same_picture(tmp_path / "a.png", name)


# ------------------------------------------------------------------------------------------- planners


def test_cheap_planners_on_vgg16() -> None:
    found = committed("planners_vgg16")
    machine, program = vgg16(json.dumps(found["config"]))
    assert found["program"]["fingerprint"] == program.fingerprint
    limits = list(dict.fromkeys(row["limit_bytes"] for row in found["results"]))[1::2]  # 70, 50, 30 %
    rows = [row for row in found["results"] if row["planner"] not in SLOW and row["limit_bytes"] in limits]
    names = list(dict.fromkeys(row["planner"] for row in rows))
    assert {*names, *SLOW} == {name for name in agents.PLANNERS if not agents.PLANNERS[name].learned}
    options = {"mode": None, "calls": None, "workspace": False}
    again = evaluate.score_all(program, machine, limits, names, found["config"]["seed"], 1, options)
    assert [text(row) for row in again] == [text(row) for row in rows]


def test_cheap_planners_of_the_memory_curve() -> None:
    found = committed("memory_curve")
    machine, program = vgg16(json.dumps(found["config"]))
    rows = [row for row in found["results"] if row["planner"] == "none" or row["planner"].startswith("autoswap")]
    assert len(rows) == 5
    for row in rows:  # of version 0.1: without a floor
        again = report.score(row["planner"], program, machine, row["limit_bytes"], row["seed"])[0]
        assert text({key: again[key] for key in row}) == text(row)


# ------------------------------------------------------------------------------------------- packings


def test_smartpool_on_the_instances_of_minimalloc() -> None:
    found = committed("pack_minimalloc")["results"]
    machine = Machine.load("gtx1080ti")
    assert len(found) == 11
    for letter, algorithms in found.items():
        blocks = files.load(ROOT / "tests" / "data" / "minimalloc" / f"{letter}.1048576.csv", None).intervals
        for name in ("smartpool", "smartpool_first"):
            (packed,) = pack.pack_all([name], blocks, machine, 1, 5.0)
            assert text(pack.row(packed, blocks.peak_bytes)) == text(algorithms[name])


def test_smartpool_on_many_blocks() -> None:
    blocks = packing.scattered(20_000, seed=0)
    assert round(smartpool.pack(blocks).ratio(blocks), 5) == committed("bench")["smartpool_ratio"]["20000"]
