"""Record of measurements: rows appended to a JSONL file, so that a later command can continue."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import torch

from agents.deadline import TimeUp, within
from executor.memory.engines import line

# reasons after which a later command retries
LATE = "no time left"
STOPPED = "stopped: the time was over"
FAILURE_KEYS = ("failed", "again", "seconds")
GRACE = 5.0  # seconds that a running measurement may exceed the remaining time
DEATHS = 2  # a measurement has failed after this many processes died in it


class Broken(RuntimeError):
    """Raised if CUDA has failed in this process, so that no further measurement is possible in it."""


class Record:
    """Rows of a results folder, including those of earlier commands, and the time budget.

    Args:
        out: results folder.
        seconds: time budget.
        device: PyTorch device type; with "cuda", each failure is followed by a check that CUDA still works.
    """

    def __init__(self, out: Path, seconds: float, device: str = "cpu"):
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.device = device
        self.begin = time.monotonic()
        self.seconds = seconds
        self._path = out / "measurements.jsonl"
        self._under_way = out / "under_way.json"
        self.rows = _lines(self._path)
        # Rows to retry: an earlier command ran out of time or lacked a library that this host may have.
        self._late = [row for row in self.rows if row.get("failed") in (LATE, STOPPED) or "again" in row]
        for row in _lines(self._under_way):  # the previous process died in this measurement
            if row["deaths"] >= DEATHS:
                self.rows.append({**row, "failed": f"the process died in this measurement {DEATHS} times"})
                self._under_way.unlink()
        self._write()

    def _write(self) -> None:
        self._path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, kind: str, **row: Any) -> None:
        """Adds one row, replacing a row of an earlier command that was to be retried.

        Raises:
            Broken: if the row is a failure and CUDA no longer works.
        """
        self._under_way.unlink(missing_ok=True)
        new = {"kind": kind, **row}
        replaced = [old for old in self._late if all(new.get(k) == v for k, v in old.items() if k not in FAILURE_KEYS)]
        for old in replaced:
            self._late.remove(old)
            self.rows.remove(old)
            self._write()
        self.rows.append(new)
        with self._path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        head = " ".join(str(row[k]) for k in ("workload", "fraction", "planner", "method") if k in row)
        times = (f"{k.removesuffix('_ns')} {row[k] / 1e6:.2f} ms" for k in row if k.endswith("_ns") and row[k])
        outcome = row.get("failed") or ", ".join(times) or (f"batch {row['batch']}" if "batch" in row else "")
        prefix = f"[{time.monotonic() - self.begin:5.0f} s, {self.seconds_left():5.0f} s left]"
        print(f"{prefix} {kind} {head}: {outcome}", flush=True)
        if "failed" in row and self.device == "cuda" and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise Broken(f"CUDA no longer works in this process: {line(error)}") from error

    def start(self, kind: str, **row: Any) -> None:
        """Notes the measurement that starts now, so that the next process detects that this one died in it."""
        deaths = [r["deaths"] for r in _lines(self._under_way) if r.items() >= {"kind": kind, **row}.items()]
        self._under_way.write_text(json.dumps({"kind": kind, **row, "deaths": 1 + sum(deaths)}) + "\n")

    def has(self, kind: str, **key: Any) -> bool:
        """Returns whether a measured or failed row with these entries exists; rows to be retried do not count."""
        matches = (r for r in self.rows if r["kind"] == kind and all(r.get(k) == v for k, v in key.items()))
        return any(not any(r is late for late in self._late) for r in matches)

    def successful(self, kind: str, **key: Any) -> list[dict[str, Any]]:
        """Returns the successful rows of a kind with these entries."""
        successful = (r for r in self.rows if r["kind"] == kind and "failed" not in r)
        return [r for r in successful if all(r.get(k) == v for k, v in key.items())]

    def seconds_left(self) -> float:
        """Returns the remaining seconds of the budget."""
        return self.begin + self.seconds - time.monotonic()

    def measure(
        self, kind: str, key: dict[str, Any], function: Callable[[], dict[str, Any]], seconds: float = inf, **extra: Any
    ) -> None:
        """Adds the row ``key | more | function()``, or a failed row, unless a row with this key exists.

        Args:
            kind: kind of the row.
            key: entries that identify the row.
            function: the measurement; returns entries of the row.
            seconds: time limit in addition to the record's budget.
            extra: further entries.
        """
        if self.has(kind, **key):
            return
        row = key | extra
        seconds = min(seconds, self.seconds_left())
        if seconds <= 0:
            self.add(kind, **row, failed=LATE)
            return
        self.start(kind, **row)
        try:
            with within(seconds + GRACE):
                result = function()
        except TimeUp:
            result = {"failed": STOPPED}
        except Exception as error:  # a failed measurement must not stop the run
            result = {"failed": line(error)}
        self.add(kind, **row, **result)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a JSONL file that may be missing or truncated."""
    rows = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(text))
        except ValueError:
            break
    return rows
