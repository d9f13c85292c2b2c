"""Draws docs/concepts.png: one iteration of five kernels under a plan, from the simulator's timeline.

PYTHONPATH=. python docs/draw_concepts.py
"""

from pathlib import Path

from experiments.plotting.palette import FAINT, INK, LIMIT, SPANS
from experiments.plotting.plots import figure
from simulator import Kernel, Machine, Plan, Program, Recompute, Swap, Tensor, Timeline, simulate

PATH = Path(__file__).with_name("concepts.png")
MIB = 2**20
LIMIT_BYTES = 80 * MIB


def example() -> tuple[Program, Machine, Plan]:
    """Returns a step of three forward and two backward kernels, a machine, and a plan for 80 MiB."""
    sizes = {"A": 30, "B": 40, "C": 35, "dB": 8, "dA": 2}
    tensors = tuple(Tensor(name, mib * MIB) for name, mib in sizes.items())
    a, b, c, d_b, d_a = range(5)
    kernels = (
        Kernel("f1", "matmul", "forward", (), (a,), 30_000),
        Kernel("f2", "matmul", "forward", (a,), (b,), 30_000),
        Kernel("f3", "matmul", "forward", (b,), (c,), 30_000),
        Kernel("b3", "matmul", "backward", (c,), (d_b,), 50_000),
        Kernel("b2", "matmul", "backward", (a, b, d_b), (d_a,), 40_000),
    )
    program = Program("five kernels", tensors, kernels)
    rate = 750_000 * MIB // 1_000  # 0.75 MiB per µs
    machine = Machine("an example", 2**30, rate * 1000, rate * 1000, d2h_latency_ns=0, h2d_latency_ns=0)
    plan = Plan.of(program, (Swap(a, after=1, before=4, prefetch=2, copy=0), Recompute(b, after=2, before=4)))
    return program, machine, plan


def timelines() -> tuple[Timeline, Timeline]:
    """Returns the timelines without the plan and under it."""
    program, machine, plan = example()
    return simulate(program, Plan(), machine, program.peak_bytes), simulate(program, plan, machine, LIMIT_BYTES)


def curve(timeline: Timeline) -> tuple[list[float], list[float]]:
    """Returns the memory of the first iteration as steps: times in µs, and MiB in use from each on."""
    end = timeline.boundaries[0]
    last = {time: used for time, used in timeline.memory if time < end}  # the last of several changes at one time
    last[end] = list(last.values())[-1]
    return [time / 1000 for time in last], [used / MIB for used in last.values()]


def draw(path: Path) -> None:
    """Draws the streams above and the bytes in use below."""
    program = example()[0]
    unplanned, planned = timelines()
    end = planned.boundaries[0]
    with figure(path, 8.0, 6.0, rows=2) as (streams, memory):
        rows = {"compute": 2, "d2h": 1, "h2d": 0}
        for span in planned.spans:
            if span.start_ns >= end:
                continue
            table = program.kernels if span.stream == "compute" else program.tensors
            x = span.start_ns / 1000
            width = (span.end_ns - span.start_ns) / 1000
            streams.barh(rows[span.stream], width, left=x, height=0.62, color=SPANS[span.kind], edgecolor="white")
            name = {"recompute": "recompute ", "swap_out": "swap-out ", "swap_in": "swap-in "}.get(span.kind, "")
            streams.text(
                x + width / 2,
                rows[span.stream],
                name + table[span.index].name,
                ha="center",
                va="center",
                color="white",
                fontsize=10,
            )
        compute = [span for span in planned.spans if span.stream == "compute" and span.start_ns < end]
        stall = (compute[1].end_ns / 1000, compute[2].start_ns / 1000)
        streams.annotate(
            "stall: f3 waits\nfor the memory of A",
            ((stall[0] + stall[1]) / 2, 2.3),
            (sum(stall) / 2 + 12, 3.35),
            ha="left",
            va="center",
            fontsize=10,
            arrowprops={"arrowstyle": "-", "color": INK},
        )
        last = compute[-1].start_ns / 1000
        for y, name, begin in ((-0.75, "A", compute[1].end_ns), (-1.25, "B", compute[2].end_ns)):
            streams.annotate("", (begin / 1000, y), (last, y), arrowprops={"arrowstyle": "<->", "color": FAINT})
            streams.text(begin / 1000 - 2, y, f"gap of {name}", ha="right", va="center", fontsize=10)
        streams.set(xlim=(0, end / 1000), ylim=(-1.7, 3.9), title="A is swapped, B is recomputed; b2 needs both")
        streams.set_yticks(list(rows.values()), list(rows))
        streams.grid(False)
        x, y = curve(unplanned)
        memory.step(x, y, where="post", color=FAINT, linewidth=1.4)
        memory.text(
            x[y.index(max(y))] + 2, max(y) + 2, f"without a plan: {max(y):.0f} MiB", color="#666666", fontsize=10
        )
        x, y = curve(planned)
        memory.fill_between(x, y, step="post", color="#dcebf7", linewidth=0)
        memory.step(x, y, where="post", color=SPANS["swap_in"], linewidth=1.6)
        memory.axhline(LIMIT_BYTES / MIB, color=LIMIT, linewidth=1.2, linestyle=(0, (5, 3)))
        memory.text(2, LIMIT_BYTES / MIB + 2, f"limit: {LIMIT_BYTES / MIB:.0f} MiB", fontsize=10)
        memory.set(
            xlim=(0, end / 1000),
            ylim=(0, 130),
            xlabel="time (µs)",
            ylabel="memory in use (MiB)",
            title=f"The peak falls to {planned.peak_bytes / MIB:.0f} MiB, at {planned.overhead:+.0%} time",
        )


if __name__ == "__main__":
    draw(PATH)
