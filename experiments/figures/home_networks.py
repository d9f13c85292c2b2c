"""Shared parts of HOME's tables and figures: its networks at any batch size, time scales, and rivals.

"HOME: A Holistic GPU Memory Management Framework for Deep Learning" (IEEE TC 2022), section 4: six networks on CIFAR-10
on an RTX 2080 Ti. The limit is all memory that CUDA reports there (``Machine.memory_bytes``, 11,019 MiB).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from omegaconf import DictConfig

import agents
from experiments import figures
from experiments.common import cli
from experiments.common.bisection import largest
from experiments.common.report import Row
from experiments.plan.capture import Batches
from experiments.plotting.palette import Look, look
from simulator.compiled.engine import simulate
from simulator.kernel_times import scaled
from simulator.machine import Machine
from simulator.plan import Plan, Recompute, Swap
from simulator.program import Program


class Published(NamedTuple):
    """Tables 2 and 3 for one network; tuples are of PyTorch, Capuchin and HOME."""

    label: str
    batch: tuple[int, int, int]  # the largest
    throughput: tuple[int, int, int]  # images/s
    search_s: int  # of HOME
    evaluation_ms: float  # of HOME


NETWORKS = {name: Published(**entry) for name, entry in figures.published("home_table2").items()}  # by workload
ASPLOS = "Capuchin (ASPLOS)"
TABLE2 = {"PyTorch": 0, "Capuchin": 1, ASPLOS: 1, "HOME": 2}  # and columns of ``Published``
# The first planner that fits is used. As section 4.1 describes them, vDNN applies fixed rules, whether or not memory is
# short, and Capuchin decides layer by layer; ASPLOS is Capuchin by its own paper. SuperNeurons uses the fastest of its
# settings, although it drops all cheap outputs there.
METHODS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "PyTorch": (("none", {}),),
    "vDNN": (("vdnn_conv", {}), ("vdnn_all", {})),
    "SuperNeurons": (("superneurons", {}),),
    "Capuchin": (("capuchin", {"policy": "layers"}),),
    ASPLOS: (("capuchin", {}),),
    "HOME": (("home", {"jobs": 1}),),
}
LOOKS = {method: look(planners[0][0])._replace(label=method) for method, planners in METHODS.items()}
LOOKS["Capuchin"] = Look("Capuchin", "#13807d", "D")
SEARCH = ("particles", "iterations")  # HOME's options
CAPTURED = (64, 128)  # batch sizes; others are interpolated or extrapolated
MOST = 100_000  # batch size
_modeled_ns: dict[tuple[str, str], int] = {}  # kernels at the paper's largest batch, by network and machine


def batch_share(settings: DictConfig) -> float:
    """Returns ``settings.share``, relative to the largest unplanned batch; raises UsageError unless it is above 1."""
    value = cli.number(settings, "share")
    if value <= 1:
        raise cli.UsageError(f"figure.share: expected a number above 1, got {value}")
    return value


def search_options(settings: DictConfig) -> Row:
    """Returns HOME's options from a figure's settings."""
    return {key: cli.integer(settings, key, least=1) for key in SEARCH}


def first_plan(method: str, program: Program, machine: Machine, task: Row) -> Plan | None:
    """Returns the plan of the first planner of ``method`` that fits the machine's memory, or None.

    Args:
        method: Name of the method.
        program, machine: Program and machine to plan for.
        task: Contains HOME's options.
    """
    for name, defaults in METHODS[method]:
        options = {key: task[key] for key in SEARCH} if name == "home" else {}
        planner = agents.make(name, **defaults, **options)
        if (plan := figures.attempt(planner, program, machine, machine.memory_bytes)) is not None:
            return plan
    return None


def run_plan(program: Program, plan: Plan | None, machine: Machine) -> Row | None:
    """Simulates a plan within the machine's memory."""
    if plan is None:
        return None
    timeline = simulate(program, plan, machine, machine.memory_bytes)
    sizes = {kind: sum(program.tensors[d.tensor].nbytes for d in plan.of_kind(kind)) for kind in (Swap, Recompute)}
    return {
        "planner": plan.planner,
        "iteration_ns": timeline.iteration_ns,
        "overhead": timeline.overhead,
        "swapped_bytes": sizes[Swap],
        "recomputed_bytes": sizes[Recompute],
    }


