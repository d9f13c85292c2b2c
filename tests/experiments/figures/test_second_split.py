"""Tests of the second split: what it states if some methods were left out."""

from __future__ import annotations

from typing import Any

from experiments.figures.second_split import SecondSplit


def row(**gaps: float) -> dict[str, Any]:
    """Returns a row in which methods with 200 calls have these overheads in %."""
    found = [{"line": line, "calls": 200, "seed": 0, "gap": gap, "plan_s": 0.1} for line, gap in gaps.items()]
    return {"network": "mixtral", "changes": {}, "seeds": [0], "methods": {}, "found": found}


def test_the_title_counts_networks_and_budgets_that_did_not_run_are_missing() -> None:
    rows = [row(dqn=1.0, policy_search=2.0), row(dqn=3.0, policy_search=2.0)]
    assert SecondSplit().template_values(rows)["below"] == {"calls": 1, "seconds": None}
    assert "on 1 of 2 networks" in SecondSplit().chart(rows).title


def test_without_the_rival_nothing_is_counted() -> None:
    rows = [row(dqn=1.0)]
    assert SecondSplit().template_values(rows)["below"] == {"calls": None, "seconds": None}
    assert "of 1 networks" not in SecondSplit().chart(rows).title
