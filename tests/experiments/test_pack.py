"""Packing a file as a user does it: the numbers, the picture, the solution, and what is said to a mistake."""

import csv
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from experiments import pack
from experiments.common import cli
from experiments.plotting import packing as pack_plot, palette
from experiments.plotting.packing import binary
from simulator import Machine, Program
from simulator.compiled.encoding import NEVER
from simulator.pool import ALLOCATORS, Intervals, Packing, files, program_lifetimes, smartpool
from simulator.pool.validate import overlap
from tests.experiments.conftest import Run
from tests.oracle.packing import overlaps

# lower, upper and bytes. Held at once: a, c and e until 3, b, c and e until 9, then d and e: 12, 12 and 8 bytes.
TOY = {"a": (0, 3, 4), "b": (3, 9, 4), "c": (0, 9, 4), "d": (9, 21, 4), "e": (0, 21, 4)}


def blocks(rows: list[tuple[int, int, int]], period: int = NEVER) -> Intervals:
    return Intervals(*np.array(rows, np.int64).reshape(-1, 3).T.copy(), period)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Its columns are not in the usual order, and there is one more."""
    lines = [f"{n},{i},{upper},{lower}" for i, (lower, upper, n) in TOY.items()]
    (tmp_path / "toy.csv").write_text("\n".join(["size,id,upper,lower", *lines, ""]))
    return tmp_path / "toy.csv"


class Done(NamedTuple):
    status: int
    out: list[str]  # lines
    err: list[str]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Does what ``python -m experiments.pack`` does in an empty directory, without the seconds that importing takes."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def call(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["pack.py", *map(str, words)])
        status = 0
        try:
            pack.main()
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capsys.readouterr()
        return Done(status, out.strip().splitlines(), err.strip().splitlines())

    return call


def refused(done: Done, *words: str) -> None:
    """One sentence on stderr that holds all the words, status 2."""
    assert done.status == 2 and len(done.err) == 1, done.err
    assert all(word in done.err[0] for word in words), done.err


# ------------------------------------------------------------------------------------------------ runs


def test_every_allocator_packs_the_toy(run: Run, toy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("pack", toy, f"out={out}", "seconds=0.2", "capacity=12")  # as a user types it
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(out)
    assert {f.name for f in out.iterdir()} == {"results.json", "packing.png", "solution.csv", "summary.json", ".hydra"}
    assert (out / "packing.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((out / "results.json").read_text())
    assert list(found) == list(ALLOCATORS)
    for row in found.values():
        assert set(row) == {"footprint", "load", "ratio", "seconds", "proven", "allocation_ns"}
        assert row["load"] == 12 and row["ratio"] == row["footprint"] / 12
        assert row["seconds"] >= 0
    # Three blocks at a time: of 4 bytes, of CnMem's 512 and of the heap's 1024; a segment of PyTorch's small pool.
    assert [row["footprint"] for row in found.values()] == [12, 2 << 20, 3 * 512, 3 * 1024, 12, 12, 12, 12]
    # A malloc of SmartPool's is a look-up in a table of 5: 3 levels of 2 ns, 5 times. The driver's are far dearer.
    assert found["smartpool"]["allocation_ns"] == 30 < found["cudamalloc"]["allocation_ns"]
    assert [name for name, row in found.items() if row["proven"]] == [
        "cudamalloc", "smartpool", "smartpool_first", "portfolio", "optimal"
    ]  # fmt: skip
    solution = list(csv.DictReader((out / "solution.csv").open()))
    assert {r["id"]: (int(r["lower"]), int(r["upper"]), int(r["size"])) for r in solution} == TOY
    offsets = np.array([int(r["offset"]) for r in solution])
    assert overlaps(blocks([TOY[r["id"]] for r in solution]), offsets) == [] and offsets.max() + 4 == 12
    table = [line.split() for line in done.stdout.splitlines()]
    assert ["cnmem", "1,536", "1.5", "KiB", "12", "128.0000"] in [words[:6] for words in table]
    assert {words[0]: words[-1] for words in table if words and words[0] in ALLOCATORS} == {
        name: "yes" if row["footprint"] == 12 else "no" for name, row in found.items()
    }


def test_what_compiles_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for owner, name in ((pack, "warm_up"), (pack, "run"), (pack.time, "perf_counter")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, n=name, real=real: (done.append(n), real(*args))[1])
    monkeypatch.setattr(pack, "warm_up", lambda *_: done.append("warm_up"))
    pack.pack_all(["smartpool"], blocks([(0, 1, 4)]), Machine.load("gtx1080ti"), 1, 1.0)
    assert done[:4] == ["warm_up", "perf_counter", "run", "perf_counter"]


def test_a_program_repeats(command: Callable[..., Done], program: Program, program_file: Path, tmp_path: Path) -> None:
    """Online allocators get three iterations of it. Alone, theirs is the best packing."""
    words = (f"file={program_file}", "alignment=512")
    assert command(*words, "algorithms=[smartpool,caching]", f"out={tmp_path / 'both'}").status == 0
    found = json.loads((tmp_path / "both" / "results.json").read_text())
    assert list(found) == ["caching", "smartpool"]
    assert found["smartpool"]["load"] == found["smartpool"]["footprint"] == program.peak_bytes
    assert len((tmp_path / "both" / "solution.csv").read_text().splitlines()) == 1 + len(program.tensors)
    assert command(*words, "algorithms=cnmem", f"out={tmp_path / 'one'}").status == 0
    ids = [row["id"] for row in csv.DictReader((tmp_path / "one" / "solution.csv").open())]
    # t0, the weight, and t1, which the first kernel writes and the last one reads, fill the circle.
    assert set(ids) == {"t0@0", "t1@0"} | {f"t{t}@{k}" for t in range(2, len(program.tensors)) for k in range(3)}
    assert len(ids) == len(set(ids))


def test_a_log_repeats_where_it_does(command: Callable[..., Done], tmp_path: Path) -> None:
    log = tmp_path / "ops.log"
    log.write_text("malloc 0 5\n" + "malloc 1 3\nfree 1\nmalloc 2 4\nfree 2\n" * 4)
    for iteration, count in (("null", 3), ("true", 3), ("false", 9)):
        out = tmp_path / iteration
        done = command(log, "algorithms=[smartpool]", f"iteration={iteration}", f"out={out}")
        assert done.status == 0 and done.out[-1] == str(out), done.err
        assert ("one iteration, repeated" in done.out[-2]) == (iteration != "false")
        assert len((out / "solution.csv").read_text().splitlines()) == 1 + count
        assert json.loads((out / "results.json").read_text())["smartpool"]["footprint"] == 9


def test_a_sweep_over_files(command: Callable[..., Done], toy: Path, tmp_path: Path) -> None:
    other = tmp_path / "with space, and comma.csv"
    other.write_text("id,lower,upper,size\nx,0,1,7\n")
    assert command(toy, other, "-m", "algorithms=smartpool").status == 0
    found = (tmp_path / "work" / "runs").glob("pack-*/results.json")
    assert sorted(json.loads(f.read_text())["smartpool"]["footprint"] for f in found) == [7, 12]
    done = command(toy, other, "-m", "algorithms=smartpool", f"out={tmp_path / 'out'}")
    assert done.status == 2 and "already holds a finished run" in done.err[-1]  # of the other file
    assert json.loads((tmp_path / "out" / "results.json").read_text())["smartpool"]["footprint"] == 12


# -------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "file: expected a file to pack"),
        ("none.csv", "none.csv: cannot be read"),
        ("empty.csv", "empty.csv: holds no block of any bytes"),
        ("zero.csv", "zero.csv: holds no block of any bytes"),
        ("blank.csv", "blank.csv: holds no line"),
        ("bad.csv", "bad.csv: line 2: size"),
        (".", "cannot be read"),
        ("zero.csv bad.csv", "needs -m"),
        ("toy.csv algorithms=[smartpol]", "'smartpol'; the nearest is 'smartpool'"),
        ("toy.csv algorithms=[]", "algorithms: expected at least one"),
        ("toy.csv algoritms=all", "'algorithms'"),
        ("toy.csv algorithms=[[optimal]]", "algorithms"),
        ("toy.csv seconds=0", "seconds: expected a number above 0"),
        ("toy.csv seconds=soon", "seconds: expected a number above 0"),
        ("toy.csv alignment=0", "alignment: expected an integer of at least 1"),
        ("toy.csv capacity=1.5", "capacity: expected an integer"),
        ("toy.csv iteration=maybe", "iteration: expected null, true or false, got 'maybe'"),
        ("toy.csv iteration=true", "no iteration"),
        ("toy.csv out=toy.csv", "toy.csv cannot be made"),
    ],
)
def test_a_mistake_ends_with_status_2_and_leaves_nothing(
    words: str, said: str, command: Callable[..., Done], toy: Path
) -> None:
    work = Path.cwd()
    toy.rename(work / "toy.csv")
    for name, text in (("empty", ""), ("zero", "a,0,1,0\n"), ("bad", "a,0,1,-1\n")):
        (work / f"{name}.csv").write_text("id,lower,upper,size\n" + text)
    (work / "blank.csv").write_text("\n\n")
    before = sorted(work.iterdir())
    refused(command(*shlex.split(words)), said)
    assert sorted(work.iterdir()) == before


def test_unknown_algorithms_name_the_nearest() -> None:
    with pytest.raises(cli.UsageError, match="'smartpol'; the nearest is 'smartpool'"):
        pack.allocator_names(["optimal", "smartpol"])
    with pytest.raises(cli.UsageError, match="cudamalloc has no physical addresses"):
        pack.allocator_names(["cudamalloc"])
    assert pack.allocator_names(["optimal", "cnmem", "optimal"]) == ["cnmem", "optimal"]
    assert pack.allocator_names(["optimal", "all"]) == list(ALLOCATORS)


def test_a_word_without_a_key_is_the_file(tmp_path: Path) -> None:
    odd = tmp_path / "a=b.csv"
    odd.touch()
    assert cli.keyed(["seconds=1", "it's.csv", str(odd), "~/x.csv", "~seconds"], "file") == [
        "seconds=1", "~seconds", rf"file='it\'s.csv','{odd}','~/x.csv'"
    ]  # fmt: skip
    assert cli.keyed(["seconds=1"], "file") == ["seconds=1"]


def test_an_allocator_that_overlaps_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"overlaps": ([0, 3], 7, "blocks 0 and 1 overlap"), "above": ([0, 4], 7, "outside the footprint"),
             "below": ([-4, 0], 8, "outside the footprint")}  # fmt: skip
    for offsets, footprint, message in wrong.values():
        made = Packing(np.array(offsets), footprint)
        monkeypatch.setattr(pack, "run", lambda name, intervals, *_, made=made: (intervals, made))
        monkeypatch.setattr(pack, "warm_up", lambda *_: None)
        with pytest.raises(RuntimeError, match=message):
            pack.pack_all(["smartpool"], blocks([(0, 2, 4), (1, 3, 4)]), Machine.load("gtx1080ti"), 1, 1.0)


arcs = st.tuples(st.integers(0, 11), st.integers(1, 12), st.integers(0, 6), st.integers(0, 20))


@settings(max_examples=300)
@given(st.lists(arcs, max_size=12), st.booleans())
def test_the_fast_checker_is_the_slow_one(found: list, circle: bool) -> None:
    some = blocks([(lower, lower + length, n) for lower, length, n, _ in found], 12 if circle else NEVER)
    offsets = np.array([offset for *_, offset in found], np.int64)
    wrong = overlaps(some, offsets)
    assert (overlap(some, offsets) in wrong) if wrong else overlap(some, offsets) is None
    assert overlap(some, smartpool.pack(some).offsets) is None


# ------------------------------------------------------------------------------------------- the picture


def test_bytes_for_people() -> None:
    texts = [binary(n) for n in (0, 12, 1000, 1536, 2**20, 1_376_256, 1000 * 2**20, 2**30, 5 * 2**40)]
    assert texts == ["0 B", "12 B", "0.977 KiB", "1.5 KiB", "1 MiB", "1.31 MiB", "0.977 GiB", "1 GiB", "5,120 GiB"]


def test_a_block_over_the_boundary_is_drawn_at_both_ends() -> None:
    some = blocks([(8, 12, 4), (1, 3, 5), (0, 10, 0), (2, 12, 1)], period=10)
    boxes, block = pack_plot.rectangles(some, Packing(np.array([0, 4, 0, 9]), 10))
    # left, right, bottom, top; what has no bytes is not drawn
    assert boxes.tolist() == [[8, 10, 0, 4], [1, 3, 4, 9], [2, 10, 9, 10], [0, 2, 0, 4], [0, 2, 9, 10]]
    assert block.tolist() == [0, 1, 3, 0, 3]


def test_the_picture_says_what_it_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k))
    some = blocks([(0, 4, 2048), (2, 9, 1024), (4, 9, 2048)])
    offsets, names = np.array([0, 2048, 3072]), ["first", "second", "third"]
    pack_plot.draw(tmp_path / "p.png", some, Packing(offsets, 5120), "title", names, 4096)
    axes, bar = drawn[0].axes
    (made,) = (c for c in axes.collections if isinstance(c, PolyCollection))
    assert [p.get_extents().bounds for p in made.get_paths()] == [
        (0, 0, 4, 2048), (2, 2048, 7, 1024), (4, 3072, 5, 2048)
    ]  # fmt: skip
    assert {line.get_ydata()[0] for line in axes.lines} == {3072, 4096, 5120}
    texts = {t.get_text() for t in axes.texts}
    assert {"peak load\n3 KiB\n(3,072)", "capacity\n4 KiB\n(4,096)", "footprint\n5 KiB\n(5,120)", *names} == texts
    assert axes.get_title(loc="left") == "title" and bar.get_xlabel() == "size of a block"
    pack_plot.draw(tmp_path / "p.png", some, Packing(np.array([0, 2048, 0]), 3072), "title")
    assert {t.get_text() for t in drawn[1].axes[0].texts} == {"peak load =\nfootprint\n3 KiB\n(3,072)"}
    assert [f.name for f in tmp_path.iterdir()] == ["p.png"]


def test_every_allocator_has_its_look() -> None:
    assert list(palette.ALLOCATORS) == list(ALLOCATORS)
    for what in ("label", "colour", "marker"):
        assert len({getattr(look, what) for look in palette.ALLOCATORS.values()}) == len(ALLOCATORS)


def test_the_blocks_of_a_line_keep_their_names(program: Program) -> None:
    lives = program_lifetimes(program)
    buffers = files.Buffers(tuple(f"b{i}" for i in range(len(lives.intervals))), lives.intervals)
    assert pack.repeated(buffers, lives.intervals) == buffers
    line, source = lives.intervals.unrolled(3)
    named = pack.repeated(buffers, line)
    assert [name.partition("@")[0] for name in named.ids] == [f"b{i}" for i in source]
    assert len(set(named.ids)) == len(line)
