"""Both forms of the simulator of several jobs, for the hand-computed tests."""

import pytest

from simulator.jobs import reference


@pytest.fixture(params=[reference.simulate_jobs], ids=["reference"])
def simulate_jobs(request):
    return request.param
