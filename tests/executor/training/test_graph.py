"""Tests planned steps as CUDA graphs at packed addresses, on a double of torch.cuda: bit-identical to eager."""

import contextlib
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import agents
from executor import Captured, CaptureError, PlannedStep, StepError, capture, capture_step, fit
from executor.capture.optimizers import capturable, rates_as_tensors
from executor.training import check, graph, node_calls, planned_step
from executor.training.memory_source import Place
from simulator import Plan, Recompute, Swap, simulate
from simulator.pool.intervals import Intervals
from simulator.schedule import lower
from tests.executor.networks import adamw, sgd
from tests.executor.training import programs
from tests.executor.training.programs import GPU, Loop, Twins, network, random_plan, required
from tests.executor.training.test_faults import break_kernel
from tests.fake_device.graphs import Graph
from tests.fake_device.memory import BASE

fit_module = sys.modules["executor.fit"]


def plan_for(captured: Captured, seed: int = 0) -> Plan:
    """Returns a random plan without recomputations of random kernels, which a graph does not support."""
    program = captured.program
    decisions = list(random_plan(program, seed).decisions)
    words = ("dropout", "bernoulli", "lstm")
    for _ in range(20):
        recomputed = [s for s in lower(program, Plan(tuple(decisions))).steps if s.is_recomputation]
        draws = {s.before for s in recomputed if any(word in program.kernels[s.kernel].name for word in words)}
        decisions = [d for d in decisions if not (isinstance(d, Recompute) and {d.before, d.at} & draws)]
    assert not draws
    return Plan(tuple(decisions), program.fingerprint)


def by_tensor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), capturable=True)


def loop_of(name: str, optimizer: Any, device: str = "cpu") -> Loop:
    """Builds a loop with a capturable optimizer, which PyTorch allows on the CPU only when compiling; rates change."""
    loop = network(name, optimizer, device)
    micro = loop.micro

    def in_this_form(i: int, *batch: Any) -> Any:
        with capturable(device == "cpu"):
            return micro(i, *batch)

    loop.micro = in_this_form
    return loop


def set_rate(twins: Twins, rate: float) -> None:
    for loop in (twins.ours, twins.eager):
        for group in loop.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def graphed(
    name: str = "small", optimizer: Any = by_tensor, swaps: bool = True, device: str = "cpu"
) -> tuple[Twins, PlannedStep]:
    """Returns twins and a step with room for packing holes and, on a GPU, library workspaces."""
    twins = Twins(loop_of, name, optimizer, device)
    captured = twins.captured()
    plan = plan_for(captured) if swaps else Plan()
    least = required(captured.program, plan)
    return twins, PlannedStep(
        captured, replace(plan, limit=least), GPU, int(1.5 * least) + 2**26 * (device == "cuda"), graph=True
    )


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("small", by_tensor),
        ("mlp", sgd),
        *(pytest.param(*row, marks=pytest.mark.nightly) for row in (("gpt2", by_tensor), ("vgg16", sgd))),
    ],
)
def test_equal_to_eager_with_other_batches_and_learning_rates(name, optimizer, double):
    """Rates that are tensors need one capture; numbers are constants of a graph, which is captured again."""
    twins, step = graphed(name, optimizer)
    kinds = {type(d) for d in step.plan.decisions}
    assert Swap in kinds and any(b.persistent for b in step.state.blocks.blocks.values())
    for rate in (0.02, 0.01, 0.03, 0.005, 0.02):
        set_rate(twins, rate)
        twins.train(step)
    assert step.graph.captures == (1 if optimizer is by_tensor else 4)


