"""Compares published peaks of training on GPUs with our predictions and those of four other estimators.

    python -m experiments.measured.peaks [NETWORK …]

Prints one line per published run (of the given networks), then the mean errors of each estimator.
"""

from __future__ import annotations

import sys
from typing import Any

from experiments.measure.published.peaks import ESTIMATORS, means, points, row


def _print(row: dict[str, Any]) -> None:
    error = "    –" if row["error"] is None else f"{row['error']:+.1%}"
    estimates = " ".join("    –" if row[f"{e}_error"] is None else f"{row[f'{e}_error']:+.1%}" for e in ESTIMATORS)
    parts = " + ".join(f"{row[part] / 2**20:,.0f}" for part in ("tensors", "loop", "workspaces", "allocator"))
    verdict = "" if row["fits"] == row["ours_fits"] else "  WRONG VERDICT"
    print(
        f"{row['network']:27}{row['optimizer']:8}{row['batch']:5} {row['gpu']}  measured "
        f"{row['measured_bytes'] / 2**20:7,.0f}{'' if row['fits'] else ' (did not fit)'}  ours "
        f"{row['ours_bytes'] / 2**20:7,.0f} MiB = {parts}  {error}  | {estimates}{verdict}",
        flush=True,
    )


if __name__ == "__main__":
    table = []
    for point in points():
        if len(sys.argv) < 2 or point.network in sys.argv[1:]:  # a capture takes seconds
            table.append(row(point))
            _print(table[-1])
    for name, mean in means(table).items():
        summary = "no error" if mean["error"] is None else f"mean |error| {mean['error']:.2%} over {mean['of']} runs"
        print(f"{name}: {summary}; {mean['wrong']} of {mean['verdicts']} verdicts wrong")
