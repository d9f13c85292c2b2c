"""Tests of the largest-batch search, by hand and with tiny networks on the CPU."""

import signal
from dataclasses import replace
from functools import partial

import pytest
import torch

import agents
from executor import StepError
from experiments.measure.gpu import largest_batch, stages
from experiments.measure.gpu.largest_batch import Tries, lacks_memory
from experiments.measure.gpu.stages import Run, largest
from experiments.measure.record import Record
from experiments.measure.settings import ON_HOST, Settings
from simulator import Machine
from simulator.plan import PlanError

H200 = Machine.load("h200")
RESNET = replace(ON_HOST, workloads=("tiny_resnet",), machine="h200")


@pytest.mark.parametrize(
    ("error", "lack"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (agents.Infeasible("too little"), True),
        (PlanError("the plan swaps 10 bytes; m has 5 on the host"), True),
        (RuntimeError("GET was unable to find an engine to execute this computation"), True),
        (PlanError("the plan is for another program"), False),
        (RuntimeError("device-side assert"), False),
        (StepError("kernel 3 failed"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(error, lack):
    assert lacks_memory(error) is lack
    try:
        try:
            raise error
        except Exception as cause:
            raise StepError("kernel 3 failed") from cause
    except StepError as outer:
        assert lacks_memory(outer) is lack


@pytest.mark.nightly
def test_batches_in_small(tmp_path, monkeypatch):
    """A method that needs less memory trains larger batches; ours stays within the cap by its ledger."""
    monkeypatch.setattr(largest_batch, "OURS", {"capuchin": {}})
    monkeypatch.setattr(stages, "Tries", partial(Tries, most=4, part=2))
    record = Record(tmp_path / "out", 600.0)
    largest(Run(replace(RESNET, methods=("eager", "checkpoint", "ours")), record))
    eager, checkpoint, ours = record.rows
    assert eager["batch"] == eager["own_batch"] == 8  # the cap equals its need at this batch
    assert 8 < checkpoint["batch"] < checkpoint["too_large"] and "its peak is" in checkpoint["reason"]
    assert (
        checkpoint["batch"] < ours["batch"] == 32 and "too_large" not in ours
    )  # largest batch of the search in this test
    assert {r["cap"] for r in record.rows} == {eager["cap"]} and not any(r["time_over"] for r in record.rows)


def test_without_time_what_was_found_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(largest_batch, "_eager_bytes", lambda name, device: 10**9)

    def fits(self, n):
        self.tried[n] = ""
        if n > 16:
            signal.raise_signal(signal.SIGALRM)  # the time is over
        return True

    monkeypatch.setattr(Tries, "fits", fits)
    record = Record(tmp_path / "out", 600.0)
    largest(Run(replace(RESNET, methods=("eager",)), record))
    assert record.rows[0]["time_over"] and record.rows[0]["batch"] == 32


def test_a_batch_for_which_there_is_no_plan_does_not_fit(monkeypatch):
    monkeypatch.setattr(largest_batch, "OURS", {"capuchin": {}})
    tries = Tries("tiny_resnet", "ours", "cpu", H200, 200_000)
    assert not tries.fits(8) and tries.tried[8].startswith("Infeasible")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_batches_on_a_gpu(tmp_path):
    record = Record(tmp_path / "out", 60.0)
    largest(Run(Settings(workloads=("resnet50",), methods=("eager", "checkpoint", "ours"), machine="h200"), record))
    eager, checkpoint, ours = record.rows
    assert checkpoint["batch"] > eager["batch"] and ours["batch"] > eager["batch"]
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
