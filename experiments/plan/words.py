"""Sentences and tables that describe the answer of ``experiments.plan``."""

from __future__ import annotations

import math

from agents.search.other_times import Spread, TimesError
from experiments.common import report
from experiments.plan.answer import Answer, Largest
from experiments.plan.capture import Step
from experiments.plotting.palette import label
from simulator.machine import Machine
from simulator.program import Kernel
from simulator.report import KINDS, MODEL_ITSELF

SLOWEST = 12  # maximum number of table rows
FAR = 0.03  # gap to the floor that warrants a hint
LITTLE = 5e-5  # overhead treated as zero
ERROR = 0.029  # mean relative error of predicted device-memory peaks; printed by python -m experiments.measured.peaks
GIB = 2**30
DEAR = 1.0  # overhead above which a smaller batch is suggested, too


def verdict(a: Answer) -> str:
    """Summarizes the answer in one or two sentences."""
    (need, there), size = a.compared, a.size
    what = "the peak is" if a.card is None or a.memory is None else "the estimated device memory is"
    if a.fits:
        part = 100 * need // there if need <= there else -(-100 * need // there)
        return f"It fits without a plan: {what} {size(need)}, {part}% of {size(there)}. No action is needed."
    more = size.text(max(size.steps(need) - size.steps(there), 0))
    over = f"{what} {size(need)}, {more} more than the available {size(there)}"
    if a.best is None or a.best.plan is None:
        if a.least_bytes > a.limit:
            least = f"even if every unused tensor is evicted, the step needs {size(a.least_bytes)}"
        elif a.host is not None:
            least = (
                f"host memory is too small for a plan: {size(a.machine.host_bytes)} for swapped tensors, but "
                f"{size(a.host)} are needed (set machine.host_bytes={-(-a.host // GIB)}GiB if the host has them)"
            )
        elif counted := [b.card[0] for b in a.families if b.timeline is not None and b.card is not None]:
            least = (
                "the tensors fit under a plan, but not with fragmentation in PyTorch's allocator: the best plan found "
                f"needs {size(min(counted))} of device memory; seconds={rounded_up(4 * a.budget):g} may find a "
                "better one"
            )
        else:
            reached = a.reached_bytes if a.reached_bytes is not None and a.reached_bytes > a.limit else None
            found = "" if reached is None else f" (smallest limit with a plan: {size(reached)})"
            least = f"no plan was found{found}; every plan needs at least {size(a.least_bytes)}"
        return f"It does not fit: {over}, and {least}.{_instead(a)}"
    costs = a.best.overhead
    cost = f"takes {percent(costs)[1:]} more time" if costs >= LITTLE else "costs no time"
    return f"It fits with a plan that {cost}{ranged(a.spread)}: {over}." + (
        _instead(a) if costs > max(DEAR, a.largest.micro_overhead) else ""
    )


def _instead(a: Answer) -> str:
    """Suggests a smaller batch."""
    if a.largest.micro is None:
        smaller = a.largest.own is not None and 0 < a.largest.without < a.largest.own
        return f" Without a plan a batch of {a.largest.without} fits." if smaller else ""
    return f" Gradient accumulation is likely the better option: {accumulation(a.largest)}."


def accumulation(found: Largest) -> str:
    """Describes the micro-batches."""
    assert found.micro is not None
    each, count = found.micro
    return f"{count} batches of {each} with accumulated gradients fit and cost about {percent(found.micro_overhead)}"


def card(a: Answer) -> list[str]:
    """Returns sentences about the estimated device memory beside the exact peak of the tensors."""
    found, size = a.card, a.size
    alone = "The limit is a fraction of the tensors' peak and excludes other device memory."
    if found is None:
        return [alone]
    loop = "training loop and first optimizer step" + (" (CUDA operators use less)" if found.loop < 0 else "")
    parts = [("tensors", found.tensors), (loop, found.loop),
             ("library workspaces", found.workspaces), ("CUDA context", found.context),
             ("rounding and caching of PyTorch's allocator", found.allocator)]  # fmt: skip
    said, before = [], 0
    for i, (name, _) in enumerate(parts):
        upto = size.steps(sum(n for _, n in parts[: i + 1]))
        said += [f"{name} {size.text(upto - before)}"] if upto != before else []
        before = upto
    lines = [
        f"The peak of the tensors, {size(found.tensors)}, is exact. Estimated device memory, as nvidia-smi reports it: "
    ]
    if a.page.without.modules:
        low, high = (size(round(found.nbytes * (1 + sign * ERROR))) for sign in (-1, 1))
        lines[0] += f"{size(found.nbytes)} ({low} to {high} by the mean error of {ERROR:.1%} on published peaks): "
    else:
        lines[0] += f"{size(found.nbytes)}, plus training loop and libraries, which a program file does not cover: "
    lines[0] += f"{', '.join(said)}."
    if a.memory is not None and found.fits and found.nbytes > a.memory:
        lines.append("It fits nevertheless: PyTorch frees cached blocks before it runs out of memory.")
    if a.card_planned is not None:
        left = "" if a.memory is None else f"; of {size(a.memory)}, {size(a.limit)} are left for tensors"
        lines.append(f"Estimated device memory under the plan: {size(a.card_planned)}{left}.")
    return lines if a.memory is not None else [*lines, alone]


