"""program/1: what is read, what is refused, and the figures of a small program by hand."""

import copy
import gzip
import json
import os
import pickle
import re
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from simulator import FormatError, Gap, Kernel, Program, Tensor
from tests.strategies import programs
from tests.tiny import A1, A2, A3, A4, G2, G3, G4, PROGRAM, W


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_file_and_back(tmp_path, name):
    kernel = Kernel("k", "conv", "backward", (0,), (0,), 3, 4, 5, 6, False, ((7, 8), (9, 10)))
    program = Program("p", (Tensor("größe", 1, "buffer", True),), (kernel,))
    program.save(tmp_path / name)
    assert Program.load(tmp_path / name) == program
    assert os.listdir(tmp_path) == [name]  # nothing temporary is left


def test_what_may_be_left_out():
    kernel = {"name": "k", "kind": "other", "inputs": [], "outputs": [0]}
    tensor = {"name": "t", "nbytes": 1, "kind": "activation", "persistent": False}
    read = Program.from_dict({"format": "program/1", "name": "p", "tensors": [tensor], "kernels": [kernel]})
    assert read.kernels == (Kernel("k", "other", "forward", (), (0,), 0, 0, 0, 0, True, ()),)


def test_a_program_that_is_in_use_can_be_pickled():
    """What another thread works out of it meanwhile is not in what is being written."""
    program = replace(PROGRAM)
    state = program.__getstate__()
    assert program.accesses and "accesses" in program.__dict__ and "accesses" not in state
    assert pickle.loads(pickle.dumps(program)) == program


# ------------------------------------------------------------------------------- malformed programs


def good() -> dict:
    """Three tensors (the first is persistent), two kernels."""
    return {
        "format": "program/1",
        "name": "good",
        "tensors": [
            {"name": "w", "nbytes": 10, "kind": "parameter", "persistent": True},
            {"name": "x", "nbytes": 20, "kind": "activation", "persistent": False},
            {"name": "y", "nbytes": 30, "kind": "activation", "persistent": False},
        ],
        "kernels": [
            {"name": "f", "kind": "matmul", "phase": "forward", "inputs": [0], "outputs": [1], "duration_ns": 5,
             "workspace": 0, "flops": 1, "bytes": 2, "recomputable": True, "variants": [[5, 0], [4, 10]]},
            {"name": "b", "kind": "other", "phase": "backward", "inputs": [0, 1], "outputs": [2]},
        ],
    }  # fmt: skip


