"""Import of buffers from other tools, and export of packings.

Four file formats, distinguished by suffix and content: MiniMalloc CSV, PyTorch allocator snapshot, operation log, and
program/1. simulator/pool/README.md describes which parts are read and how blocks are named.
"""

from __future__ import annotations

import csv
import io
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from simulator.compiled.encoding import NEVER
from simulator.files import FormatError, read_bytes, write_text
from simulator.pool.intervals import Intervals, Packing, program_lifetimes
from simulator.pool.trace import KINDS, NoIteration, Stream, StreamError, detect
from simulator.program import MAX_AMOUNT, Program


@dataclass(frozen=True)
class Buffers:
    """n buffers with unique names."""

    ids: tuple[str, ...]
    intervals: Intervals


def load(path: str | Path, iteration: bool | None = None) -> Buffers:
    """Reads the buffers of a file.

    Args:
        path: file to read.
        iteration: for a snapshot or a log: True extracts its repeating iteration, on a circle; False returns
            everything, on a line; None extracts the iteration if one is found, else returns everything. A program is
            an iteration; False puts it on a line. A CSV is always on a line.

    Returns:
        Blocks with their sizes and lifetimes.

    Raises:
        FormatError: the file is unreadable or malformed (the message names the line or entry), or ``iteration`` is
            True and nothing repeats.
    """
    path = Path(path)
    if path.name.endswith((".json", ".json.gz")):
        return _program(Program.load(path), iteration)
    raw = read_bytes(path)
    try:
        if raw[:1] == pickle.PROTO or path.suffix in (".pickle", ".pkl"):
            return _snapshot(raw, iteration)
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise FormatError(f"neither text nor a snapshot ({error})") from None
        lines = [line.strip() for line in text.splitlines()]
        first = next((i for i, line in enumerate(lines) if line and not line.startswith("#")), None)
        if first is None:
            raise FormatError("holds no line; expected a CSV of buffers, or one operation per line")
        return _csv(lines, iteration) if "," in lines[first] else _log(lines, iteration)
    except (FormatError, csv.Error) as error:
        raise FormatError(f"{path}: {error}") from None


def save_solution(path: str | Path, buffers: Buffers, packing: Packing) -> None:
    """Writes MiniMalloc's solution format: ``id,lower,upper,size,offset``, one line per buffer.

    On a circle, ``upper`` exceeds the period if a buffer stays into the next iteration.

    Args:
        path: file to write.
        buffers: blocks and their names.
        packing: packing of ``buffers.intervals``.
    """
    blocks = buffers.intervals
    columns = (blocks.lower.tolist(), blocks.upper.tolist(), blocks.nbytes.tolist(), packing.offsets.tolist())
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("id", "lower", "upper", "size", "offset"))
    writer.writerows(zip(buffers.ids, *columns, strict=True))
    write_text(path, out.getvalue())


def _program(program: Program, iteration: bool | None) -> Buffers:
    lives = program_lifetimes(program)
    blocks = lives.intervals
    if iteration is False:
        blocks = Intervals(blocks.lower, blocks.upper, blocks.nbytes)
    return Buffers(tuple(f"t{x}" if x >= 0 else f"w{-1 - x}" for x in lives.owner.tolist()), blocks)


