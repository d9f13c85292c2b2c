"""results.json, table.md and the pictures of a directory, of what there is in it; and all of it as one file."""

from __future__ import annotations

import tarfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.common.lock import LOCK
from experiments.validate_gpu import largest_batch, pytorch_baselines
from experiments.validate_gpu.flags import report
from experiments.validate_gpu.networks import MIB
from experiments.validate_gpu.record import Record
from experiments.validate_gpu.settings import Settings
from simulator import Machine
from simulator.files import write_json, write_text

FORMAT = "validation/1"
PAGE = 2**21  # a GPU gives memory in pages
HEAD = ("", "workload", "limit", "planner", "predicted ms", "measured ms", "error", "peak MiB", "measured", "limit")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the time and of the peak, mean absolute and worst; how many took more than their limit, and how many
    replays' arenas did by the device's own count, which is of whole pages."""
    time_errors = [abs(r["error"]) for r in rows if r.get("error") is not None]
    peaks = [abs(r["measured_peak"] / r["predicted_peak"] - 1) for r in rows]
    out: dict[str, Any] = {"count": len(rows)}
    for name, errors in (("time", time_errors), ("peak", peaks)):
        if errors:
            out[name] = {"mean_absolute": sum(errors) / len(errors), "worst": max(errors)}
    arenas = [r for r in rows if "device_bytes" in r]
    return out | {
        "over_limit": sum(r["measured_peak"] > r["limit"] for r in rows),
        "arenas_over_limit": sum(r["device_bytes"] > -(-r["limit"] // PAGE) * PAGE for r in arenas),
    }


def write(settings: Settings, machine: Machine | None, record: Record) -> None:
    """The files; pictures where there is Matplotlib."""
    out, gpu = record.out, torch.cuda.is_available()
    sums = {kind: summary(record.of(kind)) for kind in ("replay", "train", "graph")}
    write_json(out / "results.json", {
        "format": FORMAT, "settings": asdict(settings), "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if settings.device == "cuda" and gpu else "host", "flags": report(),
        "machine": machine.to_dict() if machine else None, "seconds": time.monotonic() - record.begin,
        "summary": sums, "rows": record.rows,
    }, indent=1)  # fmt: skip
    lines = [HEAD, ("---",) * len(HEAD)]
    for kind in ("replay", "train", "graph"):
        lines += [(
            kind, r["workload"], f"{r['fraction']:.0%}", r["planner"],
            f"{r['predicted_ns'] / 1e6:.2f}" if r["predicted_ns"] else "", f"{r['measured_ns'] / 1e6:.2f}",
            f"{r['error']:+.2%}" if r.get("error") is not None else "",
            *(f"{r[k] / MIB:.2f}" for k in ("predicted_peak", "measured_peak", "limit")),
        ) for r in record.of(kind)]  # fmt: skip
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
    for kind, found in sums.items():
        for what in ("time", "peak"):
            if what in found:
                e = found[what]
                said = f"{kind}, {what}: mean absolute error {e['mean_absolute']:.2%}, worst {e['worst']:.2%}"
                text += f"\n{said} over {found['count']} plans.\n"
    for r in record.of("train"):
        bits = "equal" if r["equal"] else "differ" if r["eager_equal"] else "differ, as those of two eager steps"
        text += (f"\ntrain {r['workload']} {r['fraction']:.0%} {r['planner']}: eager {r['eager_ns'] / 1e6:.2f} ms, "
                 f"the host takes {r['host_ns'] / 1e6:.2f} ms of the planned step, bits {bits}.\n")  # fmt: skip
    for r in record.of("graph"):
        text += (f"\ngraph {r['workload']} {r['fraction']:.0%} {r['planner']}: "
                 f"memory {r.get('footprint', 0) / MIB:.2f} MiB, "
                 f"eager {r['eager_ns'] / 1e6:.2f} ms, bits "
                 f"{'equal' if r['equal'] else 'differ'}.\n")  # fmt: skip
    failed = [r for r in record.rows if "failed" in r]
    text += "".join(f"\n- {r['kind']} {r.get('workload', '')} {r.get('fraction', '')} "
                    f"{r.get('planner', r.get('method', ''))}: {r['failed']}" for r in failed) + "\n"  # fmt: skip
    for kind, shown in (("compare", pytorch_baselines.table), ("largest", largest_batch.table)):
        if record.of(kind):
            text += "\n" + shown(record.of(kind))
    write_text(out / "table.md", text)
    try:
        from experiments.validate_gpu import plots
    except ImportError:
        return  # the next command on a computer with Matplotlib draws
    if record.of("replay"):
        plots.scatter(out / "predicted_vs_measured.png", record.of("replay"), record.of("train"))
    if record.of("largest"):
        plots.batches(out / "largest_batch.png", record.of("largest"))


def pack(out: Path) -> Path:
    """All of a directory as one file beside it."""
    packed = out.with_name(out.name + ".tar.gz")
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(out, out.name, filter=lambda member: None if member.name.endswith(LOCK) else member)
    return packed
