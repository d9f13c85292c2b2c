"""Shared fixtures of the planner tests."""

from dataclasses import replace

import pytest

from agents.search import rerun_search


@pytest.fixture
def few_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits the rerun search by a number of moves that suffices for small programs, instead of by seconds."""
    few = replace(rerun_search.OPTIONS, start_moves=4000, kick_moves=1000, settle_moves=500)
    monkeypatch.setattr(rerun_search, "OPTIONS", few)
