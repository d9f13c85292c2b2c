"""Tests classes of alike gaps on programs whose classes are known by hand, and the moves of classes."""

from __future__ import annotations

import numpy as np
import pytest

from simulator import Kernel, Program, Tensor
from simulator.compiled.encoding import AFTER, BEFORE, TENSOR
from simulator.compiled.engine import Engine
from simulator.modes import Choice
from simulator.moves.classes import OPTIONS, gap_classes
from simulator.moves.moves import Moves
from tests.programs import BYTE_PER_NS as MACHINE
from tests.tiny import PROGRAM


def stack(*blocks: tuple[str, int], path: str = "") -> Program:
    """Builds a network of blocks (name of the main kernel, bytes of its output), with two weights per block.

    The output is used again in the backward pass, as are both weights. Each block begins and ends with other kernels,
    so that blocks beside the first and the last one look like them.
    """
    tensors = [Tensor("x", 8, persistent=True)]
    forward: list[Kernel] = []
    backward: list[Kernel] = []
    for i, (name, nbytes) in enumerate(blocks):
        y = len(tensors)
        tensors.append(Tensor(f"y{i}", nbytes))
        names = [f"{path}{i}.{weight}.weight" if path else f"{weight}{i}" for weight in "qk"]
        tensors += [Tensor(weight, 50, "parameter", True) for weight in names]
        inputs = (0, y + 1, y + 2)
        forward += [
            Kernel("norm", "norm", "forward", (0,), (), 5),
            Kernel(name, "matmul", "forward", inputs, (y,), 40),
            Kernel("add", "elementwise", "forward", (0,), (), 5),
        ]
        backward += [
            Kernel("norm_backward", "norm", "backward", (0,), (), 5),
            Kernel(f"{name}_backward", "matmul", "backward", (y, *inputs[1:]), (), 80),
            Kernel("add_backward", "elementwise", "backward", (0,), (), 5),
        ][::-1]
    return Program("stack", tuple(tensors), (*forward, *backward[::-1]))


def classes_of(program: Program) -> list[list[str]]:
    """Returns the names of the tensors of each class of gaps."""
    gaps = program.gaps(10)  # without the tensor that all kernels use
    classes = gap_classes(program, gaps)
    assert sorted(classes.members.tolist()) == list(range(len(gaps)))
    assert (classes.members[classes.slots] == np.arange(len(gaps))).all()
    bounds = zip(classes.begin, classes.begin[1:], strict=False)
    members = [classes.members[begin:end].tolist() for begin, end in bounds]
    assert all(classes.owners[i] == c for c, group in enumerate(members) for i in group)
    assert all(gaps[i].after <= gaps[j].after for group in members for i, j in zip(group, group[1:], strict=False))
    assert classes.chances.sum() == pytest.approx(1)
    return [[program.tensors[gaps[i].tensor].name for i in group] for group in members]


def outputs(classes: list[list[str]]) -> list[list[str]]:
    return [names for names in classes if names[0].startswith("y")]


def test_equal_blocks_form_one_class_per_tensor_of_a_block() -> None:
    classes = classes_of(stack(*[("attend", 200)] * 4, path="layers."))
    assert ["y0", "y1", "y2", "y3"] in classes
    weights = {weight: [f"layers.{i}.{weight}.weight" for i in range(4)] for weight in "qk"}
    # Once between the passes and once over the boundary, in the order of the iteration.
    expected = [["y0", "y1", "y2", "y3"], weights["q"], weights["k"], weights["q"][::-1], weights["k"][::-1]]
    assert sorted(classes) == sorted(expected)


def test_encoder_and_decoder_form_classes_of_their_own() -> None:
    program = stack(*[("attend", 200)] * 3, *[("cross", 200)] * 5)
    assert outputs(classes_of(program)) == [["y0", "y1", "y2"], ["y3", "y4", "y5", "y6", "y7"]]


def test_stages_of_a_cnn_form_classes_of_their_own() -> None:
    program = stack(*[("conv", 400)] * 2, *[("conv", 200)] * 3, ("conv", 100))
    assert outputs(classes_of(program)) == [["y0", "y1"], ["y2", "y3", "y4"], ["y5"]]


def test_only_module_paths_tell_weights_apart() -> None:
    with_paths, without = (classes_of(stack(*[("attend", 200)] * 3, path=path)) for path in ("layers.", ""))
    assert len(with_paths) == 5 and len(without) == 3  # in which q and k differ by nothing but the name


def test_only_repetition_gives_moves_of_classes() -> None:
    few, many = (stack(*[("attend", 200)] * blocks, path="layers.") for blocks in (OPTIONS.many - 1, OPTIONS.many))
    probs = [gap_classes(program, program.gaps(10)).prob for program in (few, many, PROGRAM)]
    assert probs == [0.0, pytest.approx(OPTIONS.prob), 0.0]


def test_plans_of_other_programs_do_not_depend_on_classes() -> None:
    limit = int(0.6 * PROGRAM.peak_bytes)
    with_classes, without = (Moves(PROGRAM, limit, "joint", 1, 0, by_class=by_class) for by_class in (True, False))
    for _ in range(50):
        rows = [moves.propose() for moves in (with_classes, without)]
        assert rows[0] is not None and np.array_equal(*rows)
        with_classes.accept()
        without.accept()


@pytest.mark.parametrize("mode", ["swap", "joint"])
def test_moves_of_classes_keep_the_residency(mode: str) -> None:
    """Plans fit, their residency matches the rows, and moves change more gaps than moves of single gaps."""
    program = stack(*[("attend", 200)] * 6, *[("cross", 300)] * 12, path="layers.")
    limit = int(0.5 * program.peak_bytes)
    moves = Moves(program, limit, mode, 10, seed=0)
    single = Moves(program, limit, mode, 10, seed=0, by_class=False)
    engine = Engine(program, MACHINE, limit)
    changed: dict[bool, list[int]] = {True: [], False: []}
    for _ in range(300):
        for by_class, current in ((True, moves), (False, single)):
            old_on = current.on.copy()
            rows = current.propose()
            assert rows is not None
            current.accept()
            changed[by_class].append(int((old_on != current.on).sum()))
            assert current.load.max() <= limit
            if mode == "swap":
                assert np.array_equal(current.load, engine.residency(rows))
            copy = current.fork(0)
            copy.reset(rows)
            assert np.array_equal(copy.load, current.load) and np.array_equal(copy.plan(), rows)
    assert np.mean(changed[True]) > 1.3 * np.mean(changed[False])


def test_classes_take_only_the_choices_that_they_have() -> None:
    program = stack(*[("attend", 200)] * 12)
    gaps = program.gaps(10)
    weights = np.zeros((len(gaps), len(Choice)))
    allowed = [i for i, gap in enumerate(gaps) if program.tensors[gap.tensor].name.startswith("y")]
    weights[allowed, Choice.SWAPPED] = 1.0
    moves = Moves(program, program.peak_bytes, "joint", 10, seed=0, weights=weights)
    seen: set[tuple[int, ...]] = set()
    for _ in range(200):
        rows = moves.propose()
        assert rows is not None
        moves.accept()
        seen |= set(map(tuple, rows[:, [TENSOR, AFTER, BEFORE]].tolist()))
    assert {key[0] for key in seen} == {gaps[i].tensor for i in allowed}