def _csv(lines: list[str], iteration: bool | None) -> Buffers:
    if iteration:
        raise FormatError("no iteration: a CSV of buffers holds no stream of operations; pass iteration=None")
    rows = csv.reader(lines, skipinitialspace=True)
    columns = {
        "id": "id",
        "buffer": "id",
        "buffer_id": "id",
        "lower": "lower",
        "start": "lower",
        "begin": "lower",
        "upper": "upper",
        "end": "upper",
        "size": "size",
    }
    header: list[str] | None = None
    ids: dict[str, int] = {}
    table = []
    for row in rows:
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        if header is None:
            header = [columns.get(cell.lower(), cell.lower()) for cell in cells]
            for name in dict.fromkeys(columns.values()):
                if header.count(name) != 1:
                    count = "no" if name not in header else "more than one"
                    raise FormatError(
                        f"line {rows.line_num}: {count} column {name!r}; expected one each of "
                        f"{', '.join(dict.fromkeys(columns.values()))}"
                    )
            continue
        if len(cells) != len(header):
            raise FormatError(f"line {rows.line_num}: expected {len(header)} cells, got {len(cells)}")
        entry = dict(zip(header, cells, strict=True))
        name = entry["id"]
        if name in ids:
            raise FormatError(
                f"line {rows.line_num}: id {name!r} was in line {ids[name]} already; give each buffer its own"
            )
        ids[name] = rows.line_num
        where = f"line {rows.line_num}: "
        lower = _integer(entry["lower"], f"{where}lower", NEVER - 1)
        upper = _integer(entry["upper"], f"{where}upper", NEVER - 1)
        if lower >= upper:
            raise FormatError(f"{where}expected lower < upper, got {lower} and {upper}")
        table.append((lower, upper, _integer(entry["size"], f"{where}size", MAX_AMOUNT)))
    begins, ends, sizes = np.array(table, np.int64).reshape(-1, 3).T.copy()
    return Buffers(tuple(ids), Intervals(begins, ends, sizes))


def _integer(text: str, where: str, maximum: int) -> int:
    """Parses a decimal integer, or a hexadecimal one after 0x."""
    # Every valid number has fewer digits.
    if not re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]{1,20}|[0-9]{1,20})", text):
        raise FormatError(f"{where}: expected an integer, got {text[:40]!r}")
    return _amount(int(text, 16 if "x" in text.lower() else 10), where, maximum)


def _amount(value: int, where: str, maximum: int) -> int:
    if not 0 <= value <= maximum:
        raise FormatError(f"{where}: expected an integer from 0 to {maximum}, got {value}")
    return value


_Lines = list[tuple[str, int, int]]  # kind, block, bytes


def _stream(lines: _Lines, place: Callable[[int], str], name: Callable[[int], str], iteration: bool | None) -> Buffers:
    """Returns buffers from operations. ``place`` formats the location of an operation, ``name`` a block."""
    try:
        stream = Stream.from_operations(lines)
    except StreamError as error:
        i = error.operation
        raise FormatError(
            f"{place(i)}: {error.reason}, {name(lines[i][1])}: a block has one malloc, then accesses, then one free"
        ) from None
    intervals, source = stream.intervals()
    if iteration is not False:
        try:
            detected = detect(stream)
            intervals = detected.intervals
            source = detected.source
        except NoIteration as error:
            if iteration:
                raise FormatError(str(error)) from None
    names = [lines[i][1] for i in source.tolist()]
    times = Counter(names)
    ids = (name(b) + f"@{i}" * (times[b] > 1) for b, i in zip(names, source.tolist(), strict=True))
    return Buffers(tuple(ids), intervals)


