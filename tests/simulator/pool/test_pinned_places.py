"""Places on the host, by hand."""

import pytest

from simulator.pool.pinned_places import Held


@pytest.mark.parametrize(("copies", "returns", "nbytes", "period", "alignment", "spans", "offsets", "footprint"), [
    # Tensor 0 is copied at 2 and comes back by 4 and, from the same copy, by 6; 1 is away over the boundary.
    ({0: [2], 1: [8]}, {0: [4, 6], 1: [1]}, [40, 10, 7], 10, 1, [(2, 6), (8, 11)], {0: 0, 1: 0}, 40),
    ({0: [2], 1: [3]}, {0: [5], 1: [8]}, [40, 10], 10, 16, [(2, 5), (3, 8)], {0: 0, 1: 48}, 64),  # side by side
    # Copied twice it has one place, of which its longest time without a copy is free: from 9 to 1; from 3 to 8.
    ({0: [1, 6]}, {0: [3, 9]}, [5], 12, 1, [(1, 9)], {0: 0}, 5),
    ({0: [1, 8]}, {0: [3, 9]}, [5], 12, 1, [(8, 15)], {0: 0}, 5),
    ({}, {0: [3]}, [7], 10, 1, [(0, 10)], {0: 0}, 7),  # never copied anew, it is there for good
    ({}, {0: [3]}, [0], 10, 1, [(0, 10)], {}, 0),
    ({}, {}, [3], 1, 512, [], {}, 0),
])  # fmt: skip
def test_a_place_is_held_while_its_copy_is_needed(
    copies, returns, nbytes, period, alignment, spans, offsets, footprint
):
    held = Held(copies, returns, nbytes, period, alignment)
    assert list(zip(held.intervals.lower.tolist(), held.intervals.upper.tolist(), strict=True)) == spans
    assert (held.tensors, held.offsets, held.footprint) == (list(range(len(spans))), offsets, footprint)
    shared = len(offsets) == 2 and len(set(offsets.values())) == 1
    assert all(held.neighbours(t) == [1 - t] * shared for t in offsets)
