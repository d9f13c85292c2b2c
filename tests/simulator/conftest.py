"""Both implementations of the simulator, for the hand-computed tests."""

import pytest

from simulator import rules
from simulator.compiled import engine


@pytest.fixture(params=[rules.simulate, engine.simulate], ids=["reference", "engine"])
def simulate(request):
    return request.param
