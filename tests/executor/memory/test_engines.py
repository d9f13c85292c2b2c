"""Streams of the copy engines on a GPU: one pair a device, and never one that something else of the step is on."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from executor.memory import engines


@pytest.fixture
def pool(monkeypatch):
    """PyTorch's streams of a device: 32, handed out in turn."""
    handles = itertools.cycle(range(100, 132))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=next(handles)))
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    current = SimpleNamespace(cuda_stream=0, device=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(engines, "_PAIRS", {})
    engines.capture_stream.cache_clear()
    yield current
    engines.capture_stream.cache_clear()


def test_all_steps_of_a_device_have_one_pair_of_streams(pool):
    device = torch.device("cuda", 0)
    made = [engines.CudaEngines(device) for _ in range(40)]
    assert len({(e.d2h.cuda_stream, e.h2d.cuda_stream) for e in made}) == 1
    first = made[0]
    assert len({0, engines.capture_stream(0).cuda_stream, first.d2h.cuda_stream, first.h2d.cuda_stream}) == 4


@pytest.mark.parametrize("taken", ["d2h", "h2d"])
def test_a_step_on_the_stream_that_copies_had_gets_others_for_its_copies(pool, taken):
    made = engines.CudaEngines(torch.device("cuda", 0))
    pool.cuda_stream = getattr(made, taken).cuda_stream  # the user's, made 32 streams later
    made.begin()
    handles = {s.cuda_stream for s in made.streams}
    assert len(handles | {pool.cuda_stream, engines.capture_stream(0).cuda_stream}) == 4
    assert made.streams == (made.d2h, made.h2d) == engines.CudaEngines(torch.device("cuda", 0)).streams


def test_what_pytorch_has_on_the_host_is_copied_at_once_after_all_that_may_use_its_place(pool, monkeypatch):
    """An optimizer's number, the seed of an attention: neither stream has anything to do with it."""
    made, log = engines.CudaEngines(torch.device("cuda", 0)), []
    for stream in made.streams:
        stream.synchronize = lambda: log.append("synchronize")
    number, place = torch.tensor([3.0]), torch.zeros(1)
    made.borrow(number)
    made.copy_out(place, number, None)
    assert place.item() == 3.0 and log == ["synchronize"] * 2
    place.fill_(5.0)
    made.copy_in(number, place, None)
    assert number.item() == 5.0 and log == ["synchronize"] * 4