def moves(a: Answer) -> str:
    """Describes the recommended plan."""
    if a.best is None or a.best.plan is None:
        return "No plan is needed." if a.fits else "No plan was found."
    said, swapped = [], a.page.swapped
    if swapped:
        kinds = _listed([_tensors(m.tensors, kind) for kind, m in swapped.items()])
        out, back = (a.size(sum(getattr(m, way) for m in swapped.values())) for way in ("out_bytes", "back_bytes"))
        said.append(f"swap {kinds}, {out}" + ("" if out == back else f" out and {back} in"))
    again = sum(r.kernels for r in a.page.rerun.values())
    if again:
        ns = sum(r.duration_ns for r in a.page.rerun.values())
        said.append(f"recompute {again} kernel{'s' if again != 1 else ''}, {report.duration(ns / 1e9)}")
    text = "; ".join([*said, percent(a.best.overhead)])
    return text[0].upper() + text[1:] + f"; {_floor(a)}."


def _floor(a: Answer) -> str:
    if a.best is not None and a.best.overhead < LITTLE:
        return "no plan is faster"
    if a.floor is None or a.floor < LITTLE:
        return "no floor above 0 was proven in the given time"
    return f"no plan can be below {percent(a.floor)}"


def gap(a: Answer) -> list[str]:
    """Returns a sentence with hints if the plan is far above the floor."""
    if a.best is None or (far := a.best.overhead - (a.floor or 0.0)) <= FAR:
        return []
    help_ = [
        f"seconds={rounded_up(4 * a.budget):g} (instead of {a.budget:g}) extends the searches and the floor computation"
    ]
    if a.mode != "joint":
        help_.append("mode=joint allows both swapping and recomputation")
    return [f"The optimal plan may cost up to {100 * far:.1f} points less: {'; '.join(help_)}."]


def rounded_up(seconds: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(seconds, 1.0)))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= seconds - 1e-9)


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _tensors(n: int, kind: str) -> str:
    name = "optimizer states" if kind == "optimizer_state" else KINDS[kind]
    return f"{n} {name if n != 1 else name[:-1]}"


def packed(a: Answer) -> str:
    """Describes the memory of the plan with a fixed address for every block."""
    over = a.page.packed_bytes - a.page.limit
    end = f", {a.size(over)} over the limit; lower the limit to run it as one CUDA graph" if over > 0 else ""
    return f"With fixed addresses it needs {a.size(a.page.packed_bytes)}{end}"


def uncertainty(a: Answer) -> list[str]:
    """Returns sentences about the kernel times."""
    if a.times is None:
        return []
    known = a.spread is not None and a.times.error is not None
    return [a.times.said, *([other_times(a.spread, a.times.error)] if known else [])]


def batches(a: Answer) -> list[str]:
    """Returns sentences about the largest batch."""
    found = a.largest
    if found.why:
        return [f"The largest batch is unknown: {found.why}."]
    if found.own is None:
        return []
    known = "checked by a capture" if found.checked else f"predicted from captures at {found.own} and {2 * found.own}"
    most = f"at least {found.without}" if found.without == found.most else f"{found.without}"
    if found.without:
        lines = [f"The largest batch without a plan is {most} ({known}); the given batch is {found.own}."]
    else:
        lines = [f"Without a plan not even a batch of 1 fits; the given batch is {found.own}."]
    if found.planned is not None:
        at = f"with an overhead of at most {percent(found.most_overhead)}"
        if found.planned > found.without:
            lines.append(f"With a plan it is at least {found.planned}, {at} (by {label(found.planner)}).")
        else:
            lines.append(f"No plan was found that makes a larger batch fit {at}.")
        if found.goes_on is not None:
            lines[-1] += f" The search stopped for lack of time; extend it with seconds={found.goes_on:g}."
    if found.micro is not None:
        lines.append(f"Instead of a plan: {accumulation(found)} (batch norm statistics are then per small batch).")
    return lines


