"""Record of measurements: rows appended to a JSONL file at once, so that a later command can continue."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import torch

from executor.memory.engines import line
from simulator.deadline import TimeUp, within

# reasons after which a later command retries
LATE = "no time left"
STOPPED = "stopped: the time was over"
DEATHS = 2  # a measurement has failed after this many processes died in it


class Broken(RuntimeError):
    """Raised if CUDA has failed in this process, so that no further measurement is possible in it."""


class Record:
    """Rows of a results folder, including those of earlier commands, and the time budget.

    A row is a dictionary: entries that identify the measurement, then its results, or ``failed`` with the reason.

    Args:
        out: results folder.
        seconds: time budget.
        device: PyTorch device type; with "cuda", each failure is followed by a check that CUDA still works.
        name: name of the JSONL file without its suffix.
    """

    def __init__(self, out: Path, seconds: float, device: str = "cpu", name: str = "measurements"):
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.device = device
        self.begin = time.monotonic()
        self.seconds = seconds
        self._path = out / f"{name}.jsonl"
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

    def add(self, **row: Any) -> None:
        """Adds one row, replacing a row of an earlier command that was to be retried.

        Raises:
            Broken: if the row is a failure and CUDA no longer works.
        """
        self._under_way.unlink(missing_ok=True)
        results = ("failed", "again", "seconds")  # entries of a late row that do not identify its measurement
        replaced = [late for late in self._late if _matches(row, {k: v for k, v in late.items() if k not in results})]
        for old in replaced:
            self._late.remove(old)
            self.rows.remove(old)
            self._write()
        self.rows.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        elapsed = f"[{time.monotonic() - self.begin:5.0f} s, {self.seconds_left():5.0f} s left]"
        print(elapsed, format_row(row), flush=True)
        if "failed" in row and self.device == "cuda" and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise Broken(f"CUDA no longer works in this process; start another one: {line(error)}") from error

    def start(self, **row: Any) -> None:
        """Records the measurement that starts now, so that the next process detects that this one died in it."""
        deaths = [earlier["deaths"] for earlier in _lines(self._under_way) if _matches(earlier, row)]
        self._under_way.write_text(json.dumps({**row, "deaths": 1 + sum(deaths)}) + "\n")

    def has(self, **key: Any) -> bool:
        """Returns whether a measured or failed row with these entries exists; rows to be retried do not count."""
        return any(not any(row is late for late in self._late) for row in self.rows if _matches(row, key))

    def successful(self, **key: Any) -> list[dict[str, Any]]:
        """Returns the successful rows with these entries."""
        return [row for row in self.rows if "failed" not in row and _matches(row, key)]

    def seconds_left(self) -> float:
        """Returns the remaining seconds of the budget."""
        return self.begin + self.seconds - time.monotonic()

    def measure(
        self, key: dict[str, Any], function: Callable[[], dict[str, Any]], seconds: float = inf, **extra: Any
    ) -> None:
        """Adds the row ``key | extra | function()``, or a failed row, unless a row with this key exists.

        Args:
            key: entries that identify the row.
            function: the measurement; returns entries of the row.
            seconds: time limit in addition to the record's budget.
            extra: further entries.
        """
        if self.has(**key):
            return
        row = key | extra
        seconds = min(seconds, self.seconds_left())
        if seconds <= 0:
            self.add(**row, failed=LATE)
            return
        self.start(**row)
        try:
            with within(seconds + 5.0):  # a measurement may exceed the time a little rather than be lost
                result = function()
        except TimeUp:
            result = {"failed": STOPPED}
        except Exception as error:  # a failed measurement must not stop the run
            result = {"failed": line(error)}
        self.add(**row, **result)


def format_row(row: dict[str, Any]) -> str:
    """Returns a line of the log: what was measured, then the row's single values or the reason of its failure."""
    keys = ("kind", "section", "workload", "fraction", "planner", "method", "what")
    kind, *names = (key for key in keys if key in row)
    subject = " ".join(str(row[key]) for key in names)
    texts = [
        _format(key, value) for key, value in row.items() if key not in keys and not isinstance(value, dict | list)
    ]
    outcome = f"failed: {row['failed']}" if "failed" in row else ", ".join(texts)
    return f"{row[kind]:10} {subject}{': ' * bool(subject)}{outcome}"


def _format(key: str, value: object) -> str:
    if key.endswith("_ns") and isinstance(value, (int, float)):
        return f"{key.removesuffix('_ns')} {value / 1e6:,.2f} ms"
    if isinstance(value, float):
        return f"{key} {value:,.4g}"
    return f"{key} {value:,}" if type(value) is int else f"{key} {value}"


def _matches(row: dict[str, Any], key: dict[str, Any]) -> bool:
    """Returns whether a row has all entries of ``key``; a missing entry counts as None."""
    return all(row.get(name) == value for name, value in key.items())


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a JSONL file that may be missing or truncated."""
    rows = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(text))
        except ValueError:
            break
    return rows