DELETE = object()
MALFORMED = [
    # (path of keys, value to put there, the message)
    ([], [], "program: expected an object, got []"),
    ([], None, "program: expected an object, got null"),
    (["format"], "program/2", "program.format: expected 'program/1', got 'program/2'"),
    (["format"], DELETE, "program: missing key 'format'"),
    (["colour"], 1, "program: unknown key 'colour'"),
    (["name"], 7, "program.name: expected a string, got 7"),
    (["tensors"], {}, "program.tensors: expected a list, got {}"),
    (["tensors", 1], 3, "tensors[1]: expected an object, got 3"),
    (["tensors", 1, "nbytes"], DELETE, "tensors[1]: missing key 'nbytes'"),
    (["tensors", 1, "size"], 3, "tensors[1]: unknown key 'size'"),
    (["tensors", 1, "nbytes"], -1, "tensors[1].nbytes: expected an integer from 0 to 2**43, got -1"),
    (["tensors", 1, "nbytes"], 10**15, "tensors[1].nbytes: expected an integer from 0 to 2**43, got 1000000000000000"),
    (["tensors", 1, "nbytes"], 1.5, "tensors[1].nbytes: expected an integer, got 1.5"),
    (["tensors", 1, "nbytes"], True, "tensors[1].nbytes: expected an integer, got true"),
    (["tensors", 1, "nbytes"], "20", 'tensors[1].nbytes: expected an integer, got "20"'),
    (["tensors", 1, "nbytes"], float("nan"), "tensors[1].nbytes: expected an integer, got NaN"),
    (["tensors", 1, "nbytes"], float("inf"), "tensors[1].nbytes: expected an integer, got Infinity"),
    (["tensors", 1, "kind"], "weights", "tensors[1].kind: unknown kind 'weights'"),
    (["tensors", 1, "persistent"], 0, "tensors[1].persistent: expected true or false, got 0"),
    (["tensors", 0, "persistent"], False,
     "kernels[0].inputs[0]: tensor 0 ('w') is read before any write and is not persistent"),
    (["kernels"], [], "kernels: a program needs at least one"),
    (["kernels", 0], "f", 'kernels[0]: expected an object, got "f"'),
    (["kernels", 0, "inputs"], DELETE, "kernels[0]: missing key 'inputs'"),
    (["kernels", 0, "stream"], 0, "kernels[0]: unknown key 'stream'"),
    (["kernels", 0, "kind"], "convolution", "kernels[0].kind: unknown kind 'convolution'"),
    (["kernels", 0, "phase"], "update", "kernels[0].phase: unknown phase 'update'"),
    (["kernels", 0, "inputs"], 0, "kernels[0].inputs: expected a list, got 0"),
    (["kernels", 0, "inputs"], ["w"], 'kernels[0].inputs[0]: expected an integer, got "w"'),
    (["kernels", 0, "inputs"], [False], "kernels[0].inputs[0]: expected an integer, got false"),
    (["kernels", 0, "inputs"], [0, 3], "kernels[0].inputs[1]: there is no tensor 3"),
    (["kernels", 1, "outputs"], [-1], "kernels[1].outputs[0]: there is no tensor -1"),
    (["kernels", 0, "inputs"], [2],
     "kernels[0].inputs[0]: tensor 2 ('y') is read before any write and is not persistent"),
    (["kernels", 0, "inputs"], [1],
     "kernels[0].inputs[0]: tensor 1 ('x') is read before any write and is not persistent"),
    (["kernels", 0, "duration_ns"], -5, "kernels[0].duration_ns: expected an integer from 0 to 2**43, got -5"),
    (["kernels", 0, "duration_ns"], 0.5, "kernels[0].duration_ns: expected an integer, got 0.5"),
    (["kernels", 0, "workspace"], None, "kernels[0].workspace: expected an integer, got null"),
    (["kernels", 0, "workspace"], 2**60, f"kernels[0].workspace: expected an integer from 0 to 2**43, got {2**60}"),
    (["kernels", 0, "flops"], -1, "kernels[0].flops: expected an integer from 0 to 2**62, got -1"),
    (["kernels", 0, "bytes"], 2**63, f"kernels[0].bytes: expected an integer from 0 to 2**62, got {2**63}"),
    (["kernels", 0, "recomputable"], 1, "kernels[0].recomputable: expected true or false, got 1"),
    (["kernels", 0, "variants"], 1, "kernels[0].variants: expected a list, got 1"),
    (["kernels", 0, "variants", 1], [4], "kernels[0].variants[1]: expected 2 integers, got 1"),
    (["kernels", 0, "variants", 1], 4, "kernels[0].variants[1]: expected a list, got 4"),
    (["kernels", 0, "variants", 1, 0], True, "kernels[0].variants[1][0]: expected an integer, got true"),
    (["kernels", 0, "variants", 1, 0], -1, "kernels[0].variants[1][0]: expected an integer from 0 to 2**43, got -1"),
    (["kernels", 0, "variants", 1, 1], -1, "kernels[0].variants[1][1]: expected an integer from 0 to 2**43, got -1"),
]  # fmt: skip


def put(data, path, value):
    """A copy of nested lists and dictionaries with one entry replaced or deleted."""
    if not path:
        return value
    data = copy.deepcopy(data)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if value is DELETE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return data


def test_the_largest_amounts_are_read():
    data = good()
    data["tensors"][1]["nbytes"] = 2**43
    data["kernels"][0] |= {"duration_ns": 2**43, "workspace": 2**43, "flops": 2**62, "bytes": 2**62,
                           "variants": [[2**43, 2**43]]}  # fmt: skip
    assert Program.from_dict(data).ideal_ns == 2**43


def test_the_good_program_is_good():
    assert Program.from_dict(good()).peak_bytes == 60


