"""A GPU's clocks, power and temperature while something is measured, as nvidia-smi says them.

with watched(device) as seen:
    ...                         # what is measured
seen                            # a summary; where there is no nvidia-smi, why there is none
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

PERIOD_MS = 200
# What slows a GPU down, in the bits of nvidia-smi's clocks_event_reasons.active (NVML's nvmlClocksEventReasons*).
REASONS = {0x2: "application clocks", 0x4: "power cap", 0x8: "hardware", 0x10: "sync boost", 0x20: "software thermal",
           0x40: "hardware thermal", 0x80: "hardware power brake", 0x100: "display clocks"}  # fmt: skip
# The last field has had two names; drivers know one or both.
FIELDS = tuple(("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", f"clocks_{name}_reasons.active")
               for name in ("event", "throttle"))  # fmt: skip


@contextmanager
def watched(device: str) -> Iterator[dict[str, Any]]:
    """Watches the first GPU while the block runs; yields a dictionary that is filled at the end (``summary``)."""
    seen: dict[str, Any] = {}
    if device != "cuda":
        seen["absent"] = "no GPU is used"
        yield seen
        return
    query = _query()
    if isinstance(query, str):
        seen["absent"] = query
        yield seen
        return
    mine, its = os.openpty()  # to a terminal it writes line by line
    lines: list[str] = []
    process = subprocess.Popen([*query, "-lms", str(PERIOD_MS)], stdout=its, stderr=subprocess.DEVNULL)
    os.close(its)
    reader = threading.Thread(target=_read, args=(mine, lines), daemon=True)
    reader.start()
    try:
        yield seen
    finally:
        process.terminate()
        process.wait()
        reader.join()
        seen |= summary(lines)


def _read(terminal: int, lines: list[str]) -> None:
    with open(terminal) as file, contextlib.suppress(OSError):  # so a terminal ends that nobody writes to
        lines.extend(file)


def _query() -> list[str] | str:
    """The command that this driver understands, or why there is none."""
    why, gpu = "", os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    for names in FIELDS:
        command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"nvidia-smi cannot be run: {error}"
        if done.returncode == 0:
            return command
        why = (done.stdout + done.stderr).strip().partition("\n")[0]
    return f"nvidia-smi says: {why}"


def summary(lines: Sequence[str]) -> dict[str, Any]:
    """Of lines "SM clock in MHz, memory clock in MHz, W, °C, reasons": how many there are, mean and least clock, the
    memory's least, mean power, the highest temperature, and the part of them that each reason to go slower has.

    What a GPU does not say is left out.
    """
    columns: dict[str, list[float]] = {"sm": [], "memory": [], "watt": [], "celsius": []}
    slowed: dict[str, int] = {}
    count = 0
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS[0]):
            continue  # cut off at the end
        count += 1
        for column, cell in zip(columns.values(), cells, strict=False):
            try:
                column.append(float(cell))
            except ValueError:
                pass  # [N/A]
        try:
            bits = int(cells[-1], 16)
        except ValueError:
            continue
        for bit, reason in REASONS.items():
            if bits & bit:
                slowed[reason] = slowed.get(reason, 0) + 1
    sm, memory, watt, celsius = columns.values()
    out: dict[str, Any] = {"samples": count, "slowed": {reason: n / count for reason, n in slowed.items()}}
    out |= {"sm_mhz": fmean(sm), "least_sm_mhz": min(sm)} if sm else {}
    out |= {"least_memory_mhz": min(memory)} if memory else {}
    out |= {"watt": fmean(watt)} if watt else {}
    return out | ({"celsius": max(celsius)} if celsius else {})
