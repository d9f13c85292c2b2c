"""The largest batch that each method of pytorch_baselines.py trains under a cap on memory.

The cap is what eager needs for the network's own batch. Each method has its strongest setting: all blocks; of
torch.compile a budget of 0; ours has any of OURS' plans for the cap. A batch is trained if two steps run, the first of
which makes the optimizer's state. The search doubles the batch and then bisects (common/bisection.py). Choices
(reasons in experiments/README.md):

(a) On CUDA the cap is torch.cuda.set_per_process_memory_fraction, on what PyTorch reserves and libraries hold.
(b) Ours is planned for the cap over each of CAPS, the largest first, at its own batch's measured profile.
(c) On the CPU the storages seen by a dispatch mode are compared with the cap; for ours its ledger never exceeds it.
(d) Between two tries all memory goes back. What the time does not allow is said, with the best batch until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import agents
from agents.deadline import TimeUp, within
from executor import PlannedStep, StepError
from executor.capture.captured import Captured
from executor.capture.profile import ProfileError, measure, with_profile
from executor.capture.reach import CaptureError
from executor.memory.engines import line
from experiments.common.bisection import largest
from experiments.validate_gpu.networks import MIB, Network, build, cap_memory, give_back, host_bytes, made, own_batch
from experiments.validate_gpu.pytorch_baselines import CACHE, METHODS, OURS, Counter, Levels
from experiments.validate_gpu.record import LATE, Record
from simulator import Machine, OutOfMemory, Plan
from simulator.plan import PlanError

CAPS = (1.02, 1.1, 1.25)
STEPS = 2
MOST = 64  # times the network's own batch
PART = 32  # the answer is exact to this part of it


def search(
    workloads: Sequence[str], device: str, machine: Machine, record: Record, seconds: float,
    methods: Sequence[str] = METHODS,
) -> None:  # fmt: skip
    """Adds a row per workload and method: ``batch``, the largest; ``own_batch``, the network's; ``cap`` in bytes;
    ``too_large``, the smallest batch that was tried in vain, and ``reason``; or ``failed``. Each gets an equal share of
    the time that is left, and so of what those before it leave. What has a row is left out."""
    end = time.monotonic() + seconds
    todo = [(name, method) for name in workloads for method in methods
            if not record.has("largest", workload=name, method=method)]  # fmt: skip
    caps: dict[str, int | str] = {}
    for i, (name, method) in enumerate(todo):
        row: dict[str, Any] = {"workload": name, "method": method, "own_batch": own_batch(name)}
        until = time.monotonic() + (end - time.monotonic()) / (len(todo) - i)
        if until <= time.monotonic():
            record.add("largest", **row, failed=LATE)
            continue
        record.trying("largest", **row)
        tries = Tries(name, method, device, machine)
        try:
            with within(until - time.monotonic()):
                if name not in caps:
                    caps[name] = _need(name, device)
                tries.cap = int(caps[name])
                best = largest(tries.fits, own_batch(name), MOST * own_batch(name), PART)
            over = False
        except TimeUp:
            best, over = max((n for n, reason in tries.tried.items() if not reason), default=0), True
        except Exception as error:  # a method that breaks must not end the run; the row says so
            record.add("largest", **row, failed=line(error))
            continue
        finally:
            _uncap(device)
        row |= {"cap": tries.cap, "tries": len(tries.tried), "time_over": over}
        vain = min((n for n, reason in tries.tried.items() if reason), default=None)
        if vain is not None:
            row |= {"too_large": vain, "reason": tries.tried[vain]}
        if best:
            record.add("largest", **row, batch=best)
        else:
            record.add("largest", **row, failed=LATE if over else tries.tried[min(tries.tried)])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| workload | cap MiB | method | largest batch | of its own | too large |", "| --- " * 6 + "|"]
    lines += [
        f"| {r['workload']} | {r['cap'] / MIB:.2f} | {r['method']} | {'at least ' * r['time_over']}{r['batch']} | "
        f"{r['batch'] / r['own_batch']:.2f} | {r.get('too_large', '')} |"
        for r in sorted(rows, key=lambda r: (r["workload"], -r["batch"]))
    ]
    return "\n".join(lines) + "\n"


class Tries:
    """Batches of one method that were tried, with why they did not fit; "" for those that did."""

    def __init__(self, name: str, method: str, device: str, machine: Machine, cap: int = 0):
        self.name, self.method, self.device, self.machine, self.cap = name, method, device, machine, cap
        self.tried: dict[int, str] = {}

    def fits(self, batch: int) -> bool:
        """Does it train at this batch?"""
        give_back()
        if self.method in ("offload", "save_on_cpu") and self.device == "cuda":  # a host out of memory ends the process
            need = 2 * self.cap * batch // own_batch(self.name)  # PyTorch pins powers of two
            if need > host_bytes():
                self.tried[batch] = f"it may pin {need:,} bytes of the host's {host_bytes():,}"
                return False
        if self.device == "cuda":
            cap_memory(self.cap + torch.cuda.memory_reserved(), self.device)
        reason = self._reason(batch)
        _uncap(self.device)
        self.tried[batch] = reason
        return not reason

    def _reason(self, batch: int) -> str:
        try:
            network = build(self.name, self.device, batch=batch)
            if self.method == "ours":
                return self._ours(network)
            forward = None
            if self.method != "eager":
                levels = Levels(self.name, self.device, self.method, len(network.blocks))
                forward = levels.prepare(network, levels.count - 1)
            peak = _train(network, self.device, forward)
        except Exception as error:
            if not lacks_memory(error):
                raise
            return line(error)
        return f"its peak is {peak:,} bytes" if peak > self.cap else ""

    def _ours(self, network: Network) -> str:
        """Any planner's plan will do."""
        captured = network.captured(self.machine)
        program = with_profile(
            captured.program, measure(captured, self.device, self.machine.name, 1, cache=CACHE[self.device])
        )
        captured = replace(captured, program=program)
        reasons = []
        for planner, options in OURS.items():
            for part in CAPS if self.device == "cuda" else (1.0,):
                limit = int(self.cap / part)
                try:
                    plan = made(planner, program, **options).plan(program, self.machine, limit)
                    self._step(captured, plan, limit, network)
                except Exception as error:
                    if not lacks_memory(error):
                        raise
                    reasons.append(line(error))
                else:
                    return ""
                give_back()
        return "; ".join(dict.fromkeys(reasons))

    def _step(self, captured: Captured, plan: Plan, limit: int, network: Network) -> None:
        step = PlannedStep(captured, plan, self.machine, limit, graph=False)
        with step:
            for _ in range(STEPS):
                step(*network.batch)
        if self.device == "cuda":
            torch.cuda.synchronize()