@pytest.mark.nightly
def test_changes_between_replays_take_effect(double):
    """Replays read changes in place; a replaced tensor causes a new capture."""
    twins, step = graphed()
    twins.train(step, 3)
    for loop in (twins.ours, twins.eager):
        for p in loop.model.parameters():
            p.data.mul_(0.5)
            loop.optimizer.state[p]["exp_avg"].add_(0.25)
    twins.train(step, 2)
    assert step.graph.captures == 1
    for loop in (twins.ours, twins.eager):
        loop.model.stem[0].weight.data = loop.model.stem[0].weight.data + 1
        loop.model.stem[1].running_mean = torch.ones_like(loop.model.stem[1].running_mean)
    twins.train(step, 2)
    assert step.graph.captures == 2
    step.finish()
    twins.compare()
    twins.train(step)
    with step:
        twins.train(step, 2, compare=False)
    twins.compare()
    assert step.graph.captures == 2


def over_the_boundary(factor: float, room: int = 0) -> tuple[Twins, PlannedStep]:
    """Returns twins and a graph with parameters and optimizer state on the host or in flight at the boundary."""
    twins = Twins("mlp", sgd)
    return twins, programs.over_the_boundary(twins.captured(), factor, room, graph=True)


def test_nothing_moves_at_the_boundary(double):
    """Tensors stay where the plan has them at the boundary, and a replay makes exactly the plan's copies."""
    twins, step = over_the_boundary(2)
    twins.train(step, 2)
    blocks = step.state.blocks
    start = step.order.start
    for t, block in blocks.blocks.items():
        evicted = start.get(t) == "host"
        place = Place.HOST if evicted else Place.DEVICE
        assert not block.persistent or (block.place is place and block.is_shown is evicted)
    moves = Counter(kind for item in step.order.items for kind, _ in item.before + item.after)
    copies = [entry[2] for entry in double.graphs[-1].log if entry[0] is Tensor.copy_]
    out = sum(target.at < BASE for target, _ in copies)
    assert (out, len(copies) - out) == (moves["out"], moves["in"]) and min(moves["out"], moves["in"]) > 0


def test_pools_that_do_not_nest_are_refused(double):
    """With one common pool, PyTorch would choose among equal segments by address, differently in each capture."""
    double.nests = False
    twins, step = over_the_boundary(2)
    twins.train(step)
    with pytest.raises(
        StepError, match=r"captured: pools do not nest in a capture of PyTorch .*; the model is as before"
    ):
        step(*twins.next_batch())
    double.nests = True
    twins.train(step, 2)


def test_an_operator_that_uses_its_workspaces_again(double):
    """The pool reuses the free segment with the lowest address, which differs in the second capture."""
    twins, step = over_the_boundary(9)
    twins.train(step)

    def workspaces():
        first = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in (600, 5000, 100, 3000, 20)]
        del first
        second = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in (2000, 5000, 700)]
        del second[1:]
        return second

    break_kernel(step, "backward", workspaces)
    break_kernel(step, "forward", workspaces)
    twins.train(step, 3)
    assert step.graph.captures == 1


@pytest.mark.parametrize("over", [False, True])
def test_the_batch_is_swapped(over, double):
    """The batch's slot is in the graph's memory, or in pinned memory if it is on the host at the boundary."""
    twins = Twins("mlp", sgd)
    captured = twins.captured()
    x, y = (t for t, tensor in enumerate(captured.program.tensors) if tensor.kind == "input")
    (first, *_, last), (loss, *_, back) = captured.program.accesses[x], captured.program.accesses[y]
    plan = Plan((Swap(y, back, loss, prefetch=loss - 1),) if over else (Swap(x, first, last),))
    aim = required(captured.program, plan)
    step = PlannedStep(captured, replace(plan, limit=aim), GPU, 2 * aim, graph=True)
    assert graph.on_host(step.state) == ({y} if over else set()) and step.state.swapped_inputs()
    twins.train(step, 4)
    assert step.graph.captures == 1
    (unswapped,) = {x, y} - {block for block in (x, y) if block in step.state.blocks.blocks}
    tensors = captured.program.tensors
    moved = step.state.blocks.blocks
    resident = sum(t.nbytes for i, t in enumerate(tensors) if t.persistent and (i not in moved or t.kind == "input"))
    assert step.graph.peak_bytes == resident + tensors[unswapped].nbytes + step.graph.graph.footprint
    set_rate(twins, 0.07)  # a Python number: the step is captured again
    twins.train(step, 2)
    assert step.graph.captures == 2


