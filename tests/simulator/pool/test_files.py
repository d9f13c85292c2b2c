"""Tests buffer files with one small file per format; rejected files: tests/simulator/test_malformed.py."""

from __future__ import annotations

import csv
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.compiled.encoding import NEVER
from simulator.files import FormatError
from simulator.pool import Intervals, program_lifetimes, smartpool
from simulator.pool.files import Buffers, load, save_solution
from tests import tiny
from tests.oracle.packing import overlaps

Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def rows(buffers: Buffers) -> list[tuple[str, int, int, int]]:
    """Returns (id, lower, upper, bytes) of each buffer."""
    table = buffers.intervals
    columns = (table.lower.tolist(), table.upper.tolist(), table.nbytes.tolist())
    return list(zip(buffers.ids, *columns, strict=True))


EXAMPLE = [("b1", 0, 3, 4), ("b2", 3, 9, 4), ("b3", 0, 9, 4), ("b4", 9, 21, 4), ("b5", 0, 21, 4)]


@pytest.mark.parametrize(
    "text",
    [
        "buffer,start,end,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n",
        "\ufeffid,lower,upper,size\r\nb1,0,3,4\r\nb2,3,9,4\r\nb3,0,9,4\r\nb4,9,21,4\r\nb5,0,21,4",
        "\n size , id, upper, lower \n 4 , b1, 3, 0\n\n4,b2,9,3\n4,b3,9,0\n , , , \n4,b4,21,9\n4,b5,21,0\n\n",
        "id,lower,upper,size,alignment,gaps,hint,offset\n"
        "b1,0,3,4,1,,-1,8\nb2,3,9,4,1,4-5@0:2 6-7,-1,8\nb3,0,9,4,8,,-1,4\nb4,9,21,4,1,,-1,4\nb5,0,21,4,1,,-1,0\n",
    ],
)
def test_csv(write: Write, text: str) -> None:
    buffers = load(write("input.12.csv", text))
    assert rows(buffers) == EXAMPLE
    assert buffers.intervals.period == NEVER
    assert buffers.intervals.peak_bytes == 12


def test_a_csv_holds_no_iteration(write: Write) -> None:
    path = write("a.csv", "id,lower,upper,size\n" + "a,0,1,2\n")
    assert rows(load(path, iteration=False)) == [("a", 0, 1, 2)]
    with pytest.raises(FormatError, match="no iteration: a CSV of buffers holds no stream of operations"):
        load(path, iteration=True)


def test_solution_and_back(tmp_path: Path) -> None:
    ids = ("b1", "with, comma", 'and "quotes"')
    buffers = Buffers(ids, Intervals(np.array([0, 3, 2]), np.array([3, 9, 4]), np.array([4, 4, 2])))
    packing = smartpool.pack(buffers.intervals)
    path = tmp_path / "new" / "solution.csv"
    save_solution(path, buffers, packing)
    # By size: b1 and the second, which do not meet, at 0; the third meets both.
    assert (
        path.read_text() == 'id,lower,upper,size,offset\nb1,0,3,4,0\n"with, comma",3,9,4,0\n"and ""quotes""",2,4,2,4\n'
    )
    again = load(path)
    assert rows(again) == rows(buffers)
    with path.open() as file:
        offsets = np.array([int(row["offset"]) for row in csv.DictReader(file)])
    assert overlaps(again.intervals, offsets) == []
    assert int((offsets + again.intervals.nbytes).max()) == packing.footprint


LOG = """
# ID is an address here
malloc 0xff00 9   # the parameter
malloc 1 4
read 0xFF00
write 1
free 1
malloc 7 4
read 65280        # 0xff00 once more
write 7
free 7
"""


def test_log(write: Write) -> None:
    path = write("trace.log", LOG)
    # Operations 1 to 4 and 5 to 8 repeat; "65280" is held throughout, "1" from 0 to 3.
    found = load(path)
    assert rows(found) == [("65280", 0, 4, 9), ("1", 0, 3, 4)]
    assert found.intervals.period == 4
    assert rows(load(path, iteration=True)) == rows(found)
    whole = load(path, iteration=False)
    assert rows(whole) == [("65280", 0, 9, 9), ("1", 1, 4, 4), ("7", 5, 8, 4)]
    assert whole.intervals.period == NEVER


def event(action: str, addr: int, size: int) -> dict[str, Any]:
    """Builds an entry of a device's trace as _snapshot() does."""
    frames = [{"filename": "train.py", "line": 12, "name": "step"}]
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": 0,
        "time_us": 1_700_000_000_000_000,
        "frames": frames,
        "pool_id": (0, 0),
        "compile_context": "N/A",
        "user_metadata": "",
    }


def segment(address: int, blocks: list[tuple[int, int, str]], device: int = 0) -> dict[str, Any]:
    """Builds a segment from blocks of (size, requested_size, state)."""
    total = 0
    table = []
    for size, requested, state in blocks:
        table.append(
            {"address": address + total, "size": size, "requested_size": requested, "state": state, "frames": []}
        )
        total += size
    return {
        "device": device,
        "address": address,
        "total_size": total,
        "allocated_size": total,
        "active_size": total,
        "requested_size": total,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": table,
    }


