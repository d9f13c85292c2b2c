"""Random programs and plans for property tests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from simulator import Decision, Kernel, Machine, Plan, Program, Recompute, Rerun, Swap, Tensor
from simulator.schedule import lower
from tests.random_cases import added


@st.composite
def programs(draw: st.DrawFn, max_kernels: int = 14) -> Program:
    """Programs with persistent tensors, in-place and multi-output kernels, workspaces and markers."""
    n_persistent = draw(st.integers(0, 3))
    tensors = [Tensor(f"p{i}", draw(st.integers(0, 40)), "parameter", True) for i in range(n_persistent)]
    born: list[int] = list(range(n_persistent))
    kernels = []
    for k in range(draw(st.integers(2, max_kernels))):
        recent = born[-8:] + born[:n_persistent]
        inputs = draw(st.lists(st.sampled_from(recent), max_size=3, unique=True)) if recent else []
        outputs = []
        for _ in range(draw(st.integers(0, 2))):
            tensors.append(Tensor(f"t{len(tensors)}", draw(st.integers(0, 40))))
            outputs.append(len(tensors) - 1)
        if recent and draw(st.booleans()) and draw(st.booleans()):
            target = draw(st.sampled_from(recent))  # in place, with or without reading
            outputs.append(target)
            if draw(st.booleans()) and target not in inputs:
                inputs.append(target)
        born += [t for t in outputs if t not in born]
        kernels.append(Kernel(
            f"k{k}", "other", "forward", tuple(inputs), tuple(outputs), draw(st.integers(0, 30)),
            workspace=draw(st.sampled_from([0, 0, 5, 20])), recomputable=draw(st.integers(0, 9)) > 0,
        ))  # fmt: skip
    return Program("random", tuple(tensors), tuple(kernels))


KINDS = st.sampled_from(["conv", "norm", "activation", "pool", "matmul"])


@st.composite
def networks(draw: st.DrawFn) -> Program:
    """Forward chains, some layers in place, and backward kernels that want the activations again: what planners plan,
    and long chains of recomputation with tensors in common. ``programs`` seldom draws either."""
    depth = draw(st.integers(2, 6))
    tensors = [Tensor("w", draw(st.integers(0, 20)), "parameter", True)]
    kernels: list[Kernel] = []

    def kernel(inputs: list[int], outputs: list[int], kind: str, phase: str = "forward") -> None:
        lasts, workspace = draw(st.integers(0, 20)), draw(st.sampled_from([0, 0, 10]))
        kernels.append(Kernel(f"k{len(kernels)}", kind, phase, tuple(inputs), tuple(outputs), lasts, workspace))

    def new() -> int:
        tensors.append(Tensor(f"t{len(tensors)}", draw(st.integers(1, 30))))
        return len(tensors) - 1

    layers: list[int] = []
    for _ in range(depth):
        source = draw(st.sampled_from([0, *layers[-1:], *layers[-1:], *layers[-2:]]))
        layers.append(new())
        kernel([source, 0], [layers[-1], *([new()] if draw(st.booleans()) else [])], draw(KINDS))
        how = draw(st.sampled_from(["", "", "update", "fill"]))  # in place, reading the old content or not
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
    """From the least bytes with everything away between its uses, which swaps of all gaps need, to the peak."""
    everything = tuple(Swap(*gap) for gap in program.gaps())
    return draw(st.integers(lower(program, Plan(everything)).required_bytes, program.peak_bytes))


@st.composite
def plans(draw: st.DrawFn, program: Program, reruns: bool = False) -> Plan:
    """Plans that fit the program: early copies, early or pinned returns, synchronous swap-outs, wrapping gaps, early
    and late recomputation; or kernels that run again one by one."""
    n = len(program.kernels)
    decisions: list[Decision] = []
    one_by_one = reruns and draw(st.booleans())
    for gap in program.gaps():
        kind = draw(st.sampled_from(["none", "swap", "swap", "none" if one_by_one else "recompute"]))
        if kind == "none":
            continue
        span = (gap.before - gap.after - 1) % n
        late = draw(st.integers(0, max(0, span))) if draw(st.booleans()) else 0
        after = (gap.after + late) % n
        if kind == "swap":
            steps = (gap.before - after - 1) % n
            prefetch = (after + draw(st.integers(0, steps))) % n if draw(st.booleans()) else None
            sync = draw(st.integers(0, 2)) == 2
            copy = (after - draw(st.integers(0, n - 1))) % n if draw(st.booleans()) else None
            decision: Decision = Swap(gap.tensor, after, gap.before, prefetch, sync, copy)
        else:
            at = draw(st.integers(after + 1, max(after + 1, gap.before))) if draw(st.booleans()) else None
            decision = Recompute(gap.tensor, after, gap.before, draw(st.booleans()), at)
        decisions = added(program, decisions, decision)
    for _ in range(draw(st.integers(0, n)) if one_by_one else 0):
        before = draw(st.integers(1, n - 1))
        decisions = added(program, decisions, Rerun(draw(st.integers(0, before - 1)), before))
    return Plan(tuple(decisions), program.fingerprint)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Machines whose copies are about as slow as the kernels of ``programs``."""
    bandwidth = st.sampled_from([500_000_000, 1_000_000_000, 3_000_000_000])
    duplex = st.sampled_from([0, 130_000_000, 400_000_000, 700_000_001, 2_900_000_000])
    return Machine("random", 10**6, draw(bandwidth), draw(bandwidth), draw(st.integers(0, 3)), draw(st.integers(1, 2)),
                   duplex_h2d_bytes_per_s=draw(duplex), duplex_d2h_bytes_per_s=draw(duplex))  # fmt: skip


@st.composite
def with_algorithms(draw: st.DrawFn, program: Program) -> tuple[Program, tuple[tuple[int, int], ...]]:
    """The program with several algorithms for some of its kernels, and a choice of them for a plan."""
    algorithm = st.tuples(st.integers(0, 30), st.integers(0, 30))
    kernels, chosen = [], []
    for k, kernel in enumerate(program.kernels):
        variants = draw(st.lists(algorithm, max_size=3))
        kernels.append(replace(kernel, variants=tuple(variants)))
        if variants and draw(st.booleans()):
            chosen.append((k, draw(st.integers(0, len(variants) - 1))))
    return replace(program, kernels=tuple(kernels)), tuple(chosen)
