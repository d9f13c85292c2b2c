"""SuperNeurons' Tables 2, 4 and 5: the search, programs made of captures, what is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, strategies as st

import agents
from agents.heuristics.superneurons import leaving
from agents.planner import MIB
from experiments import figures
from experiments.common.bisection import largest
from experiments.figures import superneurons as captured, superneurons_capacity as made
from experiments.figures.superneurons_capacity import Deeper, anonymous
from simulator import Gap, Kernel, Machine, Program, Tensor, simulate
from tests import tiny
from tests.experiments.conftest import figure_settings

GPU = Machine.load("k40c")


@given(true=st.integers(0, 300), first=st.integers(1, 300), most=st.integers(1, 300))
def test_the_largest_that_fits_is_found(true: int, first: int, most: int) -> None:
    asked = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= true

    first = min(first, most)
    assert largest(fits, first, most) == min(true, most)
    assert all(1 <= n <= most for n in asked) and len(asked) == len(set(asked)) <= 18  # 2 log2(300) is 16.5
    with pytest.raises(ValueError, match="first: expected"):
        largest(fits, most + 1, most)
    assert largest(lambda n: n <= 54, 8, 1000, part=16) == 54  # to within a 16th


@cache
def resnet(stages: str, batch: int = 2) -> Program:
    return figures.program("resnet50_imagenet", GPU, stages=stages, batch_size=batch)


def test_a_repeated_block_is_the_capture_of_a_deeper_network() -> None:
    shallow = resnet("1-1-4-1")
    deeper = Deeper(shallow, 8)  # the third stage's blocks are layers 6 to 9, behind the stem's four and two blocks
    assert deeper.by(0) == shallow
    assert anonymous(deeper.by(2)) == anonymous(resnet("1-1-6-1")) != anonymous(deeper.by(1))


def chain(sizes: list[int]) -> Program:
    """Layers with a weight and an output each, and what keeps the outputs until the end."""
    n = len(sizes)
    tensors = [Tensor(f"layers.{i}.weight", 8, "parameter", True) for i in range(n)]
    tensors += [Tensor(f"out{i}", size) for i, size in enumerate(sizes)]
    kernels = [Kernel("f", "conv", "forward", (i, *([n + i - 1] if i else [])), (n + i,), 1) for i in range(n)]
    kernels.append(Kernel("marker", "other", "optimizer", tuple(range(n, 2 * n)), (), 0))
    return Program("chain", tuple(tensors), tuple(kernels))


def test_a_chain_of_layers_by_hand() -> None:
    deeper = Deeper(chain([4, 4, 4, 4]), 1).by(2)
    # Layer 1 (weight 1, output 5) has two copies: tensors 8, 9 and 10, 11; layer 2 reads the last one's output.
    assert [k.inputs for k in deeper.kernels] == [(0,), (1, 4), (8, 5), (10, 9), (2, 11), (3, 6), (4, 5, 9, 11, 6, 7)]
    assert [k.outputs for k in deeper.kernels] == [(4,), (5,), (9,), (11,), (6,), (7,), ()]
    assert [t.name for t in deeper.tensors[8:]] == ["layers.1.weight+1", "out1+1", "layers.1.weight+2", "out1+2"]


def test_what_cannot_be_repeated_is_refused() -> None:
    with pytest.raises(ValueError, match="layers 2 and 1 are not alike"):
        Deeper(chain([4, 4, 5, 4]), 1)
    with pytest.raises(ValueError, match="more: expected at least 0, got -1"):
        Deeper(chain([4, 4, 4, 4]), 1).by(-1)
    twice = chain([4, 4, 4, 4])
    again = replace(twice, kernels=(*twice.kernels[:4], replace(twice.kernels[1], outputs=()), twice.kernels[4]))
    with pytest.raises(ValueError, match="the kernels of layer 1 are not in one piece"):
        Deeper(again, 1)


def scaled(n: int) -> Program:
    """The tiny program with activations of n MiB, so that all planners see them, and no others."""
    tensors = tuple(replace(t, nbytes=n * MIB if t.kind == "activation" else 0) for t in tiny.PROGRAM.tensors)
    return replace(tiny.PROGRAM, tensors=tensors)


def test_floors_by_hand() -> None:
    # Of tensors of 10 MiB, four are live at the peak and in all, two at every kernel that uses two; a1 is away in
    # kernels 2 to 5 and a2 in 3 and 4, which leaves a3 and a4 (kernels 3 and 4), then a2 and a3.
    floor = {m: made.floor(m, scaled(10)) // MIB for m in ("own", "none", "vdnn_all", "bound")}
    assert floor == {"own": 40, "none": 40, "vdnn_all": 20, "bound": 20}
    weight = replace(tiny.PROGRAM, tensors=(replace(tiny.PROGRAM.tensors[0], nbytes=1000), *tiny.PROGRAM.tensors[1:]))
    # The weight is away from kernel 1 to 6 as well: at f1 it lies beside a1, at b1 beside a1 and g2.
    assert made.floor("bound", weight) == 1000 + 40 + 10 and made.floor("vdnn_all", weight) > 1050


def test_the_largest_size_of_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(tiny.MACHINE, memory_bytes=100 * MIB)
    sizes = {m: made.most(m, scaled, machine, 7, 1000) for m in ("own", "none", "bound")}
    assert sizes["own"] == (25, {}) and sizes["bound"] == (50, {})
    assert sizes["none"][0] == 25 and sizes["none"][1]["overhead"] == 0 and sizes["none"][1]["peak"] == 100 * MIB
    # A planner that is worse than its floor is followed down: the search begins at 50 and ends at 31.
    asked = []

    def planned(method: str, program: Program, machine: Machine) -> object:
        asked.append(program.tensors[1].nbytes // MIB)
        plan = agents.make("none").plan(program, machine, 10**9)
        return simulate(program, plan, machine, 10**9) if asked[-1] <= 31 else None

    monkeypatch.setattr(made, "planned", planned)
    assert made.most("vdnn_all", scaled, machine, 7, 1000)[0] == 31
    assert asked[0] == 50 and len(asked) == len(set(asked)) <= 12
    monkeypatch.setattr(made, "planned", lambda *_: None)
    assert made.most("vdnn_all", scaled, machine, 7, 1000) == (0, {})


def test_table2_by_hand() -> None:
    # ResNet50, 16 images: 16 / 21.5 - 16 / 32.9 s are 257.9 ms more with cudaMalloc; with 500 blocks 0.516 ms each.
    row = {"network": "resnet50_imagenet", "batch": 16, "blocks": 500, "allocated": 4 * 10**9, "roofline_ns": 10**8,
           "allocation_ns": {"cudamalloc": 486_322_188 + 10**6, "superneurons": 10**6}}  # fmt: skip
    (found,) = captured.table2_facts([row])
    assert found["added"]["paper"] == pytest.approx(257.86, abs=0.01)
    assert found["block_ms"] == pytest.approx(0.5157, abs=1e-4)
    # 16 / 32.9 s are 486.3 ms: as much again makes a speedup of 2; at the paper's own cost it is the paper's.
    assert found["speedup"]["ours"] == pytest.approx(2) and found["speedup"]["each"] == pytest.approx(32.9 / 21.5)
    # Twice the cost per block; the median of two is their mean.
    other = captured.Table2().numbers([row, {**row, "blocks": 250}])
    assert other["middle"] == pytest.approx(0.5157 * 1.5, abs=1e-3)
    row = captured.Table2().run({"network": "alexnet", "batch": 4}, GPU)
    assert 0 < row["allocation_ns"]["superneurons"] < row["allocation_ns"]["cudamalloc"] and row["blocks"] > 50


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Table 4 of networks with one block in the stages that are not repeated, each captured once."""
    made.first.cache_clear()
    monkeypatch.setattr(made, "STAGES", (1, 1, 1))
    monkeypatch.setattr(made, "FIRST", {"own": 4, "none": 8})
    monkeypatch.setattr(made, "captured", lambda batch, n3, machine: resnet(f"1-1-{n3}-1", batch))


