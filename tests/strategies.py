"""Hypothesis strategies for programs, plans and machines that draw cases of ``random_cases`` and shrink.

``networks`` draws shapes that those seldom have.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from simulator import Kernel, Machine, Plan, Program, Swap, Tensor
from simulator.schedule import lower
from tests import random_cases

RANDOM: st.SearchStrategy[Random] = st.randoms(use_true_random=False)  # controlled by Hypothesis


def programs(max_kernels: int = 14) -> st.SearchStrategy[Program]:
    """Draws programs with persistent tensors, in-place and multi-output kernels, workspaces and zero-time kernels."""
    return RANDOM.map(lambda rng: random_cases.program_of(rng, max_kernels))


def plans(program: Program, reruns: bool = False) -> st.SearchStrategy[Plan]:
    """Draws plans that fit the program."""
    return RANDOM.map(lambda rng: random_cases.plan_of(rng, program, reruns))


def machines() -> st.SearchStrategy[Machine]:
    """Draws machines whose copies are about as slow as the kernels of ``programs``, with room on the host."""
    return RANDOM.map(lambda rng: replace(random_cases.machine_of(rng), host_bytes=Machine.host_bytes))


def with_algorithms(program: Program) -> st.SearchStrategy[tuple[Program, tuple[tuple[int, int], ...]]]:
    """Draws several algorithms for some kernels of the program, and a selection of them for a plan."""
    return RANDOM.map(lambda rng: random_cases.with_algorithms(rng, program))


def jobs_machines() -> st.SearchStrategy[Machine]:
    """Draws machines with switch costs and concurrent kernels that slow each other down."""
    return RANDOM.map(lambda rng: replace(random_cases.jobs_machine_of(rng), host_bytes=Machine.host_bytes))


KINDS = st.sampled_from(["conv", "norm", "activation", "pool", "matmul"])


@st.composite
def networks(draw: st.DrawFn) -> Program:
    """Draws forward chains, partly in place, whose activations the backward kernels read; recomputations overlap."""
    depth = draw(st.integers(2, 6))
    tensors = [Tensor("w", draw(st.integers(0, 20)), "parameter", True)]
    kernels: list[Kernel] = []

    def kernel(inputs: list[int], outputs: list[int], kind: str, phase: str = "forward") -> None:
        lasts = draw(st.integers(0, 20))
        workspace = draw(st.sampled_from([0, 0, 10]))
        kernels.append(Kernel(f"k{len(kernels)}", kind, phase, tuple(inputs), tuple(outputs), lasts, workspace))

    def new() -> int:
        tensors.append(Tensor(f"t{len(tensors)}", draw(st.integers(1, 30))))
        return len(tensors) - 1

    layers: list[int] = []
    for _ in range(depth):
        source = draw(st.sampled_from([0, *layers[-1:], *layers[-1:], *layers[-2:]]))
        layers.append(new())
        kernel([source, 0], [layers[-1], *([new()] if draw(st.booleans()) else [])], draw(KINDS))
        how = draw(st.sampled_from(["", "", "update", "fill"]))  # in place, with or without reading the old content
        if how:
            target = draw(st.sampled_from(layers[-2:]))
            kernel([target] if how == "update" else [], [target], "activation")
    for layer in reversed(layers):
        more = draw(st.sampled_from([[], layers[:1], layers[-1:]]))
        kernel([layer, *more], [new()], draw(KINDS), "backward")
    if draw(st.booleans()):
        kernel([0], [0], "optimizer", "optimizer")
    return Program("network", tuple(tensors), tuple(kernels))


@st.composite
def reachable_limits(draw: st.DrawFn, program: Program) -> int:
    """Draws a limit between the required bytes with every gap swapped and the peak."""
    everything = tuple(Swap(*gap) for gap in program.gaps())
    return draw(st.integers(lower(program, Plan(everything)).required_bytes, program.peak_bytes))
