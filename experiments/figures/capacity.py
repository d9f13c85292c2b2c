"""Networks of any depth, of one capture: for the papers' tables of capacity."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby

from simulator.program import Kernel, Program, Tensor


class Deeper:
    """A network at any depth, of one capture: its program with one of a row of equal layers repeated.

    A layer is what touches the parameters ``layers.N.…``, with the kernels behind it in the forward pass and before it
    in the backward pass that touch none; a tensor is of the layer whose kernel accesses it first. A copy is linked with
    the copies around it as layer N is with its neighbours. What reads a tensor of layer N elsewhere (a marker at the
    end that keeps all gradients) reads those of all copies.

    Args:
        layer: N; the layers before and behind must be its equals.

    Raises:
        ValueError: they are not, or the layer's kernels are not in one piece in every phase.
    """

    def __init__(self, program: Program, layer: int) -> None:
        self._program, self._layer = program, layer
        self._kernels = _kernel_layers(program)
        self._tensors = [
            number(t.name) if t.persistent else self._kernels[uses[0]] if uses else None
            for t, uses in zip(program.tensors, program.accesses, strict=True)
        ]
        mine = self._of(layer)
        self._twin: dict[int, int] = {}  # a neighbour's tensor: the one of the layer in its place
        for beside in (layer - 1, layer + 1):
            theirs = self._of(beside)
            if [_plain(program.tensors[t]) for t in mine] != [_plain(program.tensors[t]) for t in theirs]:
                raise ValueError(f"{program.name}: layers {beside} and {layer} are not alike")
            self._twin.update(zip(theirs, mine, strict=True))
        self._pieces = [list(piece) for _, piece in groupby(range(len(program.kernels)), self._piece)]
        phases = [program.kernels[p[0]].phase for p in self._pieces if self._kernels[p[0]] == layer]
        if len(phases) != len(set(phases)):
            raise ValueError(f"{program.name}: the kernels of layer {layer} are not in one piece")

    def _of(self, layer: int) -> list[int]:
        return [t for t, owner in enumerate(self._tensors) if owner == layer]

    def _piece(self, k: int) -> tuple[bool, str]:
        return self._kernels[k] == self._layer, self._program.kernels[k].phase

    def by(self, more: int) -> Program:
        """The program with ``more`` layers; 0: as it was. Raises ValueError for less."""
        if more < 0:
            raise ValueError(f"more: expected at least 0, got {more}")
        program, layer = self._program, self._layer
        mine, tensors = self._of(layer), list(program.tensors)
        copies = [{t: t for t in mine}]
        for c in range(1, more + 1):
            copies.append({t: len(tensors) + i for i, t in enumerate(mine)})
            tensors += [replace(tensors[t], name=f"{tensors[t].name}+{c}") for t in mine]

        def linked(k: int, c: int) -> Kernel:
            def ids(some: tuple[int, ...]) -> tuple[int, ...]:
                return tuple(chain.from_iterable(self._ids(t, self._kernels[k], c, copies) for t in some))

            kernel = program.kernels[k]
            return replace(kernel, inputs=ids(kernel.inputs), outputs=ids(kernel.outputs))

        kernels: list[Kernel] = []
        for piece in self._pieces:
            inside = self._kernels[piece[0]] == layer
            order = range(more + 1) if inside else range(1)
            for c in reversed(order) if program.kernels[piece[0]].phase == "backward" else order:
                kernels += [linked(k, c) for k in piece]
        return Program(program.name, tuple(tensors), tuple(kernels))

    def _ids(self, t: int, layer: int | None, c: int, copies: Sequence[Mapping[int, int]]) -> Iterable[int]:
        """What tensor ``t`` is to a kernel of copy ``c`` of a layer."""
        owner, last = self._tensors[t], len(copies) - 1
        if layer == self._layer and owner is not None:
            if owner == layer:
                return (copies[c][t],)
            there = c + owner - layer
            return (copies[there][self._twin[t]],) if t in self._twin and 0 <= there <= last else (t,)
        if owner != self._layer:
            return (t,)
        if layer in (owner - 1, owner + 1):
            return (copies[0 if layer == owner - 1 else last][t],)
        return (copy[t] for copy in copies)


def number(name: str) -> int | None:
    """N of a parameter, buffer or optimizer state ``…layers.N.…``."""
    found = re.search(r"\blayers\.(\d+)\.", name)
    return int(found[1]) if found else None


def _kernel_layers(program: Program) -> list[int | None]:
    """The layer of every kernel."""
    numbers = [number(t.name) if t.persistent else None for t in program.tensors]
    touched = [{numbers[t] for t in kernel.accesses} - {None} for kernel in program.kernels]
    out: list[int | None] = [None] * len(touched)
    for backward in (False, True):
        now, n = None, len(touched)
        for k in reversed(range(n)) if backward else range(n):
            if (program.kernels[k].phase == "backward") == backward:
                now = max(touched[k]) if len(touched[k]) == 1 else now if not touched[k] else None
                out[k] = now
    return out


def _plain(tensor: Tensor) -> Tensor:
    return replace(tensor, name="")


def anonymous(program: Program) -> tuple[list[Tensor], list[Kernel]]:
    """What is left of a program when tensors have no names and are in the order of their first accesses: equal for
    programs that do the same."""
    order = list(dict.fromkeys(t for kernel in program.kernels for t in kernel.accesses))
    place = {t: i for i, t in enumerate(order)}
    return [_plain(program.tensors[t]) for t in order], [
        replace(k, inputs=tuple(sorted(place[t] for t in k.inputs)), outputs=tuple(sorted(place[t] for t in k.outputs)))
        for k in program.kernels
    ]
