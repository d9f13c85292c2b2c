"""Simulates what a user may change instead of, or besides, following the plan: the table *What if*.

Each change is a program or a plan derived from the captured step, so that no other capture is needed. Memory is that
of the tensors' simulated peak plus everything beside tensors; a step that PyTorch runs without a plan has its
allocator's overhead in proportion to its tensors. Time is simulated, relative to the step in unlimited memory.

Changes that a plan decides by itself (checkpoints, offloading) are not combined with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import agents
from agents.planner import Infeasible
from experiments.common import report
from experiments.plan.answer import Answer, Change
from experiments.plan.capture import Step
from simulator import simulate
from simulator.compiled.engine import Engine, rows_of
from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.pool.device_memory import planned_peak
from simulator.program import Kernel, Program
from simulator.timeline import Timeline

CHUNKS = 8  # of the logits; torchtune's default
SHARE = 0.1  # of the planning time, for each change together with a plan
TIGHTER = (1.0, 0.95, 0.9)  # shares of the limit at which a change is planned, until a plan packs into the memory
SAVED = 0.01  # smallest saving of memory that makes a change a row
BLOCK = 256  # optimizer states per 32-bit scale (bitsandbytes, torchao)
LEAST_STATES = 4096  # smaller tensors keep their type (bitsandbytes, torchao)
SAME = "same bits"
CHECKPOINT = "checkpoint every block"
EARLY = "optimizer in the backward pass"
EIGHT_BIT = "8-bit optimizer states"
CHUNKED = f"cross-entropy in {CHUNKS} chunks"
HALF = "half the batch, twice"
OFFLOAD = "offload all activations"
THIS_PLAN = "this plan"
EXACTNESS = {
    CHECKPOINT: SAME,
    EARLY: f"{SAME}; no clipping by the global norm",
    EIGHT_BIT: "rounds the states in each step",
    CHUNKED: "the same sums in another order",
    HALF: "the same sums in another order",
    OFFLOAD: SAME,
}
HOW = {
    CHECKPOINT: "torch.utils.checkpoint, or gradient checkpointing of transformers",
    EARLY: "fit(…, optimizer_in_backward=True)",
    EIGHT_BIT: "AdamW8bit of bitsandbytes or torchao",
    CHUNKED: "the fused linear cross-entropy of Liger Kernel",
    HALF: "fit(…, accumulate=2)",
    OFFLOAD: "torch.autograd.graph.save_on_cpu",
}
OF_BATCH_NORM = {CHECKPOINT: "its statistics move twice", HALF: "its statistics are per half"}


@dataclass(frozen=True)
class _Variant:
    """A changed step.

    Attributes:
        program: one iteration; of several micro-batches the last one, which makes the update.
        repeats: number of micro-batches.
        plan: how it runs; without decisions as it is.
        limit: memory for the plan's tensors in bytes; None: enough.
    """

    name: str
    program: Program
    repeats: int = 1
    plan: Plan = Plan()  # noqa: RUF009  # frozen
    limit: int | None = None


def changes(a: Answer, step: Step, half: Program | None, seconds: float, seed: int) -> list[Change]:
    """Returns the rows of the table: the step as it is, each change that saves memory, and the plan with each.

    Args:
        a: the answer; its plan, if any, is a row.
        step: the captured step.
        half: the step at half its batch; None: unknown.
        seconds: planning time of the command; each combined row takes SHARE of it.
        seed: seed of the planners.
    """
    original = _Variant(EARLY if step.in_backward else "as it is", a.program)
    variants = list(_variants(a, step, half))
    rows = [
        _change(a, original, EXACTNESS.get(original.name, SAME)),
        *(_change(a, variant, _exactness(variant)) for variant in variants),
    ]
    saving = {row.name for row in rows[1:] if row.nbytes <= (1 - SAVED) * rows[0].nbytes}
    rows = [row for row in rows if row.name in saving or row is rows[0]]
    needs_more = a.best is None or a.best.overhead > SAVED
    if a.best is not None and a.best.timeline is not None:
        nbytes = a.card_planned if a.card_planned is not None else a.best.timeline.peak_bytes
        rows.append(Change(THIS_PLAN, nbytes, a.best.overhead, SAME, True))
    for variant in variants if needs_more else ():
        # The order of the update may save nothing at the peak and everything under a plan.
        if (variant.name in saving or variant.name == EARLY) and not variant.plan.decisions:
            rows += _with_plan(a, variant, SHARE * seconds, seed)
    return rows


def _variants(a: Answer, step: Step, half: Program | None) -> Iterator[_Variant]:
    """Yields the changes that apply to the step."""
    program = a.program
    with_blocks = planned("checkpoint_blocks", program, a.machine)
    if with_blocks is not None:
        yield _Variant(CHECKPOINT, program, plan=with_blocks)
    if step.early is not None:
        yield _Variant(EARLY, step.early.program)
    if step.item_bytes:
        yield _Variant(EIGHT_BIT, with_8_bit_states(program, step.item_bytes))
    yield _Variant(CHUNKED, with_chunked_loss(program))
    if half is not None:
        yield _Variant(HALF, accumulating(half), 2)
    offload = offload_activations(program)
    if offload.decisions:
        required = Engine(program, a.machine, program.peak_bytes).score(rows_of(offload.decisions)).required_bytes
        yield _Variant(OFFLOAD, program, plan=offload, limit=max(required, min(a.limit, program.peak_bytes)))


def _change(a: Answer, variant: _Variant, exactness: str) -> Change:
    """Simulates a variant as PyTorch runs it."""
    limit = variant.limit or variant.program.peak_bytes
    timeline = simulate(variant.program, variant.plan, a.machine, limit)
    nbytes = timeline.peak_bytes
    if a.card is not None:
        nbytes += a.card.fixed + a.card.allocator * nbytes // max(a.card.tensors, 1)
    return Change(
        variant.name, nbytes, _overhead(a, variant, timeline), exactness, nbytes <= a.required_and_available[1]
    )


def _with_plan(a: Answer, variant: _Variant, seconds: float, seed: int) -> Iterator[Change]:
    """Yields the row of a variant under a plan of its own, if one is found; it fits if it packs into the memory."""
    if variant.program.peak_bytes <= a.limit:
        return  # needs no plan
    row: Change | None = None
    for share in TIGHTER:
        limit = int(share * a.limit)
        options = {"mode": a.mode, "seconds": seconds / len(TIGHTER), "seed": seed}
        plan = planned("best", variant.program, a.machine, limit, **options)
        if plan is None:
            break
        timeline = simulate(variant.program, plan, a.machine, limit)
        nbytes = timeline.peak_bytes
        fits = True
        if a.card is not None:
            nbytes, fits = planned_peak(a.card, timeline, a.machine.alignment, as_graph=not a.issue.obstacle)
        row = Change(f"a plan and {variant.name}", nbytes, _overhead(a, variant, timeline), _exactness(variant), fits)
        if fits:
            break
    if row is not None:
        yield row


def _exactness(variant: _Variant) -> str:
    """Returns how the trained bits of a variant differ from those of the step as it is."""
    has_norm = any("batch_norm" in kernel.name for kernel in variant.program.kernels)
    note = OF_BATCH_NORM.get(variant.name)
    return f"{EXACTNESS[variant.name]}; batch norm: {note}" if has_norm and note else EXACTNESS[variant.name]


def _overhead(a: Answer, variant: _Variant, timeline: Timeline) -> float:
    """Returns the time of all micro-batches and one update, over the ideal time of the step, minus 1."""
    update_ns = sum(kernel.duration_ns for kernel in variant.program.kernels if kernel.phase == "optimizer")
    total_ns = variant.repeats * timeline.iteration_ns - (variant.repeats - 1) * update_ns
    return total_ns / max(a.program.ideal_ns, 1) - 1


def trained_bytes(program: Program) -> int:
    """Returns the bytes of gradients and optimizer states if the step trains every weight, else 0."""
    weights = {t for t, tensor in enumerate(program.tensors) if tensor.kind == "parameter"}
    written = {t for kernel in program.kernels if kernel.phase == "optimizer" for t in kernel.outputs}
    if not weights or not weights <= written:
        return 0
    states = sum(tensor.nbytes for tensor in program.tensors if tensor.kind == "optimizer_state")
    return states + sum(program.tensors[t].nbytes for t in _gradients(program))


def planned(name: str, program: Program, machine: Machine, limit: int | None = None, **options: object) -> Plan | None:
    """Returns a planner's plan within a limit (default: the program's peak), or None without one."""
    planner = report.make(name, **options) if options else agents.make(name)
    try:
        return planner.plan(program, machine, limit or program.peak_bytes)
    except Infeasible:
        return None


# ------------------------------------------------------------------------------------ programs


def with_8_bit_states(program: Program, item_bytes: tuple[int, ...]) -> Program:
    """Returns the step with optimizer states of 8 bits and a 32-bit scale per BLOCK of them.

    Args:
        program: the step.
        item_bytes: bytes per element of each tensor; 0: unknown.
    """
    saved = [0] * len(program.tensors)
    for t, (tensor, item) in enumerate(zip(program.tensors, item_bytes, strict=True)):
        if tensor.kind == "optimizer_state" and item > 1 and tensor.nbytes >= LEAST_STATES * item:
            count = tensor.nbytes // item
            saved[t] = tensor.nbytes - count - 4 * -(-count // BLOCK)

    def updated(kernel: Kernel) -> Kernel:
        traffic = sum(saved[t] for t in (*kernel.inputs, *kernel.outputs))
        nbytes = max(kernel.bytes - traffic, 0)
        if not traffic or not kernel.bytes:
            return kernel
        return replace(kernel, bytes=nbytes, duration_ns=round(kernel.duration_ns * nbytes / kernel.bytes), variants=())

    return Program(
        program.name,
        tuple(replace(t, nbytes=t.nbytes - n) for t, n in zip(program.tensors, saved, strict=True)),
        tuple(map(updated, program.kernels)),
    )


def with_chunked_loss(program: Program, chunks: int = CHUNKS) -> Program:
    """Returns the step whose logits, and all tensors of their size in the loss, exist for one chunk at a time.

    Each chunk's gradients are computed with its loss, as fused linear cross-entropies do: no kernel runs twice, and the
    gradients of the last layer's weight and input exist from the first chunk.
    """
    logits = _logits(program)
    if not logits:
        return program
    tensors = (replace(t, nbytes=-(-t.nbytes // chunks)) if i in logits else t for i, t in enumerate(program.tensors))
    kernels = list(program.kernels)
    start = min(program.writes[t][0] for t in logits)
    products = [k for k in kernels if k.kind == "matmul" and not logits.isdisjoint(k.inputs)]
    for t in {t for kernel in products for t in kernel.outputs} - logits:
        for k in range(start, program.writes[t][0]):
            kernels[k] = replace(kernels[k], workspace=kernels[k].workspace + program.tensors[t].nbytes)
    return Program(program.name, tuple(tensors), tuple(kernels))


def _logits(program: Program) -> set[int]:
    """Returns the tensors of the size of the logits: those of log-softmax kernels, and their copies and casts."""

    def temporaries(kernel: Kernel) -> set[int]:
        return {t for t in kernel.accesses if not program.tensors[t].persistent}

    loss = [kernel for kernel in program.kernels if kernel.name.startswith("aten._log_softmax")]
    found = set[int]().union(*map(temporaries, loss))
    if not found:
        return found
    # A cast to a type of half the size, or to one position less, is at least a quarter of the largest.
    least = max(program.tensors[t].nbytes for t in found) // 4
    others = [kernel for kernel in program.kernels if kernel.kind != "matmul" and kernel.phase != "optimizer"]
    found = {t for t in found if program.tensors[t].nbytes >= least}
    count = 0
    while count < len(found):
        count = len(found)
        for accessed in map(temporaries, others):
            if not found.isdisjoint(accessed):
                found |= {t for t in accessed if program.tensors[t].nbytes >= least}
    return found


def accumulating(program: Program) -> Program:
    """Returns the last micro-batch of a step: gradients of the weights exist from its start and are added to."""
    last = _gradients(program)
    kernels = list(program.kernels)
    for t, k in last.items():
        kernel = kernels[k]
        new = program.tensors[t].nbytes  # the gradient of this micro-batch, before it is added
        kernels[k] = replace(kernel, inputs=(*kernel.inputs, t), workspace=kernel.workspace + new)
    tensors = (replace(tensor, persistent=True) if t in last else tensor for t, tensor in enumerate(program.tensors))
    return Program(program.name, tuple(tensors), tuple(kernels))


def _gradients(program: Program) -> dict[int, int]:
    """Returns the gradients that the update reads, each with the last kernel before it that writes it."""
    last: dict[int, int] = {}
    for kernel in program.kernels:
        for t in kernel.inputs if kernel.phase == "optimizer" else ():
            writers = [k for k in program.writes[t] if program.kernels[k].phase != "optimizer"]
            if writers and program.tensors[t].kind == "gradient":
                last[t] = writers[-1]
    return last


def offload_activations(program: Program) -> Plan:
    """Returns a plan that swaps every activation between its last use in the forward and its first in the backward."""
    phases = [kernel.phase for kernel in program.kernels]
    swaps = (
        Swap(*gap)
        for gap in program.gaps()
        if program.tensors[gap.tensor].kind == "activation"
        and gap.after < gap.before
        and (phases[gap.after], phases[gap.before]) == ("forward", "backward")
    )
    return Plan.of(program, tuple(swaps), "offload_activations")
