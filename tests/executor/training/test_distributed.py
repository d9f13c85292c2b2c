"""DistributedDataParallel under a plan: equal to eager to the bit, on two and four processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from executor import CaptureError, capture
from simulator import Machine
from tests.executor.training.ranks import CASES, GPU, RANKS, Net

BATCH = torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64)


def test_all_ranks_are_eager_to_the_bit(tmp_path):
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "tests.executor.training.ranks", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=True)
    assert json.loads(done.stdout) == {"ranks": RANKS, **dict.fromkeys(CASES, True)}, done.stderr


@pytest.fixture
def alone(tmp_path):
    """A group of this process."""
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def captured(model: nn.Module, machine: Machine = GPU):
    return capture(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), BATCH, machine=machine)


def test_buckets_are_kernels_with_a_time_of_their_own(alone):
    program = captured(DistributedDataParallel(Net(False), bucket_cap_mb=0.1)).program
    names = [kernel.name.removeprefix("headroom.").removesuffix(".default") for kernel in program.kernels]
    assert names.count("bucket") == names.count("all_reduce_") == 2 and names.count("unbucket_") == 1
    assert not any(k.recomputable for k in program.kernels if k.name.startswith("headroom."))
    fast = Machine("fast", 2**34, 10**9, 10**9, 1000, peer_bytes_per_s=10**11)
    assert (fast.all_reduce_ns(10**6, 1), fast.all_reduce_ns(10**6, 4)) == (1000, 16_000)
    assert GPU.all_reduce_ns(10**6, 2) == 1_001_000  # over the host


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: m.register_comm_hook(None, lambda state, bucket: bucket), "communication hooks"),
    (lambda m: m.module.register_parameter("more", nn.Parameter(torch.ones(1))), "1 parameters of the Distributed"),
])  # fmt: skip
def test_what_the_kernels_do_not_do_is_refused(alone, change, message):
    model = DistributedDataParallel(Net(False))
    change(model)
    with pytest.raises(CaptureError, match=message):
        captured(model)