@pytest.mark.nightly
def test_the_peak_is_known_before_the_first_replay(double):
    """The peak is the sum of resident tensors, batch slots and packed requests; a limit one byte lower is refused."""
    twins, step = over_the_boundary(2)
    twins.train(step, 2)
    captured_graph = step.graph.graph
    used = {
        span for spans in (double.graphs[-1].reads, double.graphs[-1].writes) for span in spans if span[0] > 2 * BASE
    }
    assert max(end for _, end in used) - min(begin for begin, _ in used) <= captured_graph.footprint
    tensors = step.program.tensors
    moved = step.state.blocks.blocks
    assert not step.state.swapped_inputs()
    resident = sum(t.nbytes for i, t in enumerate(tensors) if t.persistent and i not in moved)
    slots = sum(tensor.nbytes for tensor in twins.next_batch())
    assert step.order.peak + slots <= step.graph.peak_bytes == resident + slots + captured_graph.footprint
    twins, smaller = over_the_boundary(0, step.graph.peak_bytes - 1)
    twins.train(smaller)
    with pytest.raises(
        StepError, match=r"as a graph the step takes .*: plan it for 1 bytes less; the model is as before"
    ):
        smaller(*twins.next_batch())
    twins.compare()
    twins, exact = over_the_boundary(0, step.graph.peak_bytes)
    twins.train(exact, 3)
    assert exact.graph.peak_bytes == step.graph.peak_bytes


def test_the_executable_graph_counts(double):
    """The driver takes memory for a graph's nodes when it is instantiated, before any replay."""
    double.executable_bytes = 5000
    twins, step = over_the_boundary(2)
    twins.train(step, 3)
    captured_graph = step.graph.graph
    assert captured_graph.executable_bytes == 5000
    peak_bytes = step.graph.peak_bytes
    step.graph.close()
    assert double.free_bytes == 1 << 40
    twins, smaller = over_the_boundary(0, peak_bytes - 1)
    twins.train(smaller)
    with pytest.raises(StepError, match=r"takes .*: plan it for 1 bytes less; the model is as before"):
        smaller(*twins.next_batch())
    twins.compare()
    assert double.free_bytes == 1 << 40 and not double.arenas


@pytest.mark.parametrize("wrong", ["packing", "lifetimes", "boundary"])
def test_wrong_addresses_are_found(wrong, double, monkeypatch):
    """The test double of CUDA detects memory with two owners and unordered uses."""
    twins, step = over_the_boundary(2)
    step(*twins.next_batch())
    if wrong == "packing":
        pack = graph.pack_within
        monkeypatch.setattr(
            graph,
            "pack_within",
            lambda blocks, *rest: replace(pack(blocks, *rest), offsets=np.zeros(len(blocks), np.int64)),
        )
    elif wrong == "lifetimes":
        found = graph.requests_of
        monkeypatch.setattr(
            graph,
            "requests_of",
            lambda *given: replace(made := found(*given), end=np.minimum(made.end, made.begin + 1)),
        )
    else:
        monkeypatch.setattr(
            graph.Dry,
            "intervals",
            property(
                lambda dry: Intervals(dry.requests.begin, dry.requests.end, dry.requests.nbytes, dry.requests.length)
            ),
        )
    with contextlib.suppress(StepError, KeyError):
        for _ in range(3):
            step(*twins.next_batch())
    assert double.found and re.search("given to two owners|neither waits for the other", double.found[0])
    double.found.clear()


# ------------------------------------------------------------------------------------------------------- by default


@pytest.fixture
def by_default(double, monkeypatch):
    """Returns the double with graphs enabled by default."""
    monkeypatch.setattr(planned_step, "not_by_default", graph.not_by_default)
    return double


