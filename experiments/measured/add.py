"""Checks what others measured, says how far the model is off on it, and puts it beside the rest (tests/data/measured).

A file is ``measured/1`` JSON, as ``python -m experiments.measured profile`` writes it, or a trace, NAME.csv with
NAME.yaml (experiments/measured/steps.py). What is something else is refused in a sentence that says what, and in which
line.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from executor.capture.contributed import text_of
from experiments.measured import steps, traces
from experiments.measured.steps import LEAST_US, Beside, Trace
from simulator.files import FormatError, write_text

MOST_BYTES = 64 * 2**20  # of a file; those of the largest networks have a few
# What people have, too, by what stands in it.
OTHERS = {
    '"traceEvents"': "a Chrome trace, as torch.profiler and Kineto write it",
    '"device_traces"': "an allocator snapshot of PyTorch", '"segments"': "an allocator snapshot of PyTorch",
    '"durations_ns"': "a profile/1, which has no operators", '"transfers"': "a calibration",
}  # fmt: skip
WANTED = "; expected measured/1, as `python -m experiments.measured profile` writes it, or a trace as CSV"


@dataclass(frozen=True)
class Checked:
    """A file that is one of those forms.

    Attributes:
        stem: the name that it gets, from its device and workload.
        texts: ending -> what is written.
        rows: each operator beside what we say.
        left_out: kernels whose operators this PyTorch does not have.
    """

    stem: str
    texts: dict[str, str]
    rows: list[Beside]
    left_out: int


def check(path: Path) -> Checked:
    """Reads a file and compares it; nothing is written.

    Raises:
        FormatError: it is none of ours, or has personal data in it; a sentence naming the line or the entry.
    """
    if path.suffix == ".csv":
        _text(path)
        trace = Trace.load(path)
        rows, about = steps.of_trace(trace), path.with_suffix(".yaml")
        texts = {"csv": _text(path), "yaml": _text(about)}
        network = str(trace.network.get("family"))
        return Checked(_stem(trace.device, f"{network}-{trace.optimizer}"), texts, rows, 0)
    text = _text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: line {getattr(error, 'lineno', 1)}: not JSON ({error}){WANTED}") from None
    if (
        not isinstance(data, dict)
        or "format" not in data
        or str(data["format"]).startswith(("profile/", "calibration/"))
    ):
        raise FormatError(f"{path}: {_other(text)}{WANTED}")
    found = steps.load(path)
    assert not isinstance(found, Trace)
    if found.device.startswith("cpu"):
        raise FormatError(f"{path}: measured.device: {found.device!r} is no GPU")
    try:
        rows = steps.of_contributed(found)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    if not rows:
        raise FormatError(f"{path}: measured.operators: this PyTorch has none of them")
    return Checked(_stem(found.device, found.workload), {"json": text_of(found)}, rows, len(found.kernels) - len(rows))


def add(checked: Checked) -> Path:
    """Writes it, under a number where another has its name; returns the path of its numbers.

    Raises:
        FormatError: it is there already, or there is no such directory.
    """
    if not traces.DATA.is_dir():
        raise FormatError(f"{traces.DATA} is not there: files are added to a checkout of the repository")
    first = next(iter(checked.texts))
    for path in sorted(traces.DATA.glob(f"*.{first}")):
        if path.read_bytes() == checked.texts[first].encode():
            raise FormatError(f"it is there already, as {path.name}")
    stem, number = checked.stem, 1
    while any((traces.DATA / f"{stem}.{ending}").exists() for ending in ("csv", "yaml", "json")):
        number += 1
        stem = f"{checked.stem}-{number}"
    written: list[Path] = []
    try:
        for ending, text in reversed(checked.texts.items()):  # what is read first is there last
            written.append(traces.DATA / f"{stem}.{ending}")
            write_text(written[-1], text)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return traces.DATA / f"{stem}.{first}"


def summary(checked: Checked) -> list[str]:
    """How far the model is off, sentences."""
    measured, ours, control = steps.total(checked.rows)
    out = [
        f"{len(checked.rows):,} kernels, {measured:.2f} ms; ours {ours:.2f} ms ({ours / measured - 1:+.1%}), one "
        f"roofline {control:.2f} ms ({control / measured - 1:+.1%})."
    ]
    if checked.left_out:
        out.append(f"{checked.left_out:,} kernels are left out, as this PyTorch does not have their operators.")
    large = steps.large(checked.rows)
    if not large:
        return [*out, f"No kernel takes {LEAST_US:g} us, so none is compared by itself."]
    off = median(abs(r - 1) for r in steps.ratios(large))
    old = median(abs(r - 1) for r in steps.ratios(large, control=True))
    out.append(f"Kernels of at least {LEAST_US:g} us: {len(large):,}, median error {off:.1%} (one roofline {old:.1%}).")
    for kind in sorted({row.kind for row in large}):
        mine = [row for row in large if row.kind == kind]
        there, here, _ = steps.total(mine)
        middle = median(abs(r - 1) for r in steps.ratios(mine))
        out.append(f"  {kind}: {len(mine)} kernels, {there:.2f} ms, ours {here / there - 1:+.1%}, median {middle:.1%}")
    return out


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise FormatError(f"{path}: line 1: larger than {MOST_BYTES // 2**20} MiB{WANTED}")
        raw = path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        snapshot = " (a pickle, such as an allocator snapshot, is not read)" if raw[:1] == b"\x80" else ""
        raise FormatError(f"{path}: line {line}: not text{snapshot}{WANTED}") from None
    if "\0" in text:
        raise FormatError(f"{path}: line {text.count(chr(10), 0, text.index(chr(0))) + 1}: not text{WANTED}")
    return text


def _other(text: str) -> str:
    """What JSON that is not ours is, and in which line one sees it."""
    for word, what in OTHERS.items():
        if (at := text.find(word)) >= 0:
            return f"line {text.count(chr(10), 0, at) + 1}: {what}"
    return "line 1: no measured step, as it has no format"


def _stem(device: str, workload: str) -> str:
    slug = [re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_") for word in (device, workload)]
    return "-".join(slug)
