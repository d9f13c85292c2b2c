"""Both forms of the simulator of several jobs, for the hand-computed tests."""

import pytest

from simulator import rules
from simulator.jobs import engine


@pytest.fixture(params=[rules.simulate_jobs, engine.simulate_jobs], ids=["reference", "engine"])
def simulate_jobs(request):
    return request.param