def lacks_memory(error: BaseException | None) -> bool:
    """Is it, or what caused it, a lack of memory on the device or on the host?"""
    while error:
        words = str(error)
        if isinstance(error, (torch.OutOfMemoryError, agents.Infeasible, OutOfMemory)):
            return True
        if isinstance(error, PlanError) and "host" in words:
            return True
        if isinstance(error, (RuntimeError, CaptureError, ProfileError, StepError)) and (
            "unable to find an engine" in words or "out of memory" in words or "cannot be pinned" in words
        ):
            return True
        error = error.__cause__
    return False


def _train(network: Network, device: str, forward: Callable[[Tensor], Any] | None = None) -> int:
    """Two steps; the peak where it is counted (CPU)."""
    if device == "cuda":
        for _ in range(STEPS):
            network.step(forward)
        torch.cuda.synchronize()
        return 0
    with Counter() as counter:
        for _ in range(STEPS):
            network.step(forward)
    return counter.peak


def _need(name: str, device: str) -> int:
    """Bytes that eager takes at the network's own batch: reserved by PyTorch's allocator, or counted (CPU)."""
    if device != "cuda":
        return _train(build(name, device), device)
    _train(build(name, device), device)  # libraries take what they keep
    give_back()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    _train(build(name, device), device)
    return int(torch.cuda.max_memory_reserved() - before)


def _uncap(device: str) -> None:
    cap_memory(None, device)
    give_back()
