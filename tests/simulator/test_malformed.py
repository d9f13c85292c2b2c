"""Tests that malformed files raise FormatError with one line that begins with the file, key or entry."""

from __future__ import annotations

import copy
import gzip
import json
import math
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from simulator import FormatError, Machine, Plan, Program, Timeline, simulate
from simulator.pool.files import load
from tests import tiny
from tests.simulator.pool.test_files import ALLOC, event, freed, segment, snapshot

READERS = {"program": Program, "plan": Plan, "timeline": Timeline, "machine": Machine}
GOOD: dict[str, Any] = {
    "program": {
        "format": "program/1",
        "name": "good",
        "tensors": [
            {"name": "w", "nbytes": 10, "kind": "parameter", "persistent": True},
            {"name": "x", "nbytes": 20, "kind": "activation", "persistent": False},
            {"name": "y", "nbytes": 30, "kind": "activation", "persistent": False},
        ],
        "kernels": [
            {
                "name": "f",
                "kind": "matmul",
                "phase": "forward",
                "inputs": [0],
                "outputs": [1],
                "duration_ns": 5,
                "workspace": 0,
                "flops": 1,
                "bytes": 2,
                "recomputable": True,
                "variants": [[5, 0], [4, 10]],
            },
            {"name": "b", "kind": "other", "phase": "backward", "inputs": [0, 1], "outputs": [2]},
        ],
    },
    "plan": {
        "format": "plan/1",
        "decisions": [
            {"kind": "recompute", "tensor": 1, "after": 1, "before": 6, "keep": True},
            {"kind": "swap", "tensor": 2, "after": 2, "before": 5, "prefetch": 3, "sync": True},
        ],
        "variants": [[0, 1], [4, 0]],
    },
    "timeline": simulate(tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT).to_dict(),
    "machine": {"name": "m", "memory_bytes": 10**6, "h2d_bytes_per_s": 10**9, "d2h_bytes_per_s": 10**9},
}
DELETE = object()
NAN = math.nan
# (path of keys, values to put there one by one, start of the message)
MALFORMED: dict[str, list[tuple[str, list[Any], str]]] = {
    "program": [
        ("", [[], None], "program: "),
        ("format", ["program/2"], "program.format: "),
        ("format", [DELETE], "program: missing key 'format'"),
        ("tensors.1", [3], "tensors[1]: "),
        ("tensors.1.nbytes", [DELETE], "tensors[1]: missing key 'nbytes'"),
        ("tensors.1.nbytes", [-1, 2**43 + 1, 1.5, True, "20", NAN, math.inf], "tensors[1].nbytes: "),
        ("tensors.1.kind", ["weights"], "tensors[1].kind: "),
        ("tensors.1.persistent", [0], "tensors[1].persistent: "),
        ("tensors.0.persistent", [False], "kernels[0].inputs[0]: tensor 0 ('w') is read before any write"),
        ("kernels", [[]], "kernels: "),
        ("kernels.0.inputs", [DELETE], "kernels[0]: missing key 'inputs'"),
        ("kernels.0.kind", ["convolution"], "kernels[0].kind: "),
        ("kernels.0.phase", ["update"], "kernels[0].phase: "),
        ("kernels.0.inputs", [0], "kernels[0].inputs: "),
        ("kernels.0.inputs", [["w"], [False], [2], [1]], "kernels[0].inputs[0]: "),
        ("kernels.0.inputs", [[0, 3]], "kernels[0].inputs[1]: there is no tensor 3"),
        ("kernels.1.outputs", [[-1]], "kernels[1].outputs[0]: there is no tensor -1"),
        ("kernels.0.duration_ns", [-5, 0.5], "kernels[0].duration_ns: "),
        ("kernels.0.flops", [-1], "kernels[0].flops: "),
        ("kernels.0.bytes", [2**63], "kernels[0].bytes: "),
        ("kernels.0.variants.1", [[4], 4], "kernels[0].variants[1]: "),
        ("kernels.0.variants.1.0", [True, -1], "kernels[0].variants[1][0]: "),
        ("kernels.0.variants.1.1", [-1], "kernels[0].variants[1][1]: "),
    ],
    "plan": [
        ("format", [DELETE], "plan: missing key 'format'"),
        ("format", ["plan/3"], "plan.format: "),
        ("decisions.0", [1], "decisions[0]: "),
        ("limit", [0.5, -1], "plan.limit: "),
        ("decisions.1.kind", [DELETE], "decisions[1]: missing key 'kind'"),
        ("decisions.1.kind", ["offload", ["swap"]], "decisions[1].kind: "),
        ("decisions.1.kind", ["rerun"], "decisions[1]"),  # of plan/2
        ("decisions.1.tensor", [DELETE], "decisions[1]: missing key 'tensor'"),
        ("decisions.1.tensor", ["a2"], "decisions[1].tensor: "),
        ("decisions.1.prefetch", ["4", None], "decisions[1].prefetch: "),  # without prefetch, the key is absent
        ("decisions.1.keep", [True], "decisions[1]: unknown key 'keep'"),
        ("decisions.0.sync", [True], "decisions[0]: unknown key 'sync'"),
        ("variants.1", [1, [4]], "variants[1]: "),
        ("variants.0.1", [0.5], "variants[0][1]: "),
    ],
    "timeline": [
        ("format", ["timeline/0"], "timeline.format: "),
        ("format", [DELETE], "timeline: missing key 'format'"),
        ("breakdown.compute_ns", [DELETE], "breakdown: missing key 'compute_ns'"),
        ("breakdown.stall_ns", [1], "breakdown: unknown key 'stall_ns'"),
        ("boundaries", [["end"]], "boundaries[0]: "),
        ("events.2", [[1]], "events[2]: "),
        ("events.2", [[1, True, 0, 0]], "events[2][1]: "),
        ("spans.1", [[0, 1, "d2h"], [0, 1, "d2d", "swap_out", 1], [0, 1, "d2h", ["swap_out"], 1]], "spans[1]: "),
        ("spans.1", [[0, "1", "d2h", "swap_out", 1]], "spans[1][1]: "),
    ],
    "machine": [
        ("memory_bytes", [DELETE], "machine: missing key 'memory_bytes'"),
        ("memory_bytes", [1.5, True, "11G", 0], "machine.memory_bytes: "),
        *(
            (key, [0, -1, NAN], f"machine.{key}: ")
            for key in ("h2d_bytes_per_s", "d2h_bytes_per_s", "memory_bytes_per_s", "alignment", "queue_depth")
        ),
        *(
            (key, [-1, 0.5], f"machine.{key}: ")
            for key in (
                "copy_latency_ns",
                "d2h_latency_ns",
                "h2d_latency_ns",
                "host_bytes",
                "duplex_h2d_bytes_per_s",
                "duplex_d2h_bytes_per_s",
                "duplex_bytes_per_s",
                "malloc_bytes_per_s",
                "wait_ns",
                "event_ns",
                "issue_ns",
                "graph_launch_ns",
                "switch_ns",
            )
        ),
        ("copy_contention", [-0.1, 0.5, NAN], "machine.copy_contention: "),
        ("graph_copies", [0, 1.1, NAN], "machine.graph_copies: "),
        ("concurrency", [0, 1025, NAN], "machine.concurrency: "),
        ("copy_engines", [3], "machine.copy_engines: "),
        ("flops_per_s", [{"float32": x} for x in (0, 1e3, True)], "machine.flops_per_s.float32: "),
        ("efficiency", [{"conv": x} for x in (0, 1.01, NAN, "fast")], "machine.efficiency.conv: "),
    ],
}
CASES = [(name, *row) for name, rows in MALFORMED.items() for row in rows]


