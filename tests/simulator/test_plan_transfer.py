"""Tests transferring a plan to another capture of the same step."""

from dataclasses import replace
from random import Random

from simulator import Kernel, Plan, Program, Recompute, Rerun, Swap, Tensor
from simulator.plan_transfer import transfer_plan
from simulator.schedule import lower
from tests.random_cases import plan_of, program_of


def test_adapted_plans_are_valid():
    for seed in range(50):
        rng = Random(seed)
        program = program_of(rng)
        plan = replace(plan_of(rng, program), limit=7, planner="p", machine="m")
        other = program_of(rng) if seed % 2 else replace(program, kernels=program.kernels[:-1])
        found = transfer_plan(plan, program, other)
        found.check(other)
        lower(other, found)
        assert (found.fingerprint, found.limit, found.planner, found.machine) == (other.fingerprint, 7, "p", "m")
        assert len(found.decisions) <= len(plan.decisions), f"seed {seed}"
        assert transfer_plan(plan, program, program) == replace(plan, fingerprint=program.fingerprint), f"seed {seed}"


def layers(*names: str) -> Program:
    """Returns one layer per name, forward and backward; tensors are named as captures name them."""
    tensors = [Tensor(f"{name}.weight", 10, "parameter", True) for name in names]
    tensors += [Tensor(f"mm_{i}", 40) for i in range(2 * len(names))]
    tensors += [Tensor(f"mm_{i + 2 * len(names)}", 10, "gradient") for i in range(len(names))]
    n = len(names)
    kernels = []
    for i in range(n):  # x is written, then its relu, which the backward pass reads
        x = n + 2 * i
        y = n + 2 * i + 1
        kernels.append(Kernel("mm", "matmul", "forward", (i, *([x - 1] if i else [])), (x,), 10))
        kernels.append(Kernel("relu", "activation", "forward", (x,), (y,), 10))
    for i in reversed(range(n)):
        y = n + 2 * i + 1
        g = 3 * n + i
        kernels.append(Kernel("mm_backward", "matmul", "backward", (i, y, *([g + 1] if i < n - 1 else [])), (g,), 10))
    return Program("layers", tuple(tensors), tuple(kernels))


def test_a_layer_keeps_its_decisions_where_another_is_missing():
    """The gap of a's output opens after c's kernel 2, as b's is missing. Decisions and prefetches of b are dropped."""
    program = layers("a", "b", "c")
    other = layers("a", "c")
    plan = Plan((Swap(4, 2, 8, prefetch=7, copy=1), Swap(6, 4, 7), Swap(0, 1, 8, copy=2)), program.fingerprint)
    found = transfer_plan(plan, program, other)
    assert [t.name for t in (program.tensors[4], other.tensors[3])] == ["mm_1", "mm_1"]
    assert found == Plan((Swap(3, 2, 5, copy=1), Swap(0, 1, 5)), other.fingerprint)


def test_a_step_by_other_kernels_is_matched_by_the_order_of_accesses():
    """Weights are updated by one kernel each, or all by one kernel with another name; their gaps end there, too."""

    def step(together: bool) -> Program:
        base = layers("a", "b")
        updates = [("sgd", (0, 1))] if together else [("add", (0,)), ("add", (1,))]
        found = [
            Kernel(name, "optimizer", "optimizer", (*which, *(6 + t for t in which)), which, 10)
            for name, which in updates
        ]
        return Program("step", base.tensors, (*base.kernels, *found))

    program = step(together=False)
    other = step(together=True)
    plan = Plan((Swap(1, 4, 7, prefetch=6), Swap(0, 0, 5)), program.fingerprint)
    assert transfer_plan(plan, program, other).decisions == (Swap(1, 4, 6), Swap(0, 0, 5))
    assert transfer_plan(plan, program, program).decisions == plan.decisions


def test_untransferable_decisions_are_dropped():
    program = layers("a", "b")
    other = layers("a")
    assert transfer_plan(Plan((Rerun(0, 4), Rerun(1, 4))), program, other).decisions == ()
    kept = transfer_plan(Plan((Rerun(0, 4), Rerun(1, 4))), program, layers("a", "b", "c"))
    assert kept.decisions == (Rerun(0, 7), Rerun(1, 7))
    recompute = Plan((Recompute(3, 2, 5, at=4),))
    assert transfer_plan(recompute, program, layers("c", "a", "b")).decisions == (Recompute(6, 4, 7, at=6),)


def test_variants_go_with_their_kernels():
    program = layers("a", "b")
    other = layers("b")
    first, second, third, *others = program.kernels
    third = replace(third, variants=((5, 1), (6, 0)))
    with_algorithms = replace(program, kernels=(first, second, third, *others))
    less = replace(other, kernels=(replace(other.kernels[0], variants=((5, 1),)), *other.kernels[1:]))
    assert transfer_plan(Plan(variants=((2, 0),)), with_algorithms, less).variants == ((0, 0),)
    assert transfer_plan(Plan(variants=((2, 1),)), with_algorithms, less).variants == ()