def snapshot(*traces: list[dict[str, Any]], segments: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0}
    return {
        "segments": list(segments),
        "device_traces": list(traces),
        "allocator_settings": settings,
        "external_annotations": [],
    }


def freed(addr: int, size: int) -> list[dict[str, Any]]:
    return [event("free_requested", addr, size), event("free_completed", addr, size)]


ALLOC = event("alloc", 16, 4)


def test_snapshot(write: Write) -> None:
    trace = [
        event("segment_alloc", 0x1000, 2 << 20),
        event("alloc", 0x1000, 100),
        *freed(0x9000, 70),  # allocated before the trace
        event("free_requested", 0x1000, 100),
        event("alloc", 0x1200, 30),
        event("free_completed", 0x1000, 100),  # held until here
        event("oom", 0, 1 << 40) | {"device_free": 5},
        event("alloc", 0x1000, 8),
        event("snapshot", 0, 0),
    ]
    held = segment(
        0x1000,
        [
            (512, 8, "active_allocated"),
            (512, 30, "active_allocated"),
            (1024, 0, "inactive"),
            (512, 300, "active_allocated"),
            (512, 500, "active_awaiting_free"),
        ],
    )
    other = segment(0x1000, [(512, 1, "active_allocated")], device=1)
    path = write("s.pickle", pickle.dumps(snapshot(trace, [event("alloc", 1, 1)], segments=(held, other))))
    # Before: 0x1800 and 0x1a00, which the trace does not name, stay; 0x9000. Operations 3 to 7: alloc 0x1000, free
    # 0x9000, alloc 0x1200, free 0x1000, alloc 0x1000.
    assert rows(load(path)) == [
        ("0x1800", 0, 8, 300),
        ("0x1a00", 1, 8, 500),
        ("0x9000", 2, 4, 70),
        ("0x1000@3", 3, 6, 100),
        ("0x1200", 5, 8, 30),
        ("0x1000@7", 7, 8, 8),
    ]
    assert load(path).intervals.period == NEVER
    with pytest.raises(FormatError, match=r"s.pickle: no iteration"):
        load(path, iteration=True)


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_the_iteration_of_a_snapshot(write: Write, protocol: int) -> None:
    # Cut out of a training: it begins with the free of what the iteration before has left.
    trace = freed(0x600, 20)
    for a, b in [(0x200, 0x400), (0x400, 0x200), (0x800, 0x400)]:
        trace += [event("alloc", a, 10), event("alloc", b, 20), *freed(a, 10), *freed(b, 20)]
    parameter = segment(0, [(512, 500, "active_allocated")])
    # The second device has more events.
    made = snapshot([event("alloc", 4, 4)], trace, segments=(parameter | {"device": 1},))
    found = load(write("s.pkl", pickle.dumps(made, protocol)))
    # The segment's block has address 0; a is held from 0 to 2, b from 1 to 3.
    assert rows(found) == [("0x0", 0, 4, 500), ("0x200", 0, 2, 10), ("0x400", 1, 3, 20)]
    assert found.intervals.period == 4


def test_older_snapshots(write: Write) -> None:
    # Blocks had no address and no requested_size; the state was active_pending_free.
    old = segment(0x100, [(512, 0, "inactive"), (1024, 0, "active_pending_free")])
    for block in old["blocks"]:
        del block["address"], block["requested_size"]
    path = write("old.pickle", pickle.dumps(snapshot([event("alloc", 0x900, 1)], segments=(old,))))
    assert rows(load(path)) == [("0x300", 0, 2, 1024), ("0x900", 1, 2, 1)]


class Evil:
    """Executes a command if unpickled without restrictions."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch evil",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_is_refused(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = pickle.dumps(snapshot([event("alloc", 1, 1) | {"frames": [Evil()]}]), protocol)
    path = write("evil.pickle", raw)
    with pytest.raises(FormatError, match=r"evil.pickle: refused to unpickle (posix|nt)\.system: containers"):
        load(path)
    assert not (tmp_path / "evil").exists()
    pickle.loads(raw)  # it would have
    assert (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", ["tiny.json", "tiny.json.gz"])
def test_program(tmp_path: Path, name: str) -> None:
    tiny.PROGRAM.save(tmp_path / name)
    buffers = load(tmp_path / name)
    blocks = program_lifetimes(tiny.PROGRAM).intervals
    # w, a1 to a4, g4 to g2 are tensors 0 to 7; blocks go by their malloc. Kernels have no workspace.
    assert buffers.ids == ("t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7")
    assert buffers.intervals.nbytes.tolist() == blocks.nbytes.tolist()
    assert buffers.intervals.period == 8
    line = load(tmp_path / name, iteration=False).intervals
    assert (line.period, line.peak_bytes) == (NEVER, 180)