def methods(a: Answer) -> tuple[list[str], list[list[str]]]:
    """Returns headers and cells of the table of methods; the last cell of a row marks the recommended method."""
    heads = ["methods", "best method", "overhead", "swapped", "recomputed", "peak", "plan time", ""]
    cells, size = [], a.size
    for best in a.families:
        name = label(best.row["planner"]) if best.row else "–"
        more = [label(one) for one in best.left_out]
        out = f"{more[0] if len(more) == 1 else len(more)} skipped for lack of time" if more else ""
        if best.timeline is None:
            why = report.reason(best.row, size) if best.row else ""
            why = "; ".join(filter(None, ["host memory is too small" if a.host is not None else why, out]))
            cells.append([best.family, name, "–", "–", "–", "–", report.duration(best.seconds), why])
            continue
        moved = sum(
            a.program.tensors[s.index].nbytes
            for s in best.timeline.spans
            if s.stream != "compute" and s.start_ns >= best.timeline.last_start_ns
        )
        again = best.timeline.breakdown.recompute_ns
        said = "recommended" if best is a.best else out if best.served else "too fragmented for device memory"
        cells.append([
            best.family, name, percent(best.timeline.overhead), size(moved) if moved else "–",
            report.duration(again / 1e9) if again else "–", size(best.timeline.peak_bytes),
            report.duration(best.seconds), said,
        ])  # fmt: skip
    if a.floor is not None:
        cells.append(["certified lower bound", "", percent(a.floor), "", "", "", "", "the floor"])
    return heads, cells


def ranged(spread: Spread | None) -> str:
    """Formats the range in parentheses, to be appended to a sentence; returns "" if the range is unknown."""
    if spread is None:
        return ""
    return f" ({_percent(spread.least)} to {_percent(spread.most)} within the error of the kernel times)"


def other_times(spread: Spread, error: TimesError) -> str:
    """Returns a sentence on the plan's overhead under perturbed times."""
    parts = [f"{_percent(spread.low)} to {_percent(spread.high)} if single kernels deviate"]
    if error.step:
        fast, slow = _percent(spread.fast), _percent(spread.slow)
        parts = [f"{fast} if all kernels are {error.step:.0%} faster", f"{slow} if they are slower", *parts]
    return f"Overhead under perturbed kernel times: {', '.join(parts)} (5th to 95th percentile)."


def percent(part: float) -> str:
    """Formats an overhead with its sign: two decimals below 10 %, else one."""
    return f"{'+' if part >= 0 else '−'}{abs(part):.2%}" if abs(part) < 0.1 else f"{part:+.1%}".replace("-", "−")


def _percent(part: float) -> str:
    return percent(part) if part < float("inf") else "infeasible"


def slowest(step: Step, machine: Machine) -> tuple[list[str], list[list[str]]]:
    """Returns headers and rows of the table of the slowest kernels; equal kernels share a row."""
    program, origins, types = step.program, step.origins, step.types
    groups: dict[tuple[object, ...], list[int]] = {}
    for k, kernel in enumerate(program.kernels):
        kind = types[k] if types else ""
        groups.setdefault((kernel.name, kernel.duration_ns, kernel.flops, kernel.bytes, kind), []).append(k)
    order = sorted(groups.values(), key=lambda group: -len(group) * program.kernels[group[0]].duration_ns)
    rows = []
    for group in order[:SLOWEST]:
        kernel, kind = program.kernels[group[0]], types[group[0]] if types else ""
        ns = len(group) * kernel.duration_ns
        time = f"{ns / 1e6:,.2f} ms" if ns >= 1e5 else f"{ns / 1e3:.1f} us"
        if not ns:
            break
        places = [] if origins is None else list(dict.fromkeys(origins.places[k].module or MODEL_ITSELF for k in group))
        where = "–" if not places else places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else "")
        name = kernel.name.removeprefix("aten.").removesuffix(".default")
        rate, bound = _bound(kernel, machine, kind)
        rows.append([
            f"{len(group)} × {name}" if len(group) > 1 else name, where, time,
            f"{ns / max(program.ideal_ns, 1):.1%}", rate, kind or "–", bound,
        ])  # fmt: skip
    return ["slowest kernels", "where", "time", "of the step", "rate", "type", "bound by"], rows


def _bound(kernel: Kernel, machine: Machine, kind: str) -> tuple[str, str]:
    """Returns the achieved rate in the bottleneck resource, and its name."""
    peak = machine.flops_per_s.get(kind or "float32", 0)
    seconds, moving = kernel.duration_ns / 1e9, kernel.bytes / machine.memory_bytes_per_s
    computing = kernel.flops / peak if peak else 0.0
    if computing >= moving and computing:
        return f"{kernel.flops / seconds / 1e12:,.1f} TFLOP/s", "arithmetic"
    launch = machine.launch_ns if machine.kernel_times is None else machine.kernel_times.launch_ns
    rate = f"{kernel.bytes / seconds / 1e9:,.0f} GB/s"
    return rate, "memory" if moving >= launch / 1e9 else "the launch"
