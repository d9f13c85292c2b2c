"""Tests program/1: reading, errors, and the figures of a small program computed by hand."""

import os
import pickle
from dataclasses import replace
from functools import cached_property

import pytest
from hypothesis import given

from simulator import FormatError, Gap, Kernel, Program, Tensor
from tests.programs import activations, parameter, straight
from tests.simulator.test_malformed import GOOD
from tests.strategies import programs
from tests.tiny import PROGRAM


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_file_and_back(tmp_path, name):
    kernel = Kernel("k", "conv", "backward", (0,), (0,), 3, 4, 5, 6, False, ((7, 8), (9, 10)))
    program = Program("p", (Tensor("größe", 1, "buffer", True),), (kernel,))
    program.save(tmp_path / name)
    assert Program.load(tmp_path / name) == program
    assert os.listdir(tmp_path) == [name]  # nothing temporary is left


def test_a_program_that_is_in_use_can_be_pickled():
    """Cached properties that another thread adds meanwhile are not pickled."""
    program = replace(PROGRAM)
    state = program.__getstate__()
    assert program.accesses and "accesses" in program.__dict__ and "accesses" not in state
    assert pickle.loads(pickle.dumps(program)) == program


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "step.json"
    PROGRAM.save(path)
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            Program.from_dict(GOOD["program"]).save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["step.json"]


# -------------------------------------------------------------------------------- figures, by hand


def test_loads_and_times():
    assert PROGRAM.live_bytes == (50, 90, 130, 170, 180, 150, 110, 60)
    assert PROGRAM.peak_bytes == 180 and PROGRAM.ideal_ns == 120
    assert PROGRAM.start_ns == (0, 10, 20, 30, 40, 60, 80, 100, 120)


def test_a_gap_has_a_kernel_in_it():
    """Only gaps with another kernel in them count: w's wrapping gap contains k3 alone; z has no bytes."""
    w, x, z, v = range(4)
    program = straight(
        [parameter(1), *activations(1, 0), parameter(1)],
        ((w, v), (x, z), 10),
        ((x, z, v), (), 11),
        ((w, v), (), 12),
        ((x, z, v), (), 13),
    )
    assert program.gaps() == program.gaps(1) == [Gap(w, 0, 2), Gap(w, 2, 0), Gap(x, 1, 3)]
    assert [program.gap_ns(g) for g in program.gaps()] == [11, 13, 12]


def test_gaps_over_the_boundary():
    alone = straight([parameter(1)], ((), (), 10), ((0,), (), 11), ((), (), 12))  # from a kernel to itself
    assert alone.gaps() == [Gap(0, 1, 1)] and alone.gap_ns(Gap(0, 1, 1)) == 12 + 10
    program = straight([parameter(1)], ((), (), 10), ((0,), (), 10), ((0,), (), 10), ((), (), 10))
    assert program.gaps() == [Gap(0, 2, 1)] and program.gap_ns(Gap(0, 2, 1)) == 20  # k3 and k0


@given(programs())
def test_operations_balance(program):
    """Mallocs and frees of the iteration sum to the loads without workspaces."""
    lines = program.operations()
    assert [o.time_ns for o in lines] == sorted(o.time_ns for o in lines)
    size = [t.nbytes for t in program.tensors]
    used = sum(t.nbytes for t in program.tensors if t.persistent)
    for k, kernel in enumerate(program.kernels):
        used += sum(size[o.tensor] for o in lines if o.kernel == k and o.kind == "malloc")
        assert used + kernel.workspace == program.live_bytes[k]
        used -= sum(size[o.tensor] for o in lines if o.kernel == k and o.kind == "free")
    assert used == sum(t.nbytes for t in program.tensors if t.persistent)


def test_fingerprint():
    # SHA-256 of the canonical JSON. Plans store it, so it must never change.
    assert PROGRAM.fingerprint == "a7dc5ad5b20a3e0a627b69a134ab9ede0272c41bf91ead449556277319bdde84"
    assert Program.from_dict(PROGRAM.to_dict()).fingerprint == PROGRAM.fingerprint
    assert PROGRAM.with_durations([1] * 8).fingerprint != PROGRAM.fingerprint


def test_structure():
    # It must never change, like fingerprints.
    assert PROGRAM.structure == "7292809405a6c2c130d4d48dbe338293ef2e061c7dbc18f57cd564f2b143d481"
    kernels = (replace(PROGRAM.kernels[0], variants=((4, 7), (25, 0))), *PROGRAM.kernels[1:])
    program = replace(PROGRAM, kernels=kernels)
    assert program.with_durations([3] * 8).structure == program.structure != PROGRAM.structure
    slower = replace(kernels[0], variants=((5, 7), (25, 0)))
    assert replace(program, kernels=(slower, *kernels[1:])).structure == program.structure
    larger = replace(kernels[0], variants=((4, 8), (25, 0)))
    assert replace(program, kernels=(larger, *kernels[1:])).structure != program.structure


def test_no_cached_property_depends_on_earlier_durations():
    names = [name for name, value in vars(Program).items() if isinstance(value, cached_property)]
    program = replace(PROGRAM)
    assert all(getattr(program, name) for name in names)
    other = program.with_durations([1] * 8)
    fresh = Program(other.name, other.tensors, other.kernels)
    assert [getattr(other, name) for name in names] == [getattr(fresh, name) for name in names]


def test_with_durations_scales_the_variants():
    with pytest.raises(FormatError, match=r"kernels\[0\]\.duration_ns"):
        PROGRAM.with_durations([-1] * 8)
    kernels = (replace(PROGRAM.kernels[0], duration_ns=10, variants=((4, 7), (25, 0))), *PROGRAM.kernels[1:])
    program = replace(PROGRAM, kernels=kernels)
    assert program.with_durations([15] * 8).kernels[0].variants == ((6, 7), (38, 0))  # 37.5, to the even one
    timeless = replace(PROGRAM, kernels=(replace(kernels[0], duration_ns=0), *kernels[1:]))
    assert timeless.with_durations([0] * 8) == timeless.with_durations([0, *[0] * 7])
    with pytest.raises(ValueError, match=r"kernels\[0\]: its variants cannot be scaled from a duration of 0"):
        timeless.with_durations([1] * 8)