def put(data: Any, path: list[Any], value: Any) -> Any:
    """Returns a copy of nested lists and dictionaries with one entry replaced or deleted."""
    if not path:
        return value
    inner = data = copy.deepcopy(data)
    for key in path[:-1]:
        inner = inner[key]
    if value is DELETE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return data


@pytest.mark.parametrize(("name", "path", "values", "begins"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_the_place_is_named(tmp_path: Path, name: str, path: str, values: list[Any], begins: str) -> None:
    reader = READERS[name]
    keys = [int(key) if key.isdigit() else key for key in path.split(".") if key]
    for value in values:
        data = put(GOOD[name], keys, value)
        with pytest.raises(FormatError) as caught:
            reader.from_dict(data)
        message = str(caught.value)
        assert message.startswith(begins) and "\n" not in message
        file = tmp_path / f"bad.{'yaml' if name == 'machine' else 'json'}"
        file.write_text(yaml.safe_dump(data) if name == "machine" else json.dumps(data))
        with pytest.raises(FormatError) as caught:
            reader.load(file)
        assert str(caught.value) == f"{file}: {message}"


@pytest.mark.parametrize("name", READERS)
def test_the_good_ones_are_read(name: str) -> None:
    READERS[name].from_dict(GOOD[name])


def test_two_keys_of_one_meaning() -> None:
    with pytest.raises(FormatError, match=r"^machine: `duplex_bytes_per_s` and `duplex_d2h_bytes_per_s` are mutually"):
        Machine.from_dict({**GOOD["machine"], "duplex_bytes_per_s": 7, "duplex_d2h_bytes_per_s": 0})
    with pytest.raises(FormatError, match=r"^machine: `copy_latency_ns` and `h2d_latency_ns` are mutually exclusive"):
        Machine.from_dict({**GOOD["machine"], "copy_latency_ns": 7, "h2d_latency_ns": 0})
    read = Machine.from_dict({**GOOD["machine"], "copy_latency_ns": 7})
    assert (read.d2h_latency_ns, read.h2d_latency_ns) == (7, 7)


HEADER = "id,lower,upper,size\n"
BIG = 2**43 + 1
FILES: list[tuple[str, str | bytes, str]] = [
    # JSON and YAML
    ("empty.json", b"", ""),
    ("cut.json", b'{"format": "program/1", "name": ', "not JSON"),
    ("two.json", b"{} {}", "not JSON"),
    ("latin.json", '{"name": "é"}'.encode("latin-1"), ""),
    ("deep.json", b"[" * 100_000, ""),
    ("digits.json", b'{"format": ' + b"9" * 10_000 + b"}", ""),
    ("plain.json.gz", b"{}", ""),
    ("cut.json.gz", gzip.compress(json.dumps(GOOD["program"]).encode())[:-20], ""),
    ("flipped.json.gz", gzip.compress(b"[" + b"1, " * 1000 + b"1]")[:20] + b"\xff" * 12, ""),
    ("keys.json", b"{}", "program: missing key 'format'"),
    *(
        (f"{i}.yaml", text, "")
        for i, text in enumerate(("", "- 1", "name: [", "name: m", "!!python/object:os.system {}", "a: b: c", "\x00"))
    ),
    # CSV
    ("a.csv", "", "holds no line"),
    ("a.csv", b"\xff\xfe\x00", "neither text nor a snapshot"),
    ("a.csv", "id,lower,size\na,0,1\n", "line 1: no column 'upper'"),
    ("a.csv", "id,lower,upper,size,start\n", "line 1: more than one column 'lower'"),
    ("a.csv", HEADER + "a,0,1,2\n\na,1,2,2\n", "line 4: id 'a'"),
    ("a.csv", HEADER + "a,0,1\n", "line 2: expected 4 cells, got 3"),
    *(
        ("a.csv", HEADER + row, f"line 2: {cell}: ")
        for row, cell in (
            ("a,0,1.5,2\n", "upper"),
            ("a,,1,2\n", "lower"),
            ("a,0,1,1_000\n", "size"),
            ("a,0,1,-2\n", "size"),
            (f"a,0,1,{'9' * 5000}\n", "size"),
            (f"a,0,1,{BIG}\n", "size"),
            ("a,-1,1,2\n", "lower"),
            (f"a,0,{2**62},2\n", "upper"),
        )
    ),
    ("a.csv", HEADER + "a,3,3,2\n", "line 2: expected lower < upper"),
    ("a.csv", HEADER + "a,0,1," + "1" * 200_000, "field larger than field limit"),
    # logs
    ("a.log", "allocate 1 2", "line 1: "),
    ("a.log", "malloc 1 2\nmaloc 1 2", "line 2: "),
    ("a.log", "malloc 1", "line 1: "),
    ("a.log", "malloc 1 2\n\nfree 1 2", "line 3: "),
    *(("a.log", f"malloc {name} 2", "line 1: id: ") for name in ("a", "0x", "-1")),
    *(("a.log", f"malloc 1 {nbytes}", "line 1: bytes: ") for nbytes in ("-2", "2.0")),
    ("a.log", "# set-up\nmalloc 1 2\nmalloc 0x1 2", "line 3: malloc of a block that is held already, 1"),
    ("a.log", "malloc 1 2\nfree 1\nread 1", "line 3: read of a block that is not held, 1"),
    # snapshots
    *(
        ("a.pickle", pickle.dumps(made), place)
        for made, place in (
            ([1, 2], "snapshot: "),
            ({"segments": []}, "snapshot: missing key 'device_traces'"),
            ({"device_traces": [[ALLOC]]}, "snapshot: missing key 'segments'"),
            (snapshot() | {"device_traces": 3}, "snapshot.device_traces: "),
            (snapshot([ALLOC], 3), "device_traces[1]: "),
            (snapshot([], [event("snapshot", 0, 0)]), "device_traces: no alloc and no free_completed"),
            (
                snapshot([ALLOC, event("free_requested", 16, 4)]),
                "device_traces[0]: frees are requested (free_requested) and none completes (free_completed)",
            ),
            (snapshot([ALLOC, "x"]), "device_traces[0][1]: "),
            (snapshot([ALLOC, {}]), "device_traces[0][1]: missing key 'action'"),
            (snapshot([ALLOC, {"action": "alloc", "addr": 1}]), "device_traces[0][1]: missing key 'size'"),
            (snapshot([ALLOC | {"size": True}]), "device_traces[0][0].size: "),
            (snapshot([ALLOC | {"size": -1}]), "device_traces[0][0].size: "),
            (snapshot([ALLOC | {"addr": 2**70}]), "device_traces[0][0].addr: "),
            (
                snapshot([event("oom", 0, 1), ALLOC, ALLOC]),
                "device_traces[0][2]: malloc of a block that is held already",
            ),
            (snapshot([*freed(16, 4), *freed(16, 4)]), "device_traces[0][3]: free of a block that is not held"),
            (snapshot([ALLOC], segments=({"address": 1},)), "segments[0]: missing key 'blocks'"),
            (snapshot([ALLOC], segments=(segment(1, [(1, 1, 2)]),)), "segments[0].blocks[0].state: "),
            (
                snapshot([ALLOC], segments=(segment(1, [(1, -1, "active_allocated")]),)),
                "segments[0].blocks[0].requested_size: ",
            ),
        )
    ),
    # pickles
    ("a.pickle", pickle.dumps(OrderedDict(a=1)), "refused to unpickle collections.OrderedDict"),
    ("a.pickle", b"(S'true'\nios\nsystem\n.", "refused to unpickle os.system"),
    ("a.pickle", pickle.dumps(snapshot([ALLOC]))[:-20], "not a pickle"),
    ("a.pickle", b"\x80\x04", "not a pickle"),
]


@pytest.mark.parametrize(("name", "content", "begins"), FILES, ids=[f"{n}: {b}" for n, _, b in FILES])
def test_the_line_or_entry_of_a_file_is_named(tmp_path: Path, name: str, content: str | bytes, begins: str) -> None:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(FormatError) as caught:
        Machine.load(file) if name.endswith("yaml") else load(file)
    assert str(caught.value).startswith(f"{file}: {begins}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [Program.load, Machine.load, load])
def test_a_missing_file(tmp_path: Path, read: Any) -> None:
    with pytest.raises(FormatError, match=r"none\.yaml: cannot be read \(No such file or directory\)$"):
        read(tmp_path / "none.yaml")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
PLACES = st.sampled_from(["tensors", "kernels", "name", "nbytes", "kind", "inputs", "variants", 0, 1])


@given(JUNK, st.lists(PLACES, max_size=4))
def test_any_junk_anywhere_is_a_format_error_or_a_program(junk: Any, path: list[Any]) -> None:
    try:
        data = put(GOOD["program"], path, junk)
    except (KeyError, IndexError, TypeError):  # the path does not exist
        return
    try:
        assert Program.from_dict(data).to_dict()["format"] == "program/1"
    except FormatError as error:
        assert str(error)
