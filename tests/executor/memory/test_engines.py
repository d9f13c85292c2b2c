"""Tests of the copy engines' streams: one pair per device, distinct from the step's other streams."""

import pytest
import torch

from executor.memory import engines

DEVICE = torch.device("cuda", 0)


def test_all_steps_of_a_device_have_one_pair_of_streams(double):
    all_engines = [engines.CudaEngines(DEVICE) for _ in range(40)]
    assert len({(e.d2h.cuda_stream, e.h2d.cuda_stream) for e in all_engines}) == 1
    assert len({0, engines.capture_stream(0).cuda_stream, *(s.cuda_stream for s in all_engines[0].streams)}) == 4


@pytest.mark.parametrize("taken", ["d2h", "h2d"])
def test_a_step_on_a_copy_stream_gets_other_copy_streams(double, taken):
    copy_engines = engines.CudaEngines(DEVICE)
    user_stream = getattr(copy_engines, taken)  # created by the user 32 streams later
    with torch.cuda.stream(user_stream):
        copy_engines.begin()
        assert copy_engines.streams == (copy_engines.d2h, copy_engines.h2d) == engines.CudaEngines(DEVICE).streams
    handles = {s.cuda_stream for s in (*copy_engines.streams, user_stream, engines.capture_stream(0))}
    assert len(handles) == 4
