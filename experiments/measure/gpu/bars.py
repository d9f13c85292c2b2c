"""Acceptance bounds of the GPU measurements: each limits an entry of a row, or the quotient of two, from one side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """One acceptance bound of a section.

    Attributes:
        section: section of the probe.
        row: word that the row's ``what`` ends with; "": any row with these entries.
        entry: measured entry of the row.
        sign: "<=" or ">=".
        bound: number to compare with.
        per: entry by which ``entry`` is divided; "": none.
    """

    section: str
    row: str
    entry: str
    sign: str
    bound: float
    per: str = ""

    def __str__(self) -> str:
        return f"{self.entry} {self.sign} {self.bound:g}{f' x {self.per}' if self.per else ''}"

    def holds_for(self, row: dict[str, Any]) -> bool:
        """Returns whether this bound applies to the row."""
        named = row.get("section") == self.section and str(row.get("what", "")).endswith(self.row)
        return named and all(row.get(key) is not None for key in (self.entry, self.per) if key)

    def value(self, row: dict[str, Any]) -> float:
        """Returns the number that is compared with the bound."""
        return float(row[self.entry] / row[self.per] if self.per else row[self.entry])

    def is_met(self, row: dict[str, Any]) -> bool:
        """Returns whether the row is within the bar."""
        value = self.value(row)
        return value <= self.bound if self.sign == "<=" else value >= self.bound


KERNELS = "kernel by kernel"
GRAPH = "as a graph"
BARS = (
    Bar("compile", "ours against the fastest other", "measured", "<=", 1.0, "fastest_other"),
    Bar("gpt2", KERNELS, "measured", "<=", 1.02, "predicted"),
    Bar("gpt2", KERNELS, "measured", "<=", 1.03, "eager_ns"),
    Bar("gpt2", GRAPH, "measured", "<=", 1.02, "predicted"),
    Bar("tight", "steps", "retries", "<=", 0),
    Bar("tight", "steps", "captures", ">=", 1),
    Bar("tight", "steps", "captures", "<=", 1),
    Bar("tight", "second shape", "retries", "<=", 0),
    Bar("llama", KERNELS, "measured", "<=", 1.03, "eager_ns"),
    Bar("llama", GRAPH, "measured", "<=", 1.02, "eager_ns"),
    Bar("rivals", "ours against the fastest other", "measured", "<=", 1.0, "fastest_other"),
    Bar("resnet", GRAPH, "measured", "<=", 1.03, "eager_graph_ns"),
    Bar("branches", "0 waiting: graph", "measured", ">=", 54.5e9),
    Bar("branches", "12 waiting: graph", "measured", "<=", 48.5e9),
    Bar("branches", "streams", "measured", ">=", 54.5e9),
    Bar("one_connection", "12 waiting: graph", "measured", ">=", 54e9),
    Bar("largest", "ours", "measured", ">=", 2.0, "eager_batch"),
)


def verdicts(row: dict[str, Any]) -> dict[str, Any]:
    """Returns ``bars``, one sentence per bar about a row, and ``missed``, those not met; {} if no bar is about it."""
    about = [bar for bar in BARS if "failed" not in row and bar.holds_for(row)]
    if not about:
        return {}
    texts = {bar: f"{bar}: {bar.value(row):.4g}" for bar in about}
    return {
        "bars": list(texts.values()),
        "missed": "; ".join(text for bar, text in texts.items() if not bar.is_met(row)),
    }
