"""What the tests of planners share."""

import pytest

from agents.search import rerun_search


@pytest.fixture
def few_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rerun search counts moves, not seconds: as many as programs of a few kernels need."""
    for name, count in {"FIRST": 4000, "KICK": 1000, "SETTLE": 500}.items():
        monkeypatch.setattr(rerun_search, name, count)
