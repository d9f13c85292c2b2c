"""Tests of the copy engines' streams: one pair per device, which no other code can get."""

import torch

from executor.memory import engines

DEVICE = torch.device("cuda", 0)


def test_all_steps_of_a_device_have_one_pair_of_streams(double):
    all_engines = [engines.CudaEngines(DEVICE) for _ in range(40)]
    assert len({(e.d2h.cuda_stream, e.h2d.cuda_stream) for e in all_engines}) == 1
    assert len({0, engines.own_stream(0, "capture").cuda_stream, *(s.cuda_stream for s in all_engines[0].streams)}) == 4


def test_no_stream_of_a_users_thread_is_one_of_the_steps(double):
    """PyTorch hands out its streams in turn, so that the next 32 are all that a thread can have."""
    own = {engines.own_stream(0, role).cuda_stream for role in ("capture", "d2h", "h2d")}
    assert len(own) == 3 and own.isdisjoint(
        torch.cuda.Stream(0, priority=p).cuda_stream for p in (0, -1) for _ in range(64)
    )