@pytest.mark.parametrize(
    ("optimizer", "options", "reason"),
    [
        (adamw, {}, "the host reads the number"),
        (sgd, {"accumulate": 2}, "micro-batches may arrive one by one"),
    ],
    ids=["numbers", "micro-batches"],
)
def test_a_step_that_cannot_be_a_graph_runs_kernel_by_kernel_and_says_why(optimizer, options, reason, by_default):
    twins = Twins("mlp", optimizer)
    captured = twins.captured(**options)
    step = PlannedStep(captured, random_plan(captured.program, 0), GPU, 2 * captured.program.peak_bytes)
    assert step.graph is None and reason in step.not_graph and step.issued == f"kernel by kernel: {step.not_graph}"
    if not options:
        twins.train(step, 2)


def default_step(peaks: float, plan: Any = lambda captured: Plan()) -> tuple[Twins, PlannedStep]:
    """Returns twins and a step that may be a graph, at this multiple of the program's peak."""
    twins = Twins("mlp", sgd)
    captured = twins.captured()
    return twins, PlannedStep(captured, plan(captured), GPU, int(peaks * captured.program.peak_bytes))


def test_a_step_is_a_graph_by_default(by_default):
    """A graph is replayed and not issued, and its results belong to the caller."""
    twins, step = default_step(2)
    assert step.not_graph is None and step.issued == "kernel by kernel the first time, then as one CUDA graph"
    twins.train(step, 2)
    step.state.work = None
    twins.train(step, 2)
    assert step.graph.captures == 1
    assert step.issued == f"as one CUDA graph, which takes {step.graph.peak_bytes:,} bytes"
    assert len({loss.data_ptr() for loss, _ in twins.returned}) == 4


def test_a_step_whose_graph_is_over_the_limit_goes_on_kernel_by_kernel(by_default):
    twins, step = default_step(1)
    twins.train(step)
    with pytest.warns(UserWarning, match="kernel by kernel: as a graph the step takes"):
        twins.train(step)
    assert step.graph is None and "plan it for" in step.issued and not by_default.arenas
    twins.train(step, 2)


def test_repeated_captures_disable_the_graph(by_default):
    twins, step = default_step(2, plan_for)
    twins.train(step)
    for i in range(graph.CAPTURES):
        set_rate(twins, 0.01 * (i + 2))
        twins.train(step)
        assert step.graph.captures == i + 1 and len(by_default.arenas) == 1
    set_rate(twins, 0.07)
    with pytest.warns(UserWarning, match="it was captured 3 times for 3 replays"):
        twins.train(step)
    assert step.graph is None and "fit(tensor_lr=True)" in step.issued and not by_default.arenas
    twins.train(step, 2)


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_differential_check_replays_a_graph(is_broken, by_default, monkeypatch):
    """The check replays a graph, as on CUDA, where eager runs may differ, and refuses one that lacks a kernel."""
    monkeypatch.setattr(check, "repeats", lambda device: False)
    replays = list[int]()
    replay = Graph.replay

    def watched(captured_graph: Graph) -> None:
        replays.append(len(captured_graph.log))
        if is_broken:
            del captured_graph.log[-1]
        replay(captured_graph)

    monkeypatch.setattr(Graph, "replay", watched)
    loop = loop_of("mlp", sgd)
    with (
        pytest.raises(CaptureError, match="differently from the eager step") if is_broken else contextlib.nullcontext()
    ):
        capture(*loop.capture_args, (torch.randn(8, 16), torch.randint(4, (8,))), check=True)
    assert len(replays) == 1 and replays[0] > 10


def test_a_schedule_keeps_the_graph(by_default):
    """With tensor_lr PyTorch's schedulers write into the tensors that replays read."""

    def with_schedule(*args: Any) -> Loop:
        loop = loop_of("small", lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True), *args)
        loop.schedule = torch.optim.lr_scheduler.LinearLR(loop.optimizer, 0.1, 1.0, 10)
        return loop

    twins = Twins(with_schedule)
    rates_as_tensors(twins.eager.optimizer)
    steps = fit(*twins.ours.capture_args, twins.next_batch(), "64MiB", machine=GPU, tensor_lr=True)
    for _ in range(6):
        twins.train(steps)
        for loop in (twins.ours, twins.eager):
            loop.schedule.step()
    (group,) = twins.ours.optimizer.param_groups
    assert steps.current.graph.captures == 1 and float(group["lr"]) == pytest.approx(0.01 * 0.64)


