"""What was measured: rows, each of which is a line of a file at once, and is there again when a command goes on."""

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

LATE, STOPPED = "no time left", "stopped: the time was over"  # why nothing was measured; the next command tries again
OF_FAILURE = ("failed", "again", "seconds")
GRACE = 5.0  # seconds that what has begun may take longer than there are
DEATHS = 2  # so often a process may end while it measures something; then that has failed


class Broken(RuntimeError):
    """CUDA has failed in this process, so that nothing more can be measured in it; the message is one sentence."""


class Record:
    """Rows of a directory, those of earlier commands included, and the time that is left.

    Args:
        device: PyTorch's name; of "cuda" it is looked after each failure whether CUDA still works.
    """

    def __init__(self, out: Path, seconds: float, device: str = "cpu"):
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.device, self.begin, self.seconds = out, device, time.monotonic(), seconds
        self._path, self._under_way = out / "measurements.jsonl", out / "under_way.json"
        self.rows = _lines(self._path)
        # What an earlier command had no time for, or no library, which another computer may have.
        self._late = [row for row in self.rows if row.get("failed") in (LATE, STOPPED) or "again" in row]
        for row in _lines(self._under_way):  # the process before this one ended there
            if row["deaths"] >= DEATHS:
                self.rows.append({**row, "failed": f"the process ended in it, {DEATHS} times"})
                self._under_way.unlink()
        self._write()

    def _write(self) -> None:
        self._path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, kind: str, **row: Any) -> None:
        """One row.

        Raises:
            Broken: it is a failure, and CUDA does not work any more.
        """
        self._under_way.unlink(missing_ok=True)
        new = {"kind": kind, **row}
        same = [old for old in self._late if all(new.get(k) == v for k, v in old.items() if k not in OF_FAILURE)]
        for old in same:
            self._late.remove(old)
            self.rows.remove(old)
            self._write()
        self.rows.append(new)
        with self._path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        head = " ".join(str(row[k]) for k in ("workload", "fraction", "planner", "method") if k in row)
        times = (f"{k.removesuffix('_ns')} {row[k] / 1e6:.2f} ms" for k in row if k.endswith("_ns") and row[k])
        what = row.get("failed") or ", ".join(times) or (f"batch {row['batch']}" if "batch" in row else "")
        left = f"[{time.monotonic() - self.begin:5.0f} s, {self.left():5.0f} s left]"
        print(f"{left} {kind} {head}: {what}", flush=True)
        if "failed" in row and self.device == "cuda" and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise Broken(f"CUDA works no more in this process: {line(error)}") from error

    def trying(self, kind: str, **row: Any) -> None:
        """What is measured next; should the process end in it, the next one knows."""
        same = [r["deaths"] for r in _lines(self._under_way) if r.items() >= {"kind": kind, **row}.items()]
        self._under_way.write_text(json.dumps({"kind": kind, **row, "deaths": 1 + sum(same)}) + "\n")

    def has(self, kind: str, **key: Any) -> bool:
        """Is there a row with these entries, measured or failed; one of an earlier command not for want of time?"""
        mine = (r for r in self.rows if r["kind"] == kind and all(r.get(k) == v for k, v in key.items()))
        return any(not any(r is late for late in self._late) for r in mine)

    def of(self, kind: str, **key: Any) -> list[dict[str, Any]]:
        """The rows of a kind, with these entries, that did not fail."""
        mine = (r for r in self.rows if r["kind"] == kind and "failed" not in r)
        return [r for r in mine if all(r.get(k) == v for k, v in key.items())]

    def left(self) -> float:
        """Seconds until the budget is spent."""
        return self.begin + self.seconds - time.monotonic()

    def measure(
        self, kind: str, key: dict[str, Any], function: Callable[[], dict[str, Any]], seconds: float = inf, **more: Any
    ) -> None:
        """Adds the row ``key | more | function()``, or one with the reason why it failed, unless there is a row.

        Args:
            key: entries by which a row is known.
            seconds: limit on the time, beside that of the record.
        """
        if self.has(kind, **key):
            return
        row = key | more
        seconds = min(seconds, self.left())
        if seconds <= 0:
            self.add(kind, **row, failed=LATE)
            return
        self.trying(kind, **row)
        try:
            with within(seconds + GRACE):
                found = function()
        except TimeUp:
            found = {"failed": STOPPED}
        except Exception as error:  # what breaks must not end the run
            found = {"failed": line(error)}
        self.add(kind, **row, **found)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Of a file that may not be there, or end within a line."""
    rows = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(text))
        except ValueError:
            break
    return rows
