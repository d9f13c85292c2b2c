"""Places on the host, by hand."""

import pytest

from simulator.pool.pinned_places import Held


def test_a_place_is_held_from_the_copy_to_the_last_return():
    # Tensor 0 is copied at 2 and comes back by 4 and, from the same copy, by 6; 1 is away over the boundary.
    held = Held({0: [2], 1: [8]}, {0: [4, 6], 1: [1]}, [40, 10, 7], 10, 1)
    assert held.tensors == [0, 1]
    assert (held.intervals.lower.tolist(), held.intervals.upper.tolist()) == ([2, 8], [6, 11])
    assert (held.offsets, held.footprint) == ({0: 0, 1: 0}, 40)
    assert held.neighbours(0) == [1] and held.neighbours(1) == [0]


def test_what_is_held_at_once_lies_side_by_side():
    held = Held({0: [2], 1: [3]}, {0: [5], 1: [8]}, [40, 10], 10, 16)
    assert sorted(held.offsets.values()) in ([0, 16], [0, 48]) and held.footprint == 64
    assert not held.neighbours(0) and not held.neighbours(1)


def test_a_tensor_that_is_copied_twice_has_one_place():
    """Its longest time without a copy is free: from 9 to 1."""
    held = Held({0: [1, 6]}, {0: [3, 9]}, [5], 12, 1)
    assert (held.intervals.lower.tolist(), held.intervals.upper.tolist()) == ([1], [9])
    held = Held({0: [1, 8]}, {0: [3, 9]}, [5], 12, 1)  # from 3 to 8
    assert (held.intervals.lower.tolist(), held.intervals.upper.tolist()) == ([8], [15])


@pytest.mark.parametrize("nbytes", [[0], [7]])
def test_a_tensor_that_is_never_copied_anew_is_there_for_good(nbytes):
    held = Held({}, {0: [3]}, nbytes, 10, 1)
    assert (held.intervals.lower.tolist(), held.intervals.upper.tolist()) == ([0], [10])
    assert held.footprint == nbytes[0] and list(held.offsets) == [0] * (nbytes[0] > 0)


def test_nothing_is_held_where_nothing_is_swapped():
    held = Held({}, {}, [3], 1, 512)
    assert (held.tensors, held.offsets, held.footprint) == ([], {}, 0)
