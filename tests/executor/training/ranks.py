"""Four processes that train with DistributedDataParallel, eagerly and under a plan; a line of JSON says what came out.

python -m tests.executor.training.ranks FOLDER
"""

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch._functorch.partitioners  # what a first capture would import, in every process
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from executor import Captured, PlannedStep, capture
from simulator import Machine, Plan, Swap
from simulator.compiled.engine import simulate
from tests.tiny import MACHINE, PROGRAM

RANKS, STEPS = 4, 2
GPU = Machine("test", 2**34, 10**9, 10**9, 1000, flops_per_s={"float32": 10**13}, memory_bytes_per_s=4 * 10**11)
CASES: dict[str, dict[str, Any]] = {  # options of DistributedDataParallel, and of the case
    "four, micro-batches": {"bucket_cap_mb": 0.1, "parts": 2},
    "four, views and types": {"bucket_cap_mb": 0.1, "gradient_as_bucket_view": True, "half": True},
    "four, unused": {"bucket_cap_mb": 0.1, "find_unused_parameters": True},
    "two": {"bucket_cap_mb": 0.1, "two": True},
}


class Net(nn.Module):
    """Layers that are used in another order than that of their parameters, a buffer that rank 0 says."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(300, 10), nn.Linear(64, 300)
        self.norm, self.middle = nn.BatchNorm1d(300), nn.Linear(300, 300, dtype=torch.float64 if half else None)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(self.middle(x.to(self.middle.weight.dtype)).to(x.dtype).relu())


def planned(captured: Captured) -> PlannedStep:
    """Under a plan that swaps every activation that it can."""
    program = captured.program
    swaps = tuple(Swap(*gap) for gap in program.gaps(1024) if not program.tensors[gap.tensor].persistent)
    plan = Plan.of(program, swaps, limit=program.peak_bytes)
    return PlannedStep(captured, plan, GPU, simulate(program, plan, GPU, program.peak_bytes).peak_bytes)


def trained(rank: int, group: Any, ours: bool, parts: int = 1, half: bool = False, **options: Any) -> list[Tensor]:
    """Losses and state."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(half), process_group=group, **options)
    loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numbers = torch.Generator().manual_seed(rank)

    def batch() -> list[tuple[Tensor, Tensor]]:
        return [(torch.randn(16, 64, generator=numbers), torch.randint(0, 10, (16,), generator=numbers))
                for _ in range(parts)]  # fmt: skip

    steps = [batch() for _ in range(STEPS)]
    losses = []
    if ours:
        step = planned(capture(model, loss_fn, optimizer, steps[0][0], machine=GPU, accumulate=parts))
        losses = [step(*pairs) if parts > 1 else step(*pairs[0]) for pairs in steps]
    for pairs in () if ours else steps:
        total = torch.zeros(())
        for i, (x, y) in enumerate(pairs, 1):
            model.require_backward_grad_sync = i == parts  # as no_sync() does
            loss = loss_fn(model(x), y) / parts
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return [*losses, *(t.detach() for t in model.state_dict().values())]


def work(rank: int, folder: Path, said: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=RANKS)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = {}
    for name, case in CASES.items():
        options = {key: value for key, value in case.items() if key != "two"}
        group = pairs[rank // 2] if "two" in case else dist.group.WORLD
        eager, ours = (trained(rank, group, ours, **options) for ours in (False, True))
        found[name] = len(eager) == len(ours) and all(map(torch.equal, eager, ours))
    said.put(found)
    dist.destroy_process_group()


def main() -> None:
    context = multiprocessing.get_context("fork")  # PyTorch is imported once, and has no thread yet
    simulate(PROGRAM, Plan(), MACHINE, PROGRAM.peak_bytes)  # compiled code is loaded once, too
    said = context.SimpleQueue()
    ranks = [context.Process(target=work, args=(rank, Path(sys.argv[1]), said)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    equal = [said.get() for rank in ranks if rank.exitcode == 0]
    print(json.dumps({"ranks": len(equal), **{name: all(one[name] for one in equal) for name in CASES}}))


if __name__ == "__main__":
    main()
