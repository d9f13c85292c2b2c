"""Runs ``fit`` on the models of models.py and compares peaks with MemTracker and three planned steps with eager mode.

python -m tests.zoo                           # all models as a table; status 1 if one differs from eager mode
python -m tests.zoo GPT-2 ViT                 # selected models
"""

from __future__ import annotations

import copy
import gc
import sys
import time
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves

from executor import CaptureError, FitError, StepError, fit
from tests.zoo.models import MODELS, Parts

STEPS = 3
PART = 0.7
# Bytes that MemTracker counts in excess of the program, and the reason.
KNOWN = {
    "Mamba": (
        253_952,
        "under MemTracker, a dispatch mode, autograd sums gradients into new tensors instead of in place",
    ),
    "Swin": (-32_768, "the trace of a layer norm's gradient has other strides than the operator and makes one copy"),
}


class Row(NamedTuple):
    """Result of one model, sizes in bytes; ``refused`` is the error message if ``fit`` refused it."""

    name: str
    parameters: int = 0
    kernels: int = 0
    peak: int = 0
    tracked: int = 0
    moved: int = 0
    again: int = 0
    same: bool = False
    refused: str = ""
    wrong: str = ""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the program's peak equals MemTracker's, up to a known difference."""
        return self.tracked - self.peak in (0, KNOWN.get(self.name, (0,))[0])

    @property
    def good(self) -> bool:
        return not self.wrong and (bool(self.refused) or (self.same and self.agrees))

    def line(self) -> str:
        """Returns this result as a table row."""
        if self.refused or self.wrong:
            return f"| {self.name} | | | | | | {self.refused or 'WRONG: ' + self.wrong} |"
        more = self.tracked - self.peak
        tracked = f"{more:+,}" if more else "the same"
        tracked += f": {KNOWN[self.name][1]}" if more and self.name in KNOWN else ""
        tracked += "" if self.agrees else " DIFFERENT"
        moves = f"{self.moved / 2**20:.2f} MiB, {self.again} kernels"
        same = "the same" if self.same else "DIFFERENT"
        return (
            f"| {self.name} | {self.parameters:,} | {self.kernels:,} | {self.peak:,} | {tracked} | {moves} | {same} |"
        )


HEAD = """| model | parameters | kernels | peak, bytes | MemTracker | swapped, recomputed | losses, weights, state |
|---|--:|--:|--:|--:|--:|---|
"""


def eager(parts: Parts, batch: Any) -> Tensor:
    """Runs the step as a plain training loop."""
    model, loss_fn, optimizer, _ = parts
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def tracked(parts: Parts, batch: Any) -> tuple[Tensor, int]:
    """Returns a step's loss and its peak as MemTracker counts it."""
    tracker = MemTracker()
    model, _, optimizer, _ = parts
    tracker.track_external(model, optimizer, *(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)))
    with tracker:
        loss = eager(parts, batch)
    return loss.detach(), tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def look(name: str, planner: str = "lp_round") -> Row:
    """Runs all comparisons for one model."""
    started = time.perf_counter()
    torch.set_num_threads(1)  # with several, eager sums of index_put are not deterministic
    torch.manual_seed(0)
    ours: Parts = MODELS[name]()
    own = copy.deepcopy(ours[:3])  # together: the optimizer's parameters are the model's
    twin: Parts = (*own, ours[3])
    batches = [ours[3]() for _ in range(STEPS)]
    try:
        step = fit(*ours[:3], batches[0], PART, planner=planner)
        same = True
        peak = 0
        for i, batch in enumerate(batches):
            state = torch.get_rng_state()
            loss = step(*batch)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            theirs, peak = tracked(twin, batch) if i == 1 else (eager(twin, batch).detach(), peak)
            same = same and torch.equal(loss, theirs) and torch.equal(after, torch.get_rng_state())
    except (CaptureError, FitError, StepError) as error:
        return Row(name, refused=str(error), seconds=time.perf_counter() - started)
    for a, b in zip(ours[0].state_dict().values(), own[0].state_dict().values(), strict=True):
        same = same and torch.equal(a, b)
    for p, q in zip(ours[0].parameters(), own[0].parameters(), strict=True):
        state = ours[2].state.get(p, {})
        theirs = own[2].state.get(q, {})
        same = same and state.keys() == theirs.keys()
        same = same and all(torch.equal(v, theirs[k]) for k, v in state.items() if isinstance(v, Tensor))
    found = step.report()
    return Row(
        name,
        sum(p.numel() for p in ours[0].parameters()),
        len(step.program.kernels),
        step.program.peak_bytes,
        peak,
        sum(moved.out_bytes + moved.back_bytes for moved in found.swapped.values()),
        sum(again.kernels for again in found.rerun.values()),
        same,
        wrong="" if step.peak_bytes <= step.limit else "over its limit",
        seconds=time.perf_counter() - started,
    )


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    chosen = arguments or list(MODELS)
    if unknown := [name for name in chosen if name not in MODELS]:
        print(f"unknown model {unknown[0]!r}; choose from {', '.join(MODELS)}", file=sys.stderr)
        return 2
    rows = []
    warnings.simplefilter("ignore")  # warnings of models, and of libraries' memory in the first step
    print(HEAD, end="")
    for name in chosen:
        try:
            row = look(name)
        except Exception as error:  # a bug: users should only see refusals
            row = Row(name, wrong=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        print(row.line(), flush=True)
        print(f"{name}: {row.seconds:.1f} s", file=sys.stderr)
        rows.append(row)
        gc.collect()
    good = sum(row.good for row in rows)
    refused = sum(bool(row.refused) for row in rows)
    print(f"\n{good - refused} of {len(rows)} equal eager mode, {refused} refused, {len(rows) - good} wrong")
    return int(good < len(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
