"""Shared fixtures of the planner tests."""

import pytest

from agents.search import rerun_search


@pytest.fixture
def few_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits the rerun search by a number of moves that suffices for small programs, instead of by seconds."""
    for name, count in {"FIRST": 4000, "KICK": 1000, "SETTLE": 500}.items():
        monkeypatch.setattr(rerun_search, name, count)
