"""The forward and backward of a compiled model as one Program, and their peak memory as Inductor allocates it.

Kernels are Inductor's launches in order. Tensors are the storages that they write. Tensors that the caller holds
(parameters, buffers, batch, optimizer state) are left out. Gradients that the backward returns, the model's outputs and
the gradients of these outputs count until the backward ends. The latter are born between forward and backward.

    forward launches … | between: reads outputs, writes their gradients | backward launches … | end: reads all of these

A backward launch that overwrites a dying input is two kernels: the first requires all inputs and frees the dying one,
the second writes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from executor.compiled.launches import Launch, Launches, is_view, repeatable, roofline_ns, sizes
from executor.training.issue_order import Item, Move
from simulator.machine import Machine
from simulator.program import Kernel, Program, Tensor
from simulator.schedule import Schedule

FORWARD = "forward:"
BACKWARD = "backward:"
UPDATE = "update_"  # prefix of the node that updates an input of the forward


class Call(NamedTuple):
    """A launch with its storages by their names in ``Joint.storages``; no launch: between the graphs, or at the end."""

    launch: Launch | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    reuses: tuple[tuple[str, str], ...] = ()  # (result, dying input whose memory it takes)


@dataclass(frozen=True)
class Joint:
    """Both graphs of a partition with their Inductor launches.

    Attributes:
        outputs: Number of the forward's outputs that are the model's.
        copies: Number of equal modules that the graphs are compiled for.
        gradients: Bytes of the gradients of one module's parameters.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    first: Launches  # of the forward
    second: Launches  # of the backward
    outputs: int
    copies: int = 1
    gradients: int = 0

    @cached_property
    def tangents(self) -> tuple[str, ...]:
        """Storages of the backward that hold the gradients of the model's outputs."""
        saved = {node.name for node in _returned(self.forward)}
        return tuple(s for s in _inputs(self.backward) if s not in saved and self.second.nbytes.get(s, 0))

    @cached_property
    def names(self) -> tuple[dict[str, str], dict[str, str]]:
        """Names in ``storages`` of the forward's and of the backward's storages that the caller does not hold.

        Saved tensors are storages of the forward.
        """
        inputs = _inputs(self.forward)
        backward_inputs = _inputs(self.backward)
        first = {s: FORWARD + s for s in _written(self.first) if s not in inputs}
        second = {s: BACKWARD + s for s in self.tangents}
        second |= {s: BACKWARD + s for s in _written(self.second) if s not in backward_inputs}
        saved = zip(_returned(self.forward), self.first.outputs, strict=True)
        return first, second | {node.name: first[s] for node, s in saved if s in first}

    @cached_property
    def storages(self) -> dict[str, int]:
        """Sizes in bytes of the planned storages by name: of the forward, tangents, of the backward."""
        first, second = self.names
        found = {name: self.first.nbytes[s] for s, name in first.items()}
        return found | {name: self.second.nbytes[s] for s, name in second.items() if name not in found}

    @cached_property
    def returned(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Storages of the model's outputs and of the gradients that the backward returns."""
        first, second = self.names
        return _renamed(self.first.outputs[: self.outputs], first), _renamed(self.second.outputs, second)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """Launches of the forward, the gap between the graphs, launches of the backward, and the end."""
        (outs, grads), tangents = self.returned, tuple(BACKWARD + s for s in self.tangents)
        first, second = (
            [
                Call(
                    launch,
                    _renamed(launch.reads, names),
                    _renamed(launch.writes, names),
                    tuple((names[new], names[old]) for new, old in launch.reuses if new in names and old in names),
                )
                for launch in graph.launches
            ]
            for graph, names in zip((self.first, self.second), self.names, strict=True)
        )
        end = Call(None, tuple(dict.fromkeys((*outs, *tangents, *grads))), ())
        return (*first, Call(None, outs, tangents), *second, end)

    @property
    def convolves(self) -> bool:
        """Whether a launch is a library's convolution."""
        return any(launch.kind == "conv" for launch in (*self.first.launches, *self.second.launches))

    @property
    def between(self) -> int:
        """Index of the kernel between forward and backward."""
        return len(self.first.launches)

    @cached_property
    def kernels(self) -> tuple[tuple[int, bool, frozenset[str]], ...]:
        """Per kernel of the Program: index in ``calls``, whether it only reads inputs, inputs that it overwrites."""
        found: list[tuple[int, bool, frozenset[str]]] = []
        live: set[str] = set()
        for k, call in enumerate(self.calls):
            overwritten = frozenset(self._reused_inputs(k, live).values() if k > self.between else ())
            found += [(k, True, overwritten)] if overwritten else []
            found.append((k, False, overwritten))
            live |= set(call.writes)
        return tuple(found)

    @cached_property
    def _last(self) -> dict[str, int]:
        """Index of the last of ``calls`` that uses each storage."""
        return {s: k for k, call in enumerate(self.calls) for s in (*call.reads, *call.writes)}

    def _reused_inputs(self, k: int, live: Container[str]) -> dict[str, str]:
        """Returns written storage -> input that dies here and whose memory it reuses, for results not yet held."""
        return {new: old for new, old in self.calls[k].reuses if self._last[old] == k and new not in live}

    @cached_property
    def movable(self) -> frozenset[str]:
        """Storages that can be copied to the host and back.

        Each holds one value, which fills it completely and is not a caller's tensor in another layout.
        """
        values: dict[str, list[Any]] = {}
        for prefix, graph, module in ((FORWARD, self.first, self.forward), (BACKWARD, self.second, self.backward)):
            node_values = {node.name: node.meta.get("val") for node in module.graph.nodes if node.op == "call_function"}
            for launch in graph.launches:
                for s in launch.writes:
                    stored = [node_values.get(v) for v in launch.values if graph.stored.get(v) == s]
                    values.setdefault(prefix + s, []).extend(stored or [None])
        single = {s: found[0] for s, found in values.items() if len(found) == 1 and isinstance(found[0], torch.Tensor)}
        return frozenset(s for s, x in single.items() if sizes([x.nbytes])[0] == self.storages.get(s))

    def program(self, machine: Machine, name: str = "compiled", swaps: bool = False) -> Program:
        """Returns the Program, with roofline durations; only forward kernels can be recomputed.

        Args:
            swaps: Whether tensors that the caller still references count as live throughout, so that no plan swaps
                them out.
            machine: Machine whose roofline gives the durations.
            name: Name of the program.

        Returns:
            The Program of forward and backward, durations in ns.
        """
        index = {storage: i for i, storage in enumerate(self.storages)}
        caller_reads = self.calls[-1].reads
        grads = {*self.returned[1], *self.calls[self.between].writes}
        tensors = [Tensor(s, n, "gradient" if s in grads else "activation") for s, n in self.storages.items()]
        # Kernels that read an updated parameter cannot be recomputed after its update.
        changed = {primal: len(tensors) + i for i, primal in enumerate(self.updated)}
        tensors += [Tensor(primal, 0, "parameter", True) for primal in self.updated]
        kernels = []
        born: set[str] = set()
        for k, reads_only, overwritten in self.kernels:
            launch, reads, writes, _ = self.calls[k]
            graph, phase = (self.first, "forward") if k < self.between else (self.second, "backward")
            # A launch that writes part of a shared storage may be its first writer and then reads nothing from it.
            inputs = dict.fromkeys(s for s in reads if s in born or s not in writes)
            if swaps and launch and phase == "backward":
                inputs |= dict.fromkeys(s for s in caller_reads if s in born and s not in writes)
            if reads_only:
                writes = ()
            born.update(writes)
            outputs = tuple(index[s] for s in writes)
            if launch is None or reads_only:
                read_indices = tuple(index[s] for s in inputs)
                kernels.append(
                    Kernel(
                        "inputs" if reads_only else "marker",
                        "other",
                        phase,
                        read_indices,
                        outputs,
                        0,
                        recomputable=False,
                    )
                )
                continue
            nbytes = sum(graph.nbytes.get(s, 0) for s in (*launch.reads, *launch.writes))
            kernels.append(
                Kernel(
                    launch.name,
                    launch.kind,
                    phase,
                    (
                        *(index[s] for s in inputs if s not in overwritten),
                        *(changed[s] for s in launch.reads if s in changed and phase == "forward"),
                    ),
                    (*outputs, *(changed[v.removeprefix(UPDATE)] for v in launch.values if v.startswith(UPDATE))),
                    roofline_ns(machine, launch.kind, launch.flops, nbytes, launch.dtype),
                    launch.workspace,
                    launch.flops,
                    nbytes,
                    phase == "forward" and self._is_recomputable(launch),
                )
            )
        return Program(name, tuple(tensors), tuple(kernels))

    def _is_recomputable(self, launch: Launch) -> bool:
        """Returns whether a forward launch can be recomputed: no random draw, no side effect, unmodified inputs."""
        planned = self.names[0].keys() & set(launch.writes)
        nodes = {node.name: node for node in self.forward.graph.nodes}
        roots = [nodes[v] for v in launch.values if self.first.stored[v] in planned and v in nodes]
        if {self.first.stored[root.name] for root in roots} != planned:
            return False
        launch_values = set(launch.values)
        seen = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            storage = self.first.stored.get(node.name)
            is_part = storage in launch.writes  # of a concatenation
            is_internal = node.name in launch_values or is_part or storage not in self._in_memory or is_view(node)
            if node.name in self._mutated or (is_internal and not repeatable(node)):
                return False
            stack += node.all_input_nodes if is_internal else ()
        return True

    @cached_property
    def updated(self) -> tuple[str, ...]:
        """Inputs of the forward that the backward updates."""
        values = (v for launch in self.second.launches for v in launch.values)
        return tuple(v.removeprefix(UPDATE) for v in values if v.startswith(UPDATE))

    @cached_property
    def _in_memory(self) -> frozenset[str]:
        """Storages that the forward receives or writes; other values are inlined into their readers."""
        return frozenset((*_inputs(self.forward), *_written(self.first)))

    @cached_property
    def _mutated(self) -> frozenset[str]:
        """Storages of the caller that the forward writes, such as batch-norm statistics."""
        return frozenset(s for s in _written(self.first) if s not in self.names[0])

    def between_bytes(self) -> int:
        """Returns the bytes of the model's outputs and of saved tensors, which live between forward and backward."""
        born = {s for call in self.calls[: self.between] for s in call.writes}
        return sum(self.storages[s] for s in born if self._last[s] >= self.between)

    def other_bytes(self, saved: int | None = None) -> int:
        """Returns the bytes that the other copies hold while one runs: what they saved, or their gradients.

        Args:
            saved: Bytes of one copy between forward and backward (default: ``between_bytes``).

        Returns:
            Bytes; 0 with a single copy.
        """
        return (self.copies - 1) * max(self.between_bytes() if saved is None else saved, self.gradients)

    def peak_bytes(self) -> int:
        """Returns the peak in bytes of Inductor's code, which is the Program's peak without in-place results.

        With several copies it includes what the others hold.

        A result that overwrites a dying input (``Launch.reuses``) allocates nothing. Storages that die in a
        ``Launch.joined`` kernel are freed after the last of consecutive joined kernels.
        """
        live: dict[str, int] = {}
        ledger = _Ledger()
        for k, (launch, _, writes, _) in enumerate(self.calls):
            reused = self._reused_inputs(k, live)
            new = [s for s in writes if s not in live]
            live |= {s: self.storages[s] for s in new}
            dying = [s for s in live if self._last[s] == k and s not in reused.values()]
            ledger.run(launch, sum(live[s] for s in new if s not in reused), sum(live.pop(s) for s in dying))
            for source in reused.values():
                live.pop(source)
        return ledger.peak + self.other_bytes()

    def planned_bytes(self, schedule: Schedule, items: Iterable[Item]) -> int:
        """Estimates ``peak_bytes`` of a plan's graphs.

        The estimate assumes that recomputed launches are fused and write in place as they did the first time.
        """
        names = [t.name for t in schedule.program.tensors]
        size = [b.nbytes for b in schedule.blocks]
        ledger = _Ledger()
        saved = 0
        overwritten: dict[str, int] = {}  # inputs that the next launch overwrites
        for item in items:
            step = item.step
            (k, reads_only, _) = self.kernels[item.step.kernel]
            ledger.move(item.before, size)
            blocks = {names[t]: block for t, block in step.uses.items()}
            dying = {s: block for s, block in blocks.items() if block in step.frees}
            if reads_only:
                overwritten = dying
            else:
                dead = dying if step.is_recomputation else dying | overwritten
                overwritten = overwritten if step.is_recomputation else {}  # recomputation may come in between
                launch, _, _, reuses = self.calls[k]
                reused = {blocks[w]: dead[r] for w, r in reuses if blocks.get(w) in step.allocates and r in dead}
                allocated = sum(size[b] for b in step.allocates if b not in reused)
                freed = {*step.frees, *dead.values()} - {*reused.values()}
                saved = ledger.in_use() if k == self.between else saved
                ledger.run(launch, allocated, sum(size[b] for b in freed))
            ledger.move(item.after, size)
        return ledger.peak + self.other_bytes(saved)


class _Ledger:
    """Tracks bytes in use and their peak; ``late`` bytes are freed when the current C++ call ends."""

    def __init__(self) -> None:
        self.now = self.peak = self.late = 0

    def run(self, launch: Launch | None, allocated: int, freed: int) -> None:
        """Accounts for a launch that allocates ``allocated`` and frees ``freed`` bytes besides its workspace."""
        joined, workspace = (launch.joined, launch.workspace) if launch else (False, 0)
        if not joined:
            self._end()
        self.now += allocated + workspace
        self.peak = max(self.peak, self.now)
        self.late += freed + workspace
        if not joined:
            self._end()

    def move(self, moves: Sequence[Move], size: list[int]) -> None:
        """Accounts for starts and ends of copies; each of them ends a joined C++ call."""
        if moves:
            self._end()
        self.now += sum(size[block] for kind, block in moves if kind == "in")
        self.now -= sum(size[block] for kind, block in moves if kind in ("reclaim", "release"))

    def in_use(self) -> int:
        """Returns the bytes in use between two calls."""
        self._end()
        return self.now

    def _end(self) -> None:
        self.now = self.now - self.late
        self.late = 0


def donatable(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> set[str]:
    """Returns names of saved values that are not inputs, outputs or gradients (AOTAutograd's donated buffers)."""

    def memory(nodes: Iterable[fx.Node]) -> dict[str, StorageWeakRef]:
        values = {n.name: n.meta.get("val") for n in nodes}
        return {n: StorageWeakRef(v.untyped_storage()) for n, v in values.items() if isinstance(v, torch.Tensor)}

    returned = [x if isinstance(x, fx.Node) else None for x in forward.graph.output_node().args[0]]
    others = (*forward.graph.find_nodes(op="placeholder"), *filter(None, returned[:outputs]), *_returned(backward))
    other_memory = set(memory(others).values())
    return {name for name, m in memory(filter(None, returned[outputs:])).items() if m not in other_memory}


def _returned(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.output_node().args[0] if isinstance(node, fx.Node)]


def _inputs(graph: fx.GraphModule) -> dict[str, None]:
    return dict.fromkeys(node.name for node in graph.graph.find_nodes(op="placeholder"))


def _written(graph: Launches) -> list[str]:
    return [s for launch in graph.launches for s in launch.writes]


def _renamed(storages: Iterable[str | None], names: dict[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names[s] for s in storages if s in names))