def test_table4(short: None) -> None:
    tasks = made.Table4().tasks(
        figure_settings("superneurons_table4", methods=["own", "none"], captured="own", batch_size=2)
    )
    assert [task["captured"] for task in tasks] == [True, False]
    machine = replace(GPU, memory_bytes=sum(t.nbytes for t in resnet("1-1-6-1").tensors))
    rows = [{**task, **made.Table4().run(task, machine)} for task in tasks]
    for row in rows:  # what is found fits, and one block more does not
        need = sum if row["method"] == "own" else max
        sizes = []
        for n3 in (row["n3"], row["n3"] + 1):
            program = Deeper(resnet("1-1-4-1"), 8).by(n3 - 4)
            sizes.append(sum(t.nbytes for t in program.tensors) if need is sum else max(program.live_bytes))
        assert sizes[0] <= machine.memory_bytes < sizes[1]
        assert row["depth"] == 3 * (3 + row["n3"]) + 2
    assert rows[0]["n3"] == 6 < rows[1]["n3"] < made.TABLE4_MOST
    _, cells, _ = made.Table4().say(rows)
    assert cells[4][:2] == ["SuperNeurons, in the paper", "1,920"] and cells[5][1] == str(rows[0]["depth"])


def test_table5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "TABLE5_MOST", 256)
    config = figure_settings(
        "superneurons_table5", networks=["alexnet"], methods=["own", "none", "superneurons", "bound"]
    )
    searched, planned = made.Table5().tasks(config)
    assert planned == {"network": "alexnet", "planner": "lp_round", "batch": 1792}
    machine = replace(GPU, memory_bytes=3 * 2**30)
    row = {**searched, **made.Table5().run(searched, machine)}
    found = {method: there["batch"] for method, there in row["found"].items()}
    assert 0 < found["own"] < found["none"] < found["superneurons"] <= found["bound"]
    fits = {**planned, "planner": "none", "batch": found["none"]}  # one image more does not
    assert made.Table5().run(fits, machine) == {"overhead": 0.0}
    assert made.Table5().run({**fits, "batch": found["none"] + 1}, machine) == {"overhead": None}
    rows = [row, {**planned, "overhead": 0.25}]
    _, cells, _ = made.Table5().say(rows)
    assert cells[0][:6] == ["AlexNet", "768", "768", "1,024", "1,408", "1,792"] and cells[0][-1] == "fits (25.0%)"
    assert cells[0][6] == str(found["own"]) and made.Table5().numbers(rows)["short"] is None
    half = {**row, "found": {**row["found"], "none": {"batch": 9, "peak": row["memory"] // 2}}}
    assert made.Table5().numbers([half, rows[1]])["short"] == [
        "dead tensors freed on AlexNet"
    ]  # the host's memory stops it


def test_joins_go_to_the_host_on_request() -> None:
    kinds = ["conv", "elementwise", "copy", "norm"]
    kernels = [Kernel(k, k, "forward", (i,), (i + 1,), 10) for i, k in enumerate(kinds)]  # type: ignore[arg-type]
    kernels += [Kernel("b", "conv", "backward", (4 - i,), (5 + i,), 10) for i in range(4)]
    tensors = (Tensor("x", 10, "input", True), *(Tensor(f"t{i}", 10) for i in range(8)))
    program = Program("joins", tensors, tuple(kernels))
    conv, sums, cat = Gap(1, 1, 7), Gap(2, 2, 6), Gap(3, 3, 5)
    assert set(leaving(program, "swap", 1)) == {conv}
    assert set(leaving(program, "swap", 1, joins=True)) == {conv, sums, cat}
    assert set(leaving(program, "recompute", 1, joins=True)) == set()
    # Two tensors beside the images are in use at any kernel, so that 30 bytes do where all may leave.
    assert agents.make("superneurons", joins=True, min_bytes=1, early=True).plan(program, tiny.MACHINE, 30).decisions
    with pytest.raises(agents.Infeasible):
        agents.make("superneurons", min_bytes=1, early=True).plan(program, tiny.MACHINE, 30)
