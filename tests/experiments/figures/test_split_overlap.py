"""Tests the overlap of programs whose overlap is known by hand, and what the committed table says."""

import json

import pytest

from experiments.figures.split_overlap import neighborhoods, share, training_settings
from simulator import Kernel, Program, Tensor
from tests.experiments.conftest import ROOT


def program(*kernels: tuple[str, tuple[int, ...]], nbytes: int = 1024) -> Program:
    """Returns a program from the kind of each kernel and the kernels whose outputs it reads."""
    tensors = tuple(Tensor(f"y{i}", nbytes) for i in range(len(kernels)))
    made = (Kernel(f"k{i}", kind, "forward", inputs, (i,), nbytes) for i, (kind, inputs) in enumerate(kernels))
    return Program("toy", tensors, tuple(made))


def row(*kinds: str, nbytes: int = 1024) -> Program:
    """Returns a program of kernels, each of which reads the output of the one before."""
    return program(*((kind, (i - 1,) if i else ()) for i, kind in enumerate(kinds)), nbytes=nbytes)


CHAIN = row("conv", "norm", "activation", "pool", "matmul")
SKIP = program(("conv", ()), ("norm", (0,)), ("elementwise", (0, 1)))


@pytest.mark.parametrize(
    ("tested", "training", "expected"),
    [
        (CHAIN, row("conv", "norm", "activation", "pool", "matmul", nbytes=2048), [1, 1, 1]),  # sizes do not count
        (row("conv", "norm", "activation", "pool", "conv"), CHAIN, [1, 3 / 5, 2 / 5]),  # the change is two kernels wide
        (SKIP, row("conv", "norm", "elementwise"), [1, 1 / 3, 0]),  # only the norm has the same neighbors
        (row("rnn", "dropout"), CHAIN, [0, 0, 0]),
    ],
)
def test_overlap_known_by_hand(tested: Program, training: Program, expected: list[float]) -> None:
    pairs = zip(neighborhoods(tested, 2), neighborhoods(training, 2), strict=True)
    assert [share(labels, set(known)) for labels, known in pairs] == expected


def test_a_kernel_reads_the_last_content_of_a_tensor() -> None:
    """The third kernel overwrites what the first wrote, so that the fourth reads the third's."""
    tensors = (Tensor("a", 8), Tensor("b", 8))
    writes = [("conv", (), (0,)), ("norm", (0,), (1,)), ("pool", (1,), (0,)), ("activation", (0,), (1,))]
    kernels = tuple(Kernel(f"k{i}", kind, "forward", *ids, 1) for i, (kind, *ids) in enumerate(writes))
    reused = Program("reused", tensors, kernels)
    assert neighborhoods(reused, 2) == neighborhoods(row("conv", "norm", "pool", "activation"), 2)


def test_every_family_of_the_pretraining_is_covered() -> None:
    settings = training_settings()
    assert {entry["family"] for entry in settings} >= {"vgg", "densenet", "llama", "vit", "bert", "yolov3"}
    assert all(not isinstance(value, list) for entry in settings for value in entry.values())


def test_shares_fall_with_the_radius() -> None:
    rows = json.loads((ROOT / "experiments" / "results" / "split_overlap.json").read_text())["rows"]
    assert all(entry["shares"] == sorted(entry["shares"], reverse=True) for entry in rows)
    assert {entry["split"] for entry in rows} == {"test_split", "test_split, fresh", "second"}