def test_a_learning_rate_that_the_host_reads_stays_a_number():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"tensor_lr: group 0 of SGD .* fused=True or capturable=True"):
        fit(model, nn.MSELoss(), optimizer, (torch.ones(1, 2), torch.ones(1, 2)), 1.0, tensor_lr=True)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_steps_of_several_shapes_have_one_graph_at_a_time(by_default):
    twins = Twins("mlp", sgd)
    steps = twins.steps_under(lambda program, *_: Plan((), program.fingerprint), 2**20)
    for rows in (8, 8, 8, 4, 4, 4, 8, 8):
        x, y = (part[:rows] for part in twins.next_batch())
        twins.at_once(steps, [(x.clone(), y.clone())], [(x, y)])
        assert len(by_default.arenas) <= 1
    assert [step.graph.captures for step in steps.steps.values()] == [1, 2]
    del steps
    assert not by_default.arenas


def test_fit_plans_again_for_less_until_the_graph_is_within_the_limit(by_default, monkeypatch):
    """The first packing fits only by the program's sizes; the last also fits the larger real requests."""
    monkeypatch.setattr(fit_module, "beside_bytes", lambda captured: 0)
    twins = Twins(loop_of, "small", by_tensor)
    limits = list[int]()
    capuchin = agents.make("capuchin", min_bytes=1)

    def planner(program, machine, limit):
        limits.append(limit)
        assert machine == slow.with_link(0.8)
        return capuchin.plan(program, machine, limit)

    slow = replace(GPU, graph_copies=0.5)
    with capturable(True):
        steps = fit(*twins.ours.capture_args, twins.next_batch(), 0.9, machine=slow, planner=planner)
        twins.train(steps, 5)
    assert (
        steps.report().iteration_ns
        == simulate(steps.current.program, steps.current.plan, slow.in_graph(), steps.limit).iteration_ns
    )
    assert steps.current.not_graph is None and steps.current.graph.peak_bytes <= steps.limit, steps.report()
    assert 0 < steps.current.replans < fit_module.REPLANS and steps.current.packed_bytes < steps.limit == max(limits)
    assert f"runs as one CUDA graph, which takes {steps.current.graph.peak_bytes:,} bytes" in str(steps.report())
    del steps
    assert not by_default.arenas  # at once


def test_room_is_left_for_what_a_graph_takes_beside_the_program(by_default, monkeypatch):
    captured = Twins("mlp", sgd).captured()
    slots = sum(t.nbytes for t in captured.program.tensors if t.kind == "input")
    assert graph.beside_bytes(captured) == slots > 0
    monkeypatch.setattr(graph, "libraries_bytes", lambda index: 1000)
    assert graph.beside_bytes(captured) == slots + 1000
    limit = captured.program.peak_bytes + 10_000
    step = PlannedStep(captured, Plan(), GPU, limit)
    assert captured.program.peak_bytes <= step.order.limit <= limit - slots - 1000


def test_workspaces_that_other_code_frees_stay_the_graphs(double, monkeypatch):
    """Replays write cuBLAS's workspace, which Inductor's graphs free for the whole process."""
    workspaces: list[Tensor] = []
    product = torch.addmm

    def with_workspace(*args: Tensor) -> Tensor:
        if not workspaces:
            workspaces.append(torch.empty(512))
        return product(*args)

    monkeypatch.setattr(torch, "addmm", with_workspace)
    twins, step = over_the_boundary(2)
    twins.train(step, 2)
    pool = double.memory.of(workspaces[0]).pool[0]
    workspaces.clear()  # as _cuda_clearCublasWorkspaces
    assert double.uses[pool] and double.allocators[pool] is None
    twins.train(step, 2)
    step.graph.close()
    twins.train(step, 2)
    assert double.memory.of(workspaces[0]).pool[0] == pool and step.graph.captures == 2


