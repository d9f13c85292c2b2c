"""Sentences and tables that describe the answer of ``experiments.plan``."""

from __future__ import annotations

import math

from agents.search.retimed import Spread, TimesError
from experiments.common import report
from experiments.plan.answer import Answer, Largest
from experiments.plan.capture import Step
from experiments.plan.what_if import HOW, THIS_PLAN, trained_bytes
from experiments.plotting.palette import label
from simulator.machine import Machine
from simulator.program import Kernel
from simulator.report import KINDS, MODEL_ITSELF

NEGLIGIBLE = 5e-5  # overhead treated as zero
ERROR = 0.029  # mean relative error of predicted device-memory peaks; printed by python -m experiments.measured.peaks


def verdict(a: Answer) -> str:
    """Summarizes the answer in one or two sentences."""
    needed, available = a.required_and_available
    size = a.size
    kind = "tensors" if a.card is None or a.memory is None else "device memory"
    beside = 0 if a.card is None or a.memory is None else a.card.beside
    if a.fits:
        share = 100 * needed // available if needed <= available else -(-100 * needed // available)
        if a.order.in_backward:
            end = " with the optimizer in the backward pass, as below."
        else:
            end = ". No action is needed."
        return f"It fits without a plan: {size(needed)} of {size(available)} of {kind} ({share}%){end}"
    without = f"Without a plan it takes {size(needed)} of {size(available)} of {kind} and does not fit."
    if a.best is None or a.best.plan is None:
        if a.least_bytes > a.limit:
            least = f"even a plan that evicts every unused tensor needs {size(a.least_bytes + beside)}"
        elif a.host is not None:
            least = (
                f"host memory is too small for a plan: {size(a.machine.host_bytes)} for swapped tensors, but "
                f"{size(a.host)} are needed (set machine.host_bytes={-(-a.host // 2**30)}GiB if the host has them)"
            )
        elif device_peaks := [b.card[0] for b in a.families if b.timeline is not None and b.card is not None]:
            places = "with fragmentation in PyTorch's allocator" if a.issue.obstacle else "at packed addresses"
            least = f"the best plan found needs {size(min(device_peaks))} {places}"
            least += f"; seconds={rounded_up(4 * a.budget):g} may find a better one"
        else:
            reached = a.reached_bytes if a.reached_bytes is not None and a.reached_bytes > a.limit else None
            hint = "" if reached is None else f" (smallest memory with a plan: {size(reached + beside)})"
            least = f"no plan was found{hint}; every plan needs at least {size(a.least_bytes + beside)}"
        return f"It does not fit. {without[:-1]}; {least}.{_smaller_batch_hint(a)}"
    overhead = a.best.overhead
    planned = a.card_planned if a.card_planned is not None and a.memory is not None else a.page.least_bytes
    # A plan that doubles the time is a poor alternative to a smaller batch.
    hint = _smaller_batch_hint(a) if overhead > max(1.0, a.largest.micro_overhead) else ""
    cost = f"{percent(max(overhead, 0.0))} time{format_range(a.spread)}"
    place = " and the optimizer in the backward pass" if a.order.in_backward else ""
    return (
        f"It fits with a plan. {without} With the plan{place} it takes {size(planned)} and {cost}; {_floor(a)}.{hint}"
    )


def update_order(a: Answer) -> list[str]:
    """Returns sentences about the place of the optimizer's update."""
    order = a.order
    if order.obstacle:
        lines = [f"The optimizer cannot run in the backward pass: {order.obstacle}."]
        if order.changed is not None:
            peak_bytes, overhead = order.changed
            plan = "" if overhead == float("inf") else f", and a first plan would cost {percent(overhead)}"
            before = a.size(a.program.peak_bytes)
            lines.append(f"With that change its tensors would peak at {a.size(peak_bytes)}, not {before}{plan}.")
        return lines
    if order.peak_bytes is None:
        return []
    at_end, early = map(a.size, order.peak_bytes)
    place = "in the backward pass (optimizer_in_backward=True)" if order.in_backward else "after the backward pass"
    text = f"The optimizer runs {place}. Peak without a plan: {at_end} after it, {early} in it."
    if order.overheads is not None:
        plans = ["infeasible" if cost == float("inf") else percent(cost) for cost in order.overheads]
        text += f" First plans, by which this order was chosen: {plans[0]} after it, {plans[1]} in it."
    return [f"{text} Both train the same bits."]


def _smaller_batch_hint(a: Answer) -> str:
    """Suggests a smaller batch."""
    if a.largest.micro is None:
        smaller = a.largest.batch is not None and 0 < a.largest.without < a.largest.batch
        return f" Without a plan a batch of {a.largest.without} fits." if smaller else ""
    return f" Gradient accumulation is likely the better option: {accumulation(a.largest)}."