def unplanned_batch(sizes: Sizes) -> int:
    """Returns the largest batch that fits without a plan."""
    return largest(lambda batch: sizes.at_batch(batch).peak_bytes <= sizes.machine.memory_bytes, CAPTURED[1], MOST)


class Sizes:
    """Program of a network at any batch size, interpolated from two captures: sizes, FLOPs and bytes are affine in it.

    Durations are the machine's roofline times one factor.

    Args:
        captures, batches: Programs at two batch sizes, the smaller one first.
        scale: Batch size and iteration time in seconds to which the roofline's time is scaled; None is factor 1.

    Raises:
        ValueError: The captures differ in more than numbers, or a number is not affine with an integer slope.
    """

    def __init__(
        self,
        captures: tuple[Program, Program],
        batches: tuple[int, int],
        machine: Machine,
        scale: tuple[int, float] | None = None,
    ) -> None:
        self._batches = Batches(batches[0], captures[0], batches[1], captures[1])
        step = batches[1] - batches[0]
        for small, large in zip(*map(_numbers, captures), strict=True):
            if (large - small) % step:
                raise ValueError(
                    f"batches {batches}: {small:,} and {large:,} differ by no multiple of {step}, so others cannot be "
                    "interpolated; capture two other batches"
                )
        self.machine = machine
        self.factor = 1.0
        if scale is not None:
            self.factor = scale[1] * 1e9 / self.at_batch(scale[0]).ideal_ns

    def at_batch(self, batch: int) -> Program:
        """Returns the program at one batch size."""
        return self.timed(self._batches.interpolated(batch))

    def timed(self, program: Program) -> Program:
        """Returns a program of the network with scaled roofline durations."""
        from executor.capture.durations import with_roofline  # imports PyTorch, which only a run needs

        program = with_roofline(program, self.machine)
        if self.factor != 1:
            program = with_roofline(program, self.machine, iteration_ns=round(program.ideal_ns * self.factor))
        return program


def _numbers(program: Program) -> list[int]:
    """Returns the numbers of a program that depend on the batch size."""
    return [t.nbytes for t in program.tensors] + [n for k in program.kernels for n in (k.flops, k.bytes)]


def program(network: str, machine: Machine, batch: int) -> Program:
    """Captures a network of the paper at a batch size."""
    return figures.program(network, machine, batch_size=batch, algorithms=False)


def modeled_program(network: str, machine: Machine, batch: int) -> Program:
    """Captures a network at a batch size, with the kernel-time model's durations times one factor per network.

    At the paper's largest batch of PyTorch, the throughput is the paper's.
    """
    paper = NETWORKS[network]
    captured = program(network, machine, batch)
    key = (network, machine.name)
    if key not in _modeled_ns:
        _modeled_ns[key] = program(network, machine, paper.batch[0]).ideal_ns
    factor = paper.batch[0] / paper.throughput[0] * 1e9 / _modeled_ns[key]
    return captured.with_durations(scaled([k.duration_ns for k in captured.kernels], round(captured.ideal_ns * factor)))


@lru_cache(maxsize=1)  # a process runs the tasks of one network consecutively
def _captured(network: str) -> tuple[Program, Program]:
    machine = Machine.load("rtx2080ti")  # any machine; durations are replaced
    return program(network, machine, CAPTURED[0]), program(network, machine, CAPTURED[1])


def sizes(network: str, machine: Machine) -> Sizes:
    """Returns a network at any batch size, scaled to PyTorch's throughput at its largest batch in the paper."""
    batch = NETWORKS[network].batch[0]
    throughput = NETWORKS[network].throughput[0]
    return Sizes(_captured(network), CAPTURED, machine, (batch, batch / throughput))
