"""Tests of the copy engines' streams: one pair per device, distinct from the step's other streams."""

import pytest
import torch

from executor.memory import engines

DEVICE = torch.device("cuda", 0)


def test_all_steps_of_a_device_have_one_pair_of_streams(double):
    made = [engines.CudaEngines(DEVICE) for _ in range(40)]
    assert len({(e.d2h.cuda_stream, e.h2d.cuda_stream) for e in made}) == 1
    assert len({0, engines.capture_stream(0).cuda_stream, *(s.cuda_stream for s in made[0].streams)}) == 4


@pytest.mark.parametrize("taken", ["d2h", "h2d"])
def test_a_step_on_a_copy_stream_gets_other_copy_streams(double, taken):
    made = engines.CudaEngines(DEVICE)
    users = getattr(made, taken)  # created by the user 32 streams later
    with torch.cuda.stream(users):
        made.begin()
        assert made.streams == (made.d2h, made.h2d) == engines.CudaEngines(DEVICE).streams
    handles = {s.cuda_stream for s in (*made.streams, users, engines.capture_stream(0))}
    assert len(handles) == 4
