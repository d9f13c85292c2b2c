"""Tests ``pack`` from the user's view: numbers, plot and solution."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from experiments import pack
from experiments.plotting import packing as pack_plot, palette
from simulator import Machine, Program
from simulator.compiled.encoding import NEVER
from simulator.pool import ALLOCATORS, Intervals, Packing, smartpool
from simulator.pool.intervals import overlap
from tests.experiments.conftest import Run
from tests.oracle.packing import overlaps

# lower, upper, bytes. Live together: a, c, e until 3; b, c, e until 9; then d, e: 12, 12 and 8 bytes.
TOY = {"a": (0, 3, 4), "b": (3, 9, 4), "c": (0, 9, 4), "d": (9, 21, 4), "e": (0, 21, 4)}


def blocks(rows: list[tuple[int, int, int]], period: int = NEVER) -> Intervals:
    return Intervals(*np.array(rows, np.int64).reshape(-1, 3).T.copy(), period)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Writes a file with unusual column order and an extra column."""
    lines = [f"{n},{i},{upper},{lower}" for i, (lower, upper, n) in TOY.items()]
    (tmp_path / "toy.csv").write_text("\n".join(["size,id,upper,lower", *lines, ""]))
    return tmp_path / "toy.csv"


# ------------------------------------------------------------------------------------------------ runs