def accumulation(largest: Largest) -> str:
    """Describes the micro-batches."""
    assert largest.micro is not None
    size, count = largest.micro
    return f"{count} batches of {size} with accumulated gradients fit and cost about {percent(largest.micro_overhead)}"


def card(a: Answer) -> list[str]:
    """Returns sentences about the estimated device memory beside the exact peak of the tensors."""
    peak = a.card
    size = a.size
    fraction_note = "The limit is a fraction of the tensors' peak and excludes other device memory."
    if peak is None:
        return [fraction_note]
    loop = "training loop and first optimizer step" + (" (CUDA operators use less)" if peak.loop < 0 else "")
    parts = [
        ("tensors", peak.tensors),
        (loop, peak.loop),
        ("library workspaces", peak.workspaces),
        ("CUDA context", peak.context),
        ("rounding and caching of PyTorch's allocator", peak.allocator),
    ]
    terms = []
    printed = 0
    for i, (name, _) in enumerate(parts):
        total = size.steps(sum(n for _, n in parts[: i + 1]))
        terms += [f"{name} {size.text(total - printed)}"] if total != printed else []
        printed = total
    is_recurrent = any(kernel.name.startswith("aten._cudnn_rnn") for kernel in a.program.kernels)
    precision = "at least this, as cuDNN may reserve more for recurrent layers" if is_recurrent else "exact"
    lines = [
        f"The peak of the tensors, {size(peak.tensors)}, is {precision}. Estimated device memory, "
        "as nvidia-smi reports it: "
    ]
    if a.page.without.modules:
        low, high = (size(round(peak.nbytes * (1 + sign * ERROR))) for sign in (-1, 1))
        lines[0] += f"{size(peak.nbytes)} ({low} to {high} by the mean error of {ERROR:.1%} on published peaks): "
    else:
        lines[0] += f"{size(peak.nbytes)}, plus training loop and libraries, which a program file does not cover: "
    lines[0] += f"{', '.join(terms)}."
    if a.memory is not None and peak.fits and peak.nbytes > a.memory:
        lines.append("It fits nevertheless: PyTorch frees cached blocks before it runs out of memory.")
    if a.card_planned is not None:
        remainder = "" if a.memory is None else f"; of {size(a.memory)}, {size(a.limit)} are left for tensors"
        lines.append(f"Estimated device memory under the plan: {size(a.card_planned)}{remainder}. {_placed(a)}")
    return lines if a.memory is not None else [*lines, fraction_note]


def _placed(a: Answer) -> str:
    """Describes how the executor issues the step and places its tensors."""
    if a.issue.obstacle:
        return f"The step runs kernel by kernel, in PyTorch's allocator: {a.issue.obstacle}."
    condition = " if the optimizer has fused=True (else the host reads its step count)" if a.issue.needs_fused else ""
    return f"The step runs as one CUDA graph at packed addresses{condition}."


def plan_summary(a: Answer) -> str:
    """Describes the recommended plan."""
    if a.best is None or a.best.plan is None:
        return "No plan is needed." if a.fits else "No plan was found."
    clauses = []
    swapped = a.page.swapped
    if swapped:
        kinds = _joined([_tensors(m.tensors, kind) for kind, m in swapped.items()])
        out, in_size = (a.size(sum(getattr(m, key) for m in swapped.values())) for key in ("out_bytes", "back_bytes"))
        clauses.append(f"swap {kinds}, {out}" + ("" if out == in_size else f" out and {in_size} in"))
    reruns = sum(r.kernels for r in a.page.rerun.values())
    if reruns:
        ns = sum(r.duration_ns for r in a.page.rerun.values())
        clauses.append(f"recompute {reruns} kernel{'s' if reruns != 1 else ''}, {report.duration(ns / 1e9)}")
    text = "; ".join([*clauses, percent(a.best.overhead)])
    return text[0].upper() + text[1:] + f"; {_floor(a)}."


def _floor(a: Answer) -> str:
    if a.best is not None and a.best.overhead < NEGLIGIBLE:
        return "no plan is faster"
    if a.floor is None or a.floor < NEGLIGIBLE:
        return "no floor above 0 was proven in the given time"
    return f"no plan can be below {percent(a.floor)}"


def gap_hints(a: Answer) -> list[str]:
    """Returns a sentence with hints if the plan is far above the floor."""
    if a.best is None or (excess := a.best.overhead - (a.floor or 0.0)) <= 0.03:
        return []
    hints = [
        f"seconds={rounded_up(4 * a.budget):g} (instead of {a.budget:g}) extends the searches and the floor computation"
    ]
    if a.mode != "joint":
        hints.append("mode=joint allows both swapping and recomputation")
    return [f"The optimal plan may cost up to {100 * excess:.1f} points less: {'; '.join(hints)}."]


def rounded_up(seconds: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(seconds, 1.0)))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= seconds - 1e-9)


