"""A planned step as a graph: on the host equal to eager to the bit; no recording is taken that is no legal graph."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from executor import Captured, PlannedStep, StepError, capture
from executor.capture.optimizers import capturable
from executor.memory import ALIGNMENT
from executor.training.issue_order import stays
from executor.training.recording import Operation, Recording, illegal
from simulator import Plan, Recompute, Swap
from simulator.pool import smartpool
from simulator.schedule import lower
from tests.executor.networks import adamw, sgd
from tests.executor.training.programs import GPU, Twins, fits, random_plan, tight


def plan_for(captured: Captured, seed: int = 0) -> Plan:
    """Of a random plan what a graph can do: no batch leaves, no random kernel runs again."""
    program = captured.program
    batch = {t for t, tensor in enumerate(program.tensors) if tensor.kind == "input"}
    found = [d for d in random_plan(program, seed).decisions if not (isinstance(d, Swap) and d.tensor in batch)]
    words = ("dropout", "bernoulli", "lstm")
    for _ in range(20):
        again = [s for s in lower(program, Plan(tuple(found))).steps if s.again]
        draws = {s.before for s in again if any(word in program.kernels[s.kernel].name for word in words)}
        found = [d for d in found if not (isinstance(d, Recompute) and {d.before, d.at} & draws)]
    assert not draws
    return Plan(tuple(found), program.fingerprint)


def by_tensor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), capturable=True)


class Capturable(Twins):
    """The eager one's capturable form, which PyTorch has on the CPU only where it compiles."""

    def eager_step(self) -> Tensor:
        with capturable():
            return super().eager_step()


def set_rate(twins: Twins, rate: float) -> None:
    for parts in (twins.ours, twins.eager):
        for group in parts[2].param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def graphed(network: str = "small", optimizer=by_tensor, swaps: bool = True) -> tuple[Twins, PlannedStep]:
    twins = Capturable(network, optimizer)
    captured = twins.captured()
    return twins, tight(captured, plan_for(captured) if swaps else Plan(), graph=True)


@pytest.mark.parametrize(("network", "optimizer"), [("small", by_tensor), ("gpt2", by_tensor), ("vgg16", sgd)])
def test_equal_to_eager_with_other_batches_and_learning_rates(network, optimizer):
    """One capture does for rates that are tensors; numbers are constants of a graph, which is captured again."""
    twins, step = graphed(network, optimizer)
    kinds = {type(d) for d in step.plan.decisions}
    assert Swap in kinds and any(b.persistent for b in step.state.blocks.blocks.values())
    for rate in (0.02, 0.01, 0.03, 0.005, 0.02):
        set_rate(twins, rate)
        twins.train(step)
    assert step.graph.captures == (1 if optimizer is by_tensor else 4)
    load = stays(step.order, step.state.blocks.blocks)[1].rounded(ALIGNMENT).peak_bytes
    assert 0 < load <= step.graph.graph.pool_bytes <= 1.2 * load


def test_a_graph_is_replayed_and_not_issued(monkeypatch):
    twins, step = graphed(swaps=False)
    twins.train(step, 2)
    step.state.work = None  # type: ignore[assignment]
    twins.train(step, 2)
    assert step.graph.captures == 1


def test_what_changes_between_replays_counts():
    """In place it is read; another tensor is found, and the step captured again."""
    twins, step = graphed()
    twins.train(step, 3)
    for model, _, optimizer in (twins.ours, twins.eager):
        for p in model.parameters():
            p.data.mul_(0.5)
            optimizer.state[p]["exp_avg"].add_(0.25)
    twins.train(step, 2)
    assert step.graph.captures == 1
    for model, _, _ in (twins.ours, twins.eager):
        model.stem[0].weight.data = model.stem[0].weight.data + 1
        model.stem[1].running_mean = torch.ones_like(model.stem[1].running_mean)
    twins.train(step, 2)
    assert step.graph.captures == 2
    step.finish()
    twins.compare()
    twins.train(step)
    with step:
        twins.train_within(step, 2)
    twins.compare()
    assert step.graph.captures == 2


def test_what_is_returned_is_the_callers():
    twins, step = graphed(swaps=False)
    losses = [step(*twins.next_batch()) for _ in range(4)]
    kept = [loss.clone() for loss in losses]
    step(*twins.next_batch())
    assert all(map(torch.equal, losses, kept)) and len({loss.data_ptr() for loss in losses}) == 4


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: graphed("small", adamw), "the host reads the number optimizer.*step; an optimizer that is capturable"),
        (lambda: recomputing_dropout(), "the plan recomputes aten.*, which draws random numbers"),
        (lambda: swapping_the_batch(), "the plan swaps input0, a tensor of the batch"),
        (lambda: undoing(), "a replay cannot be undone"),
        (lambda: scaled(), "a GradScaler decides on the host whether the update is left out"),
    ],
)
def test_what_cannot_be_a_graph_is_refused(make, message):
    with pytest.raises(StepError, match=f"^the step cannot be a graph: {message}"):
        make()


def recomputing_dropout() -> PlannedStep:
    captured = Twins("small", sgd).captured()
    program = captured.program
    for gap in program.gaps():
        plan = Plan((Recompute(gap.tensor, gap.after, gap.before),))
        drawn = any("bernoulli" in k.name and gap.tensor in k.outputs for k in program.kernels)
        if drawn and fits(program, list(plan.decisions), whole=True):
            return tight(captured, plan, graph=True)
    raise AssertionError("no dropout")


