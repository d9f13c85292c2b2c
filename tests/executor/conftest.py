"""Shared fixtures of the executor tests: two tiny networks, each captured, planned and simulated once."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import agents
from executor import Captured, capture
from executor.replay import open_backend
from executor.replay.backend import Backend, BackendError
from simulator import Machine, Plan, Program, Timeline, simulate
from tests.executor.networks import CLASSES, images, sgd, small
from tests.fake_device.graphs import GraphDouble

# Copies are about as slow as the kernels of these networks: 5 us a launch, 1 us + 1 ns a byte.
GPU = Machine("test", 2**34, 10**9, 10**9, 1000, 1000, flops_per_s={"float32": 10**13}, memory_bytes_per_s=4 * 10**11)
Parts = tuple[nn.Module, nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Tiny:
    """A tiny network with its capture, a plan for less memory than it needs, and the timeline of that plan.

    Tests must not modify the tensors of ``captured``. A test that trains captures ``parts()`` instead.
    """

    captured: Captured
    machine: Machine
    limit: int
    plan: Plan
    timeline: Timeline
    _parts: Parts = field(repr=False)

    @property
    def program(self) -> Program:
        return self.captured.program

    def parts(self) -> Parts:
        """Returns fresh deep copies of the model, its loss function, its optimizer and a batch."""
        return copy.deepcopy(self._parts)


def make_tiny(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    make_batch: Callable[[], tuple[Tensor, Tensor]],
) -> Tiny:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make_model()
        batch = make_batch()
    parts = (model, nn.CrossEntropyLoss(), make_optimizer(model), batch)
    captured = capture(*parts, machine=GPU)
    program = captured.program
    planner = agents.make("capuchin", min_bytes=256)
    persistent = sum(t.nbytes for t in program.tensors if t.persistent)
    limit = (3 * program.peak_bytes + persistent) // 4
    plan = planner.plan(program, GPU, limit)
    return Tiny(captured, GPU, limit, plan, simulate(program, plan, GPU, limit), parts)


def mlp() -> nn.Module:
    """Returns three linear layers with dropout."""
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )


@pytest.fixture(scope="session")
def tiny_mlp() -> Tiny:
    """Returns three linear layers, SGD with momentum and 256 rows."""
    return make_tiny(mlp, sgd, lambda: (torch.randn(256, 16), torch.randint(CLASSES, (256,))))


@pytest.fixture(scope="session")
def tiny_conv() -> Tiny:
    """Returns a residual block (convolution, batch normalization, dropout), SGD with momentum and 16 x 16 images."""
    return make_tiny(small, sgd, images(16))


def gpu_backend(machine: Machine) -> Backend:
    """Opens the CUDA backend, or skips the test if the computer has no GPU."""
    pytest.importorskip("cupy")
    try:
        return open_backend("cuda", machine)
    except BackendError as error:
        pytest.skip(str(error))


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphDouble]:
    """Yields a test double of CUDA that captures graphs; verifies it at the end."""
    made = GraphDouble()
    made.install(monkeypatch)
    with made:
        yield made
    made.check()