def _joined(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _tensors(n: int, kind: str) -> str:
    name = "optimizer states" if kind == "optimizer_state" else KINDS[kind]
    return f"{n} {name if n != 1 else name[:-1]}"


def packed_summary(a: Answer) -> str:
    """Describes the memory of the plan with a fixed address for every block."""
    excess = a.page.packed_bytes - a.page.limit
    if a.memory is not None and a.card_planned is not None:
        excess = a.card_planned - a.memory
    overflow = f", {a.size(excess)} over the limit; lower the limit to run it as one CUDA graph" if excess > 0 else ""
    return f"With fixed addresses it needs {a.size(a.page.packed_bytes)}{overflow}"


def uncertainty(a: Answer) -> list[str]:
    """Returns sentences about the kernel times."""
    if a.times is None:
        return []
    if a.spread is None or a.times.error is None:
        return [a.times.note]
    return [a.times.note, spread_sentence(a.spread, a.times.error)]


def batches(a: Answer) -> list[str]:
    """Returns sentences about micro-batches and the largest batch."""
    largest = a.largest
    if largest.obstacle:
        return [f"The largest batch is unknown: {largest.obstacle}."]
    if largest.batch is None:
        return []
    lines = _most(largest, "batch")
    if largest.micro is not None:
        lines.append(f"Instead of a plan: {accumulation(largest)} (batch norm statistics are then per small batch).")
    return lines


def sequences(a: Answer) -> list[str]:
    """Returns sentences about the longest sequence."""
    longest = a.sequence
    if longest.obstacle:
        return [f"The longest sequence is unknown: {longest.obstacle}."]
    return [] if longest.batch is None else _most(longest, "sequence")


def _most(largest: Largest, what: str) -> list[str]:
    """Returns sentences about the largest batch or the longest sequence."""
    assert largest.batch is not None
    adjective, other = ("largest", 2 * largest.batch) if what == "batch" else ("longest", largest.batch // 2)
    source = (
        "checked by a capture" if largest.checked else f"predicted from captures at {largest.batch:,} and {other:,}"
    )
    count = f"at least {largest.without:,}" if largest.without == largest.most else f"{largest.without:,}"
    if largest.without:
        lines = [f"The {adjective} {what} without a plan is {count} ({source}); the given {what} is {largest.batch:,}."]
    else:
        lines = [f"Without a plan not even a {what} of {largest.least} fits; the given {what} is {largest.batch:,}."]
    if largest.planned is not None:
        bound = f"with an overhead of at most {percent(largest.most_overhead)}"
        if largest.planned > largest.without:
            lines.append(f"With a plan it is at least {largest.planned:,}, {bound} (by {label(largest.planner)}).")
        else:
            lines.append(f"No plan was found that makes a {adjective[:-3]}er {what} fit {bound}.")
        if largest.sufficient_s is not None:
            lines[-1] += f" The search stopped for lack of time; extend it with seconds={largest.sufficient_s:g}."
    return lines


def methods(a: Answer) -> tuple[list[str], list[list[str]]]:
    """Returns headers and cells of the table of methods; the last cell of a row marks the recommended method."""
    heads = ["methods", "best method", "overhead", "swapped", "recomputed", "peak", "plan time", ""]
    cells = []
    size = a.size
    for best in a.families:
        name = label(best.row["planner"]) if best.row else "–"
        skipped = [label(planner) for planner in best.skipped]
        skip_note = f"{skipped[0] if len(skipped) == 1 else len(skipped)} skipped for lack of time" if skipped else ""
        if best.timeline is None:
            reason = report.reason(best.row, size) if best.row else ""
            reason = "; ".join(filter(None, ["host memory is too small" if a.host is not None else reason, skip_note]))
            cells.append([best.family, name, "–", "–", "–", "–", report.duration(best.seconds), reason])
            continue
        swapped_bytes = sum(
            a.program.tensors[s.index].nbytes
            for s in best.timeline.spans
            if s.stream != "compute" and s.start_ns >= best.timeline.last_start_ns
        )
        recompute_ns = best.timeline.breakdown.recompute_ns
        unserved = "does not pack into the memory" if not a.issue.obstacle else "too fragmented for device memory"
        note = "recommended" if best is a.best else skip_note if best.served else unserved
        cells.append(
            [
                best.family,
                name,
                percent(best.timeline.overhead),
                size(swapped_bytes) if swapped_bytes else "–",
                report.duration(recompute_ns / 1e9) if recompute_ns else "–",
                size(best.timeline.peak_bytes),
                report.duration(best.seconds),
                note,
            ]
        )
    if a.floor is not None:
        cells.append(["certified lower bound", "", percent(a.floor), "", "", "", "", "the floor"])
    return heads, cells


def what_if(a: Answer) -> tuple[list[str], list[list[str]]]:
    """Returns headers and cells of the table of changes; the last cell marks the row of the recommended plan."""
    heads = ["what if", "tensors" if a.card is None else "device memory", "time", "fits", "training", ""]
    cells = [
        [
            change.name,
            a.size(change.nbytes),
            percent(change.overhead),
            "yes" if change.fits else "no",
            change.exactness,
            "recommended" if change.name == THIS_PLAN else "",
        ]
        for change in a.what_if
    ]
    return heads, cells


def how(a: Answer) -> str:
    """Returns a sentence that states how to make each change in the "What if" table."""
    named = [name for name in HOW if any(change.name.endswith(name) for change in a.what_if)]
    return f"How: {'; '.join(f'{name}: {HOW[name]}' for name in named)}."


def adapters(a: Answer) -> list[str]:
    """Returns a sentence about low-rank adapters if every weight trains and nothing in the table fits."""
    trained = trained_bytes(a.program)
    if a.fits or a.best is not None or not trained or any(change.fits for change in a.what_if):
        return []
    return [
        "Nothing above fits while every weight trains. Low-rank adapters (LoRA) freeze the weights and need next to "
        f"none of the {a.size(trained)} of gradients and optimizer states, but they train fewer parameters."
    ]


def format_range(spread: Spread | None) -> str:
    """Formats the range in parentheses, to be appended to a sentence; returns "" if the range is unknown."""
    if spread is None:
        return ""
    return f" ({_percent(spread.least)} to {_percent(spread.most)} within the error of the kernel times)"


def spread_sentence(spread: Spread, error: TimesError) -> str:
    """Returns a sentence on the plan's overhead under perturbed times."""
    parts = [f"{_percent(spread.low)} to {_percent(spread.high)} if single kernels deviate"]
    if error.step:
        fast = _percent(spread.fast)
        slow = _percent(spread.slow)
        parts = [f"{fast} if all kernels are {error.step:.0%} faster", f"{slow} if they are slower", *parts]
    return f"Overhead under perturbed kernel times: {', '.join(parts)} (5th to 95th percentile)."


def percent(part: float) -> str:
    """Formats an overhead with its sign: two decimals below 10 %, else one."""
    return f"{'+' if part >= 0 else '−'}{abs(part):.2%}" if abs(part) < 0.1 else f"{part:+.1%}".replace("-", "−")


def _percent(part: float) -> str:
    return percent(part) if part < float("inf") else "infeasible"


def slowest(step: Step, machine: Machine) -> tuple[list[str], list[list[str]]]:
    """Returns headers and rows of the table of the slowest kernels; equal kernels share a row."""
    program = step.program
    origins = step.origins
    types = step.types
    groups: dict[tuple[object, ...], list[int]] = {}
    for k, kernel in enumerate(program.kernels):
        kind = types[k] if types else ""
        groups.setdefault((kernel.name, kernel.duration_ns, kernel.flops, kernel.bytes, kind), []).append(k)
    order = sorted(groups.values(), key=lambda group: -len(group) * program.kernels[group[0]].duration_ns)
    rows = []
    for group in order[:12]:
        kernel = program.kernels[group[0]]
        kind = types[group[0]] if types else ""
        ns = len(group) * kernel.duration_ns
        time = f"{ns / 1e6:,.2f} ms" if ns >= 1e5 else f"{ns / 1e3:.1f} us"
        if not ns:
            break
        places = [] if origins is None else list(dict.fromkeys(origins.places[k].module or MODEL_ITSELF for k in group))
        module = "–" if not places else places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else "")
        name = kernel.name.removeprefix("aten.").removesuffix(".default")
        rate, bound = _bound(kernel, machine, kind)
        rows.append(
            [
                f"{len(group)} × {name}" if len(group) > 1 else name,
                module,
                time,
                f"{ns / max(program.ideal_ns, 1):.1%}",
                rate,
                kind or "–",
                bound,
            ]
        )
    return ["slowest kernels", "where", "time", "of the step", "rate", "type", "bound by"], rows


def _bound(kernel: Kernel, machine: Machine, kind: str) -> tuple[str, str]:
    """Returns the achieved rate in the bottleneck resource, and its name."""
    peak = machine.flops_per_s.get(kind or "float32", 0)
    seconds = kernel.duration_ns / 1e9
    moving = kernel.bytes / machine.memory_bytes_per_s
    computing = kernel.flops / peak if peak else 0.0
    if computing >= moving and computing:
        return f"{kernel.flops / seconds / 1e12:,.1f} TFLOP/s", "arithmetic"
    launch = machine.launch_ns if machine.kernel_times is None else machine.kernel_times.launch_ns
    rate = f"{kernel.bytes / seconds / 1e9:,.0f} GB/s"
    return rate, "memory" if moving >= launch / 1e9 else "the launch"