def _log(text: list[str], iteration: bool | None) -> Buffers:
    lines: _Lines = []
    numbers = []  # line of each operation
    for number, line in enumerate(text, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        kind = words[0]
        if kind not in KINDS:
            raise FormatError(f"line {number}: expected {', '.join(KINDS)} or the header of a CSV, got {kind[:40]!r}")
        usage = "malloc ID BYTES" if kind == "malloc" else f"{kind} ID"
        if len(words) != len(usage.split()):
            raise FormatError(f"line {number}: expected '{usage}', got {len(words)} words")
        block = _integer(words[1], f"line {number}: id", 2**64 - 1)
        nbytes = _integer(words[2], f"line {number}: bytes", MAX_AMOUNT) if kind == "malloc" else 0
        lines.append((kind, block, nbytes))
        numbers.append(number)
    return _stream(lines, lambda i: f"line {numbers[i]}", str, iteration)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of containers, numbers and strings."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise FormatError(f"refused to unpickle {module}.{name}: containers, numbers and strings only")


def _unpickled(raw: bytes) -> Any:
    """Loads a pickle that names no class or function."""
    try:
        return _PlainUnpickler(io.BytesIO(raw)).load()
    except FormatError:
        raise
    except Exception as error:  # a broken pickle may raise any exception
        raise FormatError(f"not a pickle of torch.cuda.memory, or damaged ({type(error).__name__}: {error})") from None


def _snapshot(raw: bytes, iteration: bool | None) -> Buffers:
    data = _unpickled(raw)
    if not isinstance(data, dict):
        raise FormatError("snapshot: expected a dict with 'segments' and 'device_traces'")
    traces = _item(data, "device_traces", list, "snapshot")
    events = [list(_events(trace, f"device_traces[{i}]")) for i, trace in enumerate(traces)]
    device = max(range(len(traces)), key=lambda i: len(events[i]), default=-1)
    if device < 0 or not events[device]:
        raise FormatError("device_traces: no alloc and no free_completed; was _record_memory_history() called first?")
    if all(alloc for _, alloc, *_ in events[device]) and any(e["action"] == "free_requested" for e in traces[device]):
        raise FormatError(
            f"device_traces[{device}]: frees are requested (free_requested) and none completes (free_completed), so "
            "the ends of blocks are unknown: record a longer history and call torch.cuda.synchronize() at its end"
        )
    initial: dict[int, int] = {}  # bytes by address
    seen = set()
    for _, alloc, address, nbytes in events[device]:
        if address not in seen and not alloc:
            initial[address] = nbytes
        seen.add(address)
    # Persistent blocks first, as if recorded from the start.
    persistent = {a: n for a, n in _allocated_blocks(data, device) if a not in seen}
    lines: _Lines = [("malloc", address, nbytes) for address, nbytes in (persistent | initial).items()]
    setup = len(lines)
    lines += [("malloc" if alloc else "free", address, nbytes) for _, alloc, address, nbytes in events[device]]
    return _stream(lines, lambda i: f"device_traces[{device}][{events[device][i - setup][0]}]", hex, iteration)


def _events(trace: Any, where: str) -> Iterator[tuple[int, bool, int, int]]:
    """Yields entry, whether it allocates, address and bytes of each malloc and free."""
    if not isinstance(trace, list):
        raise FormatError(f"{where}: expected a list, got {type(trace).__name__}")
    for i, entry in enumerate(trace):
        path = f"{where}[{i}]"
        action = _item(entry, "action", str, path)
        if action in ("alloc", "free_completed"):
            address = _amount(_item(entry, "addr", int, path), f"{path}.addr", 2**64 - 1)
            yield i, action == "alloc", address, _amount(_item(entry, "size", int, path), f"{path}.size", MAX_AMOUNT)


def _allocated_blocks(data: dict[Any, Any], device: int) -> Iterator[tuple[int, int]]:
    """Yields address and requested bytes of the blocks in a device's segments."""
    for i, segment in enumerate(_item(data, "segments", list, "snapshot")):
        path = f"segments[{i}]"
        blocks = _item(segment, "blocks", list, path)
        if segment.get("device", 0) != device:
            continue
        address = _item(segment, "address", int, path)
        for j, block in enumerate(blocks):
            path = f"segments[{i}].blocks[{j}]"
            size = _amount(_item(block, "size", int, path), f"{path}.size", MAX_AMOUNT)
            if _item(block, "state", str, path) != "inactive":  # active_allocated, or its free has not completed
                requested = _item(block, "requested_size", int, path) if "requested_size" in block else size
                block_address = _item(block, "address", int, path) if "address" in block else address
                yield block_address, _amount(requested, f"{path}.requested_size", MAX_AMOUNT)
            address += size  # older snapshots store only the segment's address


def _item(entry: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: expected a dict, got {type(entry).__name__}")
    if key not in entry:
        raise FormatError(f"{where}: missing key {key!r}")
    value = entry[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise FormatError(f"{where}.{key}: expected {kind.__name__}, got {type(value).__name__}")
    return value
