"""Reference, compiled simulator and validator agree in random cases, and their results are those of before."""

import json

import pytest
from hypothesis import given, strategies as st

from tests import random_cases
from tests.random_cases import BLOCKS, Case, any_case, contending, difference, jobs_case, jobs_difference
from tests.strategies import RANDOM, jobs_cases, machines, networks, plans, programs

DIGESTS = json.loads(random_cases.DIGESTS.read_text())


def test_the_results_are_those_of_before():
    """Where a rule has changed on purpose: ``python -m tests.random_cases N --write``, and again with ``--jobs``."""
    assert random_cases.digest(map(any_case, range(BLOCKS["programs"]))) == DIGESTS["programs"][0]
    assert random_cases.digest(map(jobs_case, range(BLOCKS["jobs"]))) == DIGESTS["jobs"][0]


@pytest.mark.parametrize("first", range(0, 600, 200))
def test_nothing_differs(first):
    for seed in range(first, first + 200):
        assert difference(any_case(seed)) is None, f"seed {seed}"
    for seed in range(first // 4, first // 4 + 50):
        assert jobs_difference(jobs_case(seed)) is None, f"seed {seed}"


@given(st.data())
def test_nothing_differs_in_cases_that_shrink(data):
    program = data.draw(programs() | networks())
    plan, machine = data.draw(plans(program, reruns=True)), data.draw(machines())
    limit = random_cases.lower(program, plan).required_bytes + data.draw(st.integers(-1, 60))
    until = data.draw(st.sampled_from([None, None, 0, len(program.kernels) // 2]))
    case = Case(program, plan, machine, limit, until, data.draw(st.integers(1, 5)))
    assert difference(contending(data.draw(RANDOM), case) if data.draw(st.booleans()) else case) is None


@given(jobs_cases())
def test_nothing_differs_in_several_jobs_that_shrink(case):
    assert jobs_difference(case) is None