def swapping_the_batch() -> PlannedStep:
    captured = Twins("small", sgd).captured()
    x = next(i for i, t in enumerate(captured.program.tensors) if t.name == "input0")
    uses = captured.program.accesses[x]
    return tight(captured, Plan((Swap(x, uses[0], uses[-1]),)), graph=True)


def undoing() -> PlannedStep:
    return tight(Twins("small", sgd).captured(), Plan(), graph=True, undo=True)


def scaled() -> PlannedStep:
    twins = Twins("small", sgd)
    scaler = torch.amp.GradScaler("cpu")
    captured = capture(*twins.ours, twins.next_batch(), machine=GPU, scaler=scaler)
    return PlannedStep(captured, Plan(), GPU, graph=True)


# ------------------------------------------------------------------------------------------------------------ legality


@pytest.fixture(scope="module")
def recording() -> Recording:
    twins, step = graphed()
    for _ in range(2):
        step(*twins.next_batch())
    made = step.graph.graph.recording
    assert reason(made.operations, made) is None
    return made


def reason(operations: list[Operation], made: Recording) -> str | None:
    return illegal(operations, made.pool, made.there)


def where(made: Recording, is_it: Callable[[Operation], bool]) -> list[int]:
    return [i for i, done in enumerate(made.operations) if is_it(done)]


def without(made: Recording, i: int) -> list[Operation]:
    return made.operations[:i] + made.operations[i + 1 :]


def test_a_wait_too_few_is_found(recording):
    """Compute waits for a copy because of its memory, its content, or the end."""
    waits = where(recording, lambda done: done.kind == "wait" and done.stream == "compute")
    assert len(waits) > 10
    waits = waits[::4]
    found = [why for i in waits if (why := reason(without(recording, i), recording))]  # some wait for what is over
    assert len(found) > len(waits) // 2
    assert all("neither waits for the other" in why or "is not joined" in why for why in found)


def test_a_copy_that_does_not_wait_for_compute_is_found(recording):
    waits = where(recording, lambda done: done.kind == "wait" and done.stream in ("d2h", "h2d"))[::4]
    found = [reason(without(recording, i), recording) for i in waits]
    assert "has not been forked" in str(found[0])
    assert sum("neither waits for the other" in str(why) for why in found) > len(found) // 2


def test_a_stream_that_is_not_joined_is_found(recording):
    last = where(recording, lambda done: done.kind == "wait" and done.stream == "compute")[-1]
    later = [
        done for i, done in enumerate(recording.operations) if i != last and not (i > last and done.kind == "give")
    ]
    assert "is not joined" in str(reason(later, recording))


def test_an_event_of_before_is_found(recording):
    i = where(recording, lambda done: done.kind == "record" and done.stream == "h2d")[0]
    assert "which has not been recorded" in str(reason(without(recording, i), recording))


def test_a_number_that_the_host_reads_is_found(recording):
    middle = len(recording.operations) // 2
    read = [*recording.operations[:middle], Operation("read", "compute", "a loss"), *recording.operations[middle:]]
    assert reason(read, recording) == "the host reads a loss, which it does not when a graph is replayed"


def test_memory_that_is_allocated_is_found(recording):
    i = where(recording, lambda done: done.kind == "kernel" and bool(done.writes))[5]
    done = recording.operations[i]
    stray = Operation("kernel", "compute", done.name, done.reads, ((2, 10),))
    assert f"{done.name} uses memory that is neither taken" in str(
        reason([*recording.operations[:i], stray, *recording.operations[i + 1 :]], recording)
    )
    b = recording.pool[1]
    beyond = Operation("take", "compute", "memory that is taken", (), ((b, b + 512),))
    assert reason([beyond], recording) == "memory is taken that is not the pool's"
    first = where(recording, lambda done: done.kind == "take")[0]
    twice = recording.operations[: first + 1] + [recording.operations[first]]
    assert reason(twice, recording) == "memory is taken that has not been given back"


def test_memory_that_is_given_back_too_early_is_found(recording):
    takes = where(recording, lambda done: done.kind == "take")
    early = 0
    for i in takes[::7]:
        memory = recording.operations[i].writes
        gives = [g for g in where(recording, lambda done: done.kind == "give") if g > i]
        back = next(g for g in gives if recording.operations[g].writes == memory)
        moved = [*recording.operations[: i + 1], recording.operations[back], *recording.operations[i + 1 : back],
                 *recording.operations[back + 1 :]]  # fmt: skip
        early += "uses memory that is neither taken" in str(reason(moved, recording))
    assert early >= len(takes[::7]) // 2


def test_packed_addresses_that_overlap_are_found(monkeypatch):
    """By the check, and by numbers: memory that is given back is overwritten."""
    pack = smartpool.pack

    def wrong(intervals, alignment):
        packing = pack(intervals, alignment)
        packing.offsets[: len(packing.offsets) // 2] = 0
        return packing

    twins, step = graphed()
    step(*twins.next_batch())
    monkeypatch.setattr(smartpool, "pack", wrong)
    with pytest.raises(StepError, match=r"is no legal graph: memory is taken that|the graph failed: "):
        step(*twins.next_batch())