def test_every_allocator_packs_the_toy(run: Run, toy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("pack", toy, f"out={out}", "seconds=0.2", "capacity=12").ok()  # as typed by a user
    assert {f.name for f in out.iterdir()} == {"results.json", "packing.png", "solution.csv", "summary.json", ".hydra"}
    assert (out / "packing.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((out / "results.json").read_text())
    assert list(found) == list(ALLOCATORS) == list(palette.ALLOCATORS)
    for row in found.values():
        assert set(row) == {"footprint", "load", "ratio", "seconds", "proven", "allocation_ns"}
        assert row["load"] == 12 and row["ratio"] == row["footprint"] / 12
        assert row["seconds"] >= 0
    # Three live blocks: of 4 bytes, 512 in CnMem, 1024 in the heap; one segment of PyTorch's small pool.
    assert [row["footprint"] for row in found.values()] == [12, 2 << 20, 3 * 512, 3 * 1024, 12, 12, 12, 12]
    # SmartPool's malloc looks up a table of 5: 3 levels of 2 ns, 5 times. Driver calls are far slower.
    assert found["smartpool"]["allocation_ns"] == 30 < found["cudamalloc"]["allocation_ns"]
    assert [name for name, row in found.items() if row["proven"]] == [
        "cudamalloc",
        "smartpool",
        "smartpool_first",
        "portfolio",
        "optimal",
    ]
    solution = list(csv.DictReader((out / "solution.csv").open()))
    assert {r["id"]: (int(r["lower"]), int(r["upper"]), int(r["size"])) for r in solution} == TOY
    offsets = np.array([int(r["offset"]) for r in solution])
    assert overlaps(blocks([TOY[r["id"]] for r in solution]), offsets) == [] and offsets.max() + 4 == 12
    table = [line.split() for line in done.stdout.splitlines()]
    assert ["cnmem", "1,536", "1.5", "KiB", "12", "128.0000"] in [words[:6] for words in table]
    assert {words[0]: words[-1] for words in table if words and words[0] in ALLOCATORS} == {
        name: "yes" if row["footprint"] == 12 else "no" for name, row in found.items()
    }


def test_a_program_repeats(run: Run, program: Program, program_file: Path, tmp_path: Path) -> None:
    """Online allocators run three iterations; alone, their own packing is the best."""
    words = (f"file={program_file}", "alignment=512")
    run("pack", *words, "algorithms=[smartpool,caching]", f"out={tmp_path / 'both'}").ok()
    found = json.loads((tmp_path / "both" / "results.json").read_text())
    assert list(found) == ["caching", "smartpool"]
    assert found["smartpool"]["load"] == found["smartpool"]["footprint"] == program.peak_bytes
    assert len((tmp_path / "both" / "solution.csv").read_text().splitlines()) == 1 + len(program.tensors)
    run("pack", *words, "algorithms=cnmem", f"out={tmp_path / 'one'}").ok()
    ids = [row["id"] for row in csv.DictReader((tmp_path / "one" / "solution.csv").open())]
    # t0 (the weight) and t1 (first write, last read) span the whole iteration.
    assert set(ids) == {"t0@0", "t1@0"} | {f"t{t}@{k}" for t in range(2, len(program.tensors)) for k in range(3)}
    assert len(ids) == len(set(ids))


def test_a_log_repeats_where_it_does(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "ops.log"
    log.write_text("malloc 0 5\n" + "malloc 1 3\nfree 1\nmalloc 2 4\nfree 2\n" * 4)
    for iteration, count in (("null", 3), ("true", 3), ("false", 9)):
        out = tmp_path / iteration
        done = run("pack", log, "algorithms=[smartpool]", f"iteration={iteration}", f"out={out}").ok()
        assert ("one iteration, repeated" in done.stdout) == (iteration != "false")
        assert len((out / "solution.csv").read_text().splitlines()) == 1 + count
        assert json.loads((out / "results.json").read_text())["smartpool"]["footprint"] == 9


def test_a_sweep_over_files(run: Run, toy: Path, tmp_path: Path) -> None:
    other = tmp_path / "it's a=b, and comma.csv"
    other.write_text("id,lower,upper,size\nx,0,1,7\n")
    run("pack", toy, other, "-m", "algorithms=smartpool").ok()
    found = (tmp_path / "work" / "runs").glob("pack-*/results.json")
    assert sorted(json.loads(f.read_text())["smartpool"]["footprint"] for f in found) == [7, 12]
    done = run("pack", toy, other, "-m", "algorithms=smartpool", f"out={tmp_path / 'out'}")
    assert done.returncode == 2 and "out: " in done.stderr  # already holds the run of the other file
    assert json.loads((tmp_path / "out" / "results.json").read_text())["smartpool"]["footprint"] == 12


@pytest.mark.parametrize(("offsets", "footprint"), [([0, 3], 7), ([0, 4], 7), ([-4, 0], 8)])
def test_a_packing_that_overlaps_or_lies_outside_is_not_believed(
    offsets: list[int], footprint: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "run", lambda name, intervals, *_: (intervals, Packing(np.array(offsets), footprint)))
    with pytest.raises(RuntimeError, match=r"overlap|outside"):
        pack.pack_all(["smartpool"], blocks([(0, 2, 4), (1, 3, 4)]), Machine.load("gtx1080ti"), 1, 1.0)


arcs = st.tuples(st.integers(0, 11), st.integers(1, 12), st.integers(0, 6), st.integers(0, 20))


@given(st.lists(arcs, max_size=12), st.booleans())
def test_the_fast_checker_is_the_slow_one(found: list, circle: bool) -> None:
    some = blocks([(lower, lower + length, n) for lower, length, n, _ in found], 12 if circle else NEVER)
    offsets = np.array([offset for *_, offset in found], np.int64)
    wrong = overlaps(some, offsets)
    assert (overlap(some, offsets) in wrong) if wrong else overlap(some, offsets) is None
    assert overlap(some, smartpool.pack(some).offsets) is None


# ------------------------------------------------------------------------------------------- the picture


def test_a_block_over_the_boundary_is_drawn_at_both_ends() -> None:
    some = blocks([(8, 12, 4), (1, 3, 5), (0, 10, 0), (2, 12, 1)], period=10)
    boxes, block = pack_plot.rectangles(some, Packing(np.array([0, 4, 0, 9]), 10))
    # left, right, bottom, top; empty blocks are not drawn
    assert boxes.tolist() == [[8, 10, 0, 4], [1, 3, 4, 9], [2, 10, 9, 10], [0, 2, 0, 4], [0, 2, 9, 10]]
    assert block.tolist() == [0, 1, 3, 0, 3]


def test_the_picture_says_what_it_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k))
    some = blocks([(0, 4, 2048), (2, 9, 1024), (4, 9, 2048)])
    names = ["first", "second", "third"]
    pack_plot.draw(tmp_path / "p.png", some, Packing(np.array([0, 2048, 3072]), 5120), "title", names, 4096)
    axes, _ = drawn[0].axes
    (made,) = (c for c in axes.collections if isinstance(c, PolyCollection))
    boxes = [p.get_extents().bounds for p in made.get_paths()]
    assert boxes == [(0, 0, 4, 2048), (2, 2048, 7, 1024), (4, 3072, 5, 2048)]
    assert {line.get_ydata()[0] for line in axes.lines} == {3072, 4096, 5120}  # peak load, capacity, footprint
    assert set(names) < {t.get_text() for t in axes.texts}