def test_a_history_of_the_users_that_is_full(double):
    """New entries of a full allocation history take the place of old ones, so that it does not grow."""
    twins, step = over_the_boundary(2)
    twins.train(step)
    double.history = True
    double.max_entries = len(double.memory.trace) + 1
    while len(double.memory.trace) < double.max_entries:
        double.memory.trace.append(("alloc", 0, 1))
    twins.train(step, 2)
    assert step.graph.captures == 1 and double.history


def test_closing_a_graph_takes_no_more_memory_than_its_replays(double, monkeypatch):
    """Resident tensors leave the arena over the host, because the arena may be all of the device memory."""
    twins, step = over_the_boundary(2)
    twins.train(step, 3)
    resident = [b for t, b in step.state.blocks.blocks.items() if b.persistent and t not in graph.on_host(step.state)]
    resize = double.memory.resize
    allocated: list[tuple[int, bool]] = []

    def watched(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if nbytes:
            allocated.append((nbytes, bool(double.arenas)))
        return resize(storage, nbytes)

    monkeypatch.setattr(double.memory, "resize", watched)
    step.graph.close()
    assert sorted(allocated) == sorted((block.nbytes, False) for block in resident) and resident
    step.finish()
    twins.compare()
    twins.train(step, 3)


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (lambda x: torch.rand(x.shape[0], 1), "rand.default runs on the host"),
        (lambda x: torch.rand_like(x[:, :1]), None),
        (lambda x: torch.rand_like(x[:, :1]).to("meta"), "_to_copy.default copies between host and device"),
        (lambda x: torch.full((), 0.5), None),
    ],
    ids=["drawn on the host", "drawn on the device", "copied", "a constant"],
)
def test_work_on_the_host_is_no_part_of_a_graph(draw, reason):
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) * draw(x).to(x.device)).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = capture_step(step, torch.randn(4, 16), check=False)
    on_gpu = replace(captured, devices=(torch.device("cuda"),) * len(captured.devices))
    calls = node_calls.Calls(on_gpu, lower(captured.program, Plan()))
    found = graph.host_work(on_gpu, calls, torch.device("cuda"))
    assert found is None if reason is None else reason in found


def test_fit_goes_on_kernel_by_kernel_if_no_plan_does_with_less(by_default):
    twins = Twins("mlp", sgd)

    def planner(program, machine, limit):
        raise agents.Infeasible("not for less than everything")

    steps = fit(*twins.ours.capture_args, twins.next_batch(), 1.0, machine=GPU, planner=planner)
    twins.train(steps)
    with pytest.warns(UserWarning, match="kernel by kernel: as a graph the step takes"):
        twins.train(steps)
    twins.train(steps)
    assert "runs kernel by kernel: as a graph the step takes" in str(steps.report()) and not by_default.arenas


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("small", sgd),
        ("vgg16", sgd),
        ("gpt2", lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, capturable=True)),
    ],
)
def test_a_graph_on_a_gpu(name, optimizer, monkeypatch):
    """The step is bit-identical to eager where cuDNN is deterministic; closing the graph frees its device memory."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    twins, step = graphed(name, optimizer, device="cuda")
    twins.train(step, 5)
    captured_graph = step.graph.graph
    assert step.graph.captures == 1 and 0 < captured_graph.footprint < step.graph.peak_bytes <= step.limit
    free_before = torch.cuda.mem_get_info()[0]
    step.graph.close()
    persistent = sum(b.nbytes for b in step.state.blocks.blocks.values() if b.persistent)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free_before >= captured_graph.footprint - persistent - 2**21
    twins.train(step, 2)
    assert step.graph.captures == 2
    step.finish()
    twins.compare()