@pytest.mark.parametrize(("path", "value", "message"), MALFORMED, ids=[m for _, _, m in MALFORMED])
def test_a_malformed_program_is_one_sentence(tmp_path, path, value, message):
    data = put(good(), path, value)
    with pytest.raises(FormatError, match=f"^{re.escape(message)}$"):
        Program.from_dict(data)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(data))
    with pytest.raises(FormatError, match=f"^{re.escape(f'{file}: {message}')}$"):
        Program.load(file)


UNREADABLE = {
    "empty.json": b"",
    "cut.json": b'{"format": "program/1", "name": ',
    "two.json": b"{} {}",
    "latin.json": '{"name": "é"}'.encode("latin-1"),
    "deep.json": b"[" * 100_000,
    "digits.json": b'{"format": ' + b"9" * 10_000 + b"}",
    "plain.json.gz": b"{}",
    "cut.json.gz": gzip.compress(json.dumps(good()).encode())[:-20],
    "flipped.json.gz": gzip.compress(b"[" + b"1, " * 1000 + b"1]")[:20] + b"\xff" * 12,
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_file_is_one_sentence(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(UNREADABLE[name])
    with pytest.raises(FormatError) as caught:
        Program.load(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_missing_file_or_a_folder(tmp_path):
    with pytest.raises(FormatError, match=r"none\.json: cannot be read \(No such file or directory\)$"):
        Program.load(tmp_path / "none.json")
    with pytest.raises(FormatError, match=r"cannot be read \(Is a directory\)$"):
        Program.load(tmp_path)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
PLACES = st.sampled_from(["tensors", "kernels", "name", "nbytes", "kind", "inputs", "variants", 0, 1])


@given(JUNK, st.lists(PLACES, max_size=4))
def test_any_junk_anywhere_is_a_format_error_or_a_program(junk, path):
    try:
        data = put(good(), path, junk)
    except (KeyError, IndexError, TypeError):  # no such place
        return
    try:
        assert Program.from_dict(data).to_dict()["format"] == "program/1"
    except FormatError as error:
        assert str(error)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "step.json"
    PROGRAM.save(path)
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            Program.from_dict(good()).save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["step.json"]


# -------------------------------------------------------------------------------- figures, by hand


def test_loads_and_times():
    assert PROGRAM.live_bytes == (50, 90, 130, 170, 180, 150, 110, 60)
    assert PROGRAM.peak_bytes == 180 and PROGRAM.ideal_ns == 120
    assert PROGRAM.start_ns == (0, 10, 20, 30, 40, 60, 80, 100, 120)


def test_a_workspace_and_an_unused_tensor():
    kernels = (Kernel("k", "other", "forward", (), (0,), 1, workspace=7), Kernel("k", "other", "forward", (), (), 1))
    unused = (Tensor("x", 10), Tensor("never", 99), Tensor("kept", 100, "buffer", True))
    assert Program("p", unused, kernels).live_bytes == (117, 100)


def test_gaps():
    assert PROGRAM.gaps() == [Gap(W, 0, 7), Gap(A1, 1, 6), Gap(A2, 2, 5)]
    assert PROGRAM.gaps(min_bytes=11) == [Gap(A1, 1, 6), Gap(A2, 2, 5)]
    assert [PROGRAM.gap_ns(g) for g in PROGRAM.gaps()] == [90, 60, 30]


def test_a_gap_has_a_kernel_in_it():
    """x is read by k1 and k3, with k2 between; z is used in the same two and has no bytes. w is used from k0 to k2, so
    that k3 alone lies between its last and its first use; v is used by all but none."""
    w, x, z, v = range(4)
    lines = [((w, v), (x, z)), ((x, z, v), ()), ((w, v), ()), ((x, z, v), ())]
    kernels = tuple(Kernel(f"k{i}", "other", "forward", *line, 10 + i) for i, line in enumerate(lines))
    tensors = (Tensor("w", 1, "buffer", True), Tensor("x", 1), Tensor("z", 0), Tensor("v", 1, "buffer", True))
    program = Program("gaps", tensors, kernels)
    assert program.gaps() == program.gaps(1) == [Gap(w, 0, 2), Gap(w, 2, 0), Gap(x, 1, 3)]
    assert [program.gap_ns(g) for g in program.gaps()] == [11, 13, 12]


def test_a_gap_from_a_kernel_to_itself():
    kernels = tuple(Kernel(f"k{i}", "other", "forward", (0,) if i == 1 else (), (), 10 + i) for i in range(3))
    program = Program("p", (Tensor("w", 1, "parameter", True),), kernels)
    assert program.gaps() == [Gap(0, 1, 1)] and program.gap_ns(Gap(0, 1, 1)) == 12 + 10


def test_a_gap_over_the_boundary():
    kernels = tuple(Kernel(f"k{i}", "other", "forward", (0,) if i in (1, 2) else (), (), 10) for i in range(4))
    program = Program("p", (Tensor("w", 1, "parameter", True),), kernels)
    assert program.gaps() == [Gap(0, 2, 1)]
    assert program.gap_ns(Gap(0, 2, 1)) == 20  # k3 and k0


def test_operations():
    program = Program.from_dict(good())
    assert [tuple(o) for o in program.operations()] == [
        ("malloc", 1, 0, 0), ("read", 0, 0, 0), ("write", 1, 0, 0),
        ("malloc", 2, 1, 5), ("read", 0, 1, 5), ("read", 1, 1, 5), ("write", 2, 1, 5),
        ("free", 1, 1, 5), ("free", 2, 1, 5),
    ]  # fmt: skip


def test_frees_are_at_the_end():
    frees = {o.tensor: o.time_ns for o in PROGRAM.operations() if o.kind == "free"}
    assert frees == {A4: 60, A3: 80, G4: 80, A2: 100, G3: 100, A1: 120, G2: 120}


@given(programs())
def test_operations_balance(program):
    """Mallocs and frees of the iteration give the loads, workspaces aside."""
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
    # sha256 of the canonical JSON: it may never change, plans name it
    assert PROGRAM.fingerprint == "a7dc5ad5b20a3e0a627b69a134ab9ede0272c41bf91ead449556277319bdde84"
    assert Program.from_dict(PROGRAM.to_dict()).fingerprint == PROGRAM.fingerprint
    assert PROGRAM.with_durations([1] * 8).fingerprint != PROGRAM.fingerprint


def test_structure():
    # It may never change, as fingerprints.
    assert PROGRAM.structure == "7292809405a6c2c130d4d48dbe338293ef2e061c7dbc18f57cd564f2b143d481"
    kernels = (replace(PROGRAM.kernels[0], variants=((4, 7), (25, 0))), *PROGRAM.kernels[1:])
    program = replace(PROGRAM, kernels=kernels)
    assert program.with_durations([3] * 8).structure == program.structure != PROGRAM.structure
    slower = replace(kernels[0], variants=((5, 7), (25, 0)))
    assert replace(program, kernels=(slower, *kernels[1:])).structure == program.structure
    larger = replace(kernels[0], variants=((4, 8), (25, 0)))
    assert replace(program, kernels=(larger, *kernels[1:])).structure != program.structure


def test_with_durations():
    assert PROGRAM.with_durations([1] * 8).ideal_ns == 8
    with pytest.raises(ValueError):
        PROGRAM.with_durations([1] * 7)
    with pytest.raises(FormatError, match=r"kernels\[0\]\.duration_ns"):
        PROGRAM.with_durations([-1] * 8)


def test_with_durations_scales_the_variants():
    kernels = (replace(PROGRAM.kernels[0], duration_ns=10, variants=((4, 7), (25, 0))), *PROGRAM.kernels[1:])
    program = replace(PROGRAM, kernels=kernels)
    assert program.with_durations([15] * 8).kernels[0].variants == ((6, 7), (38, 0))  # 37.5, to the even one
    assert program.with_durations([10] * 8).kernels[0].variants == ((4, 7), (25, 0))
    timeless = replace(PROGRAM, kernels=(replace(kernels[0], duration_ns=0), *kernels[1:]))
    assert timeless.with_durations([0] * 8) == timeless.with_durations([0, *[0] * 7])
    with pytest.raises(ValueError, match=r"kernels\[0\]: its variants cannot be scaled from a duration of 0"):
        timeless.with_durations([1] * 8)
