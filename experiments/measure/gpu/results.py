"""Writes results.json, table.md and the plots of a results folder, and packs the folder into one file."""

from __future__ import annotations

import tarfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from agents.planner import MIB
from experiments.common.lock import LOCK
from experiments.measure.conditions import report
from experiments.measure.record import Record
from experiments.measure.settings import Settings
from simulator import Machine
from simulator.files import write_json, write_text


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarizes prediction errors of rows.

    Returns:
        Mean absolute and worst relative errors of time and peak, the number of peaks over their limit, and the number
        of replay arenas over their limit in whole pages, by the device's count.
    """
    time_errors = [abs(r["error"]) for r in rows if r.get("error") is not None]
    peaks = [abs(r["measured_peak"] / r["predicted_peak"] - 1) for r in rows]
    out: dict[str, Any] = {"count": len(rows)}
    for name, errors in (("time", time_errors), ("peak", peaks)):
        if errors:
            out[name] = {"mean_absolute": sum(errors) / len(errors), "worst": max(errors)}
    arenas = [r for r in rows if "device_bytes" in r]
    page = 2**21  # bytes; the GPU allocates whole pages
    return out | {
        "over_limit": sum(r["measured_peak"] > r["limit"] for r in rows),
        "arenas_over_limit": sum(r["device_bytes"] > -(-r["limit"] // page) * page for r in arenas),
    }


def write(settings: Settings, machine: Machine | None, record: Record) -> None:
    """Writes results.json and table.md, and the plots if Matplotlib is installed."""
    out = record.out
    gpu = torch.cuda.is_available()
    sums = {kind: summary(record.successful(kind=kind)) for kind in ("replay", "train", "graph")}
    write_json(
        out / "results.json",
        {
            "format": "validation/1",
            "settings": asdict(settings),
            "torch": str(torch.__version__),
            "device": torch.cuda.get_device_name() if settings.device == "cuda" and gpu else "host",
            "flags": report(),
            "machine": machine.to_dict() if machine else None,
            "seconds": time.monotonic() - record.begin,
            "summary": sums,
            "rows": record.rows,
        },
        indent=1,
    )
    write_text(out / "table.md", "\n".join(_tables(record, sums)))
    try:
        from experiments.measure.gpu import plots
    except ImportError:
        return  # a later command on a host with Matplotlib draws the plots
    if record.successful(kind="replay"):
        plots.scatter(
            out / "predicted_vs_measured.png", record.successful(kind="replay"), record.successful(kind="train")
        )
    if record.successful(kind="largest"):
        plots.batches(out / "largest_batch.png", record.successful(kind="largest"))


def _tables(record: Record, sums: dict[str, dict[str, Any]]) -> Iterable[str]:
    """Yields the lines of table.md."""
    units = {
        "predicted_ns": 1e6,
        "measured_ns": 1e6,
        "eager_ns": 1e6,
        "host_ns": 1e6,
        "predicted_peak": MIB,
        "measured_peak": MIB,
        "limit": MIB,
        "footprint": MIB,
    }
    names = [f"{key.removesuffix('_ns')} {'MiB' if unit == MIB else 'ms'}" for key, unit in units.items()]
    yield from _table(
        ("", "workload", "limit", "planner", "error", *names, "bits"),
        [
            (
                r["kind"],
                r["workload"],
                _percent(r),
                r["planner"],
                f"{r['error']:+.2%}" if r.get("error") is not None else "",
                *(_of(r, key, unit) for key, unit in units.items()),
                _bits(r),
            )
            for kind in sums
            for r in record.successful(kind=kind)
        ],
    )
    for kind, totals in sums.items():
        for part in ("time", "peak"):
            if error := totals.get(part):
                yield (
                    f"{kind}, {part}: mean absolute error {error['mean_absolute']:.2%}, worst {error['worst']:.2%} "
                    f"over {totals['count']} plans.\n"
                )
    if rows := sorted(
        record.successful(kind="compare"), key=lambda r: (r["workload"], -r["fraction"], r["measured_ns"])
    ):
        yield from _table(
            ("workload", "limit", "method", "setting", "ms", "overhead", "peak MiB", "limit MiB"),
            [
                (
                    r["workload"],
                    _percent(r),
                    r["method"] + " (straw man)" * (r["method"] == "save_on_cpu"),
                    r["setting"],
                    _of(r, "measured_ns", 1e6),
                    f"{r['overhead']:+.1%}",
                    _of(r, "measured_peak", MIB),
                    _of(r, "limit", MIB),
                )
                for r in rows
            ],
        )
    if rows := sorted(record.successful(kind="largest"), key=lambda r: (r["workload"], -r["batch"])):
        yield from _table(
            ("workload", "cap MiB", "method", "largest batch", "× default batch", "too large"),
            [
                (
                    r["workload"],
                    _of(r, "cap", MIB),
                    r["method"],
                    f"{'at least ' * r['time_over']}{r['batch']}",
                    f"{r['batch'] / r['own_batch']:.2f}",
                    r.get("too_large", ""),
                )
                for r in rows
            ],
        )
    for r in record.rows:
        if "failed" in r:
            entries = [str(r[key]) for key in ("kind", "workload", "fraction", "planner", "method") if key in r]
            yield f"- {' '.join(entries)}: {r['failed']}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterable[str]:
    for cells in (heads, ("---",) * len(heads), *rows):
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield ""


def _of(row: dict[str, Any], key: str, unit: float) -> str:
    return f"{row[key] / unit:.2f}" if row.get(key) else ""


def _percent(row: dict[str, Any]) -> str:
    return f"{row['fraction']:.0%}"


def _bits(row: dict[str, Any]) -> str:
    """Returns whether a step's losses equal those of eager steps, as a table cell."""
    if "equal" not in row:
        return ""
    return "equal" if row["equal"] else "differ" if row["eager_equal"] else "differ, also between two eager runs"


def pack(out: Path) -> Path:
    """Packs a folder into FOLDER.tar.gz next to it and returns the file."""
    packed = out.with_name(out.name + ".tar.gz")
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(out, out.name, filter=lambda member: None if member.name.endswith(LOCK) else member)
    return packed
