"""Tests of profiles: every kernel runs alone, indices stay in range, and a profile fits only one program."""

import functools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from executor import capture
from executor.capture import profiler
from executor.capture.profile import (
    PROFILES,
    Profile,
    ProfileError,
    limit_to_row,
    path_of,
    shape_of,
    slow_down,
    with_profile,
)
from executor.capture.profiler import WARMUP, StepRunner, _Runner, measure
from executor.memory import cache_bytes
from simulator import Kernel, Machine, Program, Tensor
from tests.executor.networks import NETWORKS, adamw, images, small

PROGRAM = Program(
    "two",
    (Tensor("w", 8, "parameter", True), Tensor("x", 4)),
    (
        Kernel("a", "conv", "forward", (0,), (1,), 5, workspace=7, variants=((5, 7), (9, 0))),
        Kernel("b", "conv", "backward", (0, 1), (0,), 6),
    ),
)
PROFILE = Profile("two", shape_of(PROGRAM).fingerprint, "m", "some device", "2.0", (30, 40), (1, 2))


def captured(network="resnet", device="cpu", frozen=()):
    """Captures a network of networks.py; an LSTM saves opaque bytes for its backward pass."""
    make_model, make_batch = (small, images(16)) if network == "resnet" else NETWORKS[network]
    model = make_model().to(device)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    batch = tuple(t.to(device) for t in make_batch())
    return capture(model, nn.CrossEntropyLoss(), adamw(model), batch)


shared = functools.cache(captured)  # for tests that do not modify it
CPU = torch.device("cpu")


def step_runner(step):
    return StepRunner(step, CPU, _Runner(step, CPU, 1).devices, False)


@pytest.mark.parametrize(
    ("network", "cache"), [("lstm", "cold"), ("vgg16", "hot"), ("lstm", "step"), ("resnet", "step")]
)
def test_every_kernel_of_a_step_is_measured(network, cache):
    step = shared(network)
    before = [p.clone() for p in step.sources if p is not None]
    random = torch.get_rng_state()
    profile = measure(step, "cpu", "here", repeats=2, cache=cache)
    assert profile.cache == cache and profile.event_ns == 0 and torch.equal(torch.get_rng_state(), random)
    assert len(profile.durations_ns) == len(step.program.kernels) and profile.workspaces is None
    for ns, nodes in zip(profile.durations_ns, step.nodes, strict=True):
        assert (ns > 0) == bool(nodes)  # a marker takes no time
    assert all(torch.equal(a, b) for a, b in zip(before, [p for p in step.sources if p is not None], strict=True))
    program = with_profile(step.program, profile)
    assert program.ideal_ns == sum(profile.durations_ns)
    assert with_profile(program, profile) == program  # a profile fits regardless of the durations


@pytest.mark.parametrize("cache", ["cold", "hot"])
def test_a_cold_cache_is_flushed_before_every_run(cache, monkeypatch):
    """Reading twice the cache size evicts dirty lines, which would be written back while the kernel runs."""
    run = _Runner(shared(), CPU, 4, cache=cache)
    assert (run.flush_buffer is None) == (cache == "hot")
    if run.flush_buffer is not None:
        version = run.flush_buffer._version
        run._flush()
        assert run.flush_buffer.nbytes == 2 * cache_bytes(CPU) and run.flush_buffer._version == version
    calls = []
    monkeypatch.setattr(_Runner, "_flush", lambda self: calls.append("flush"))
    run._measure(lambda: calls.append("run"))
    assert calls == ["run"] * WARMUP + ["flush", "run"] * 4


def test_in_a_step_the_kernels_run_in_order_on_their_own_results():
    """In a profiled step, the model's parameters are those of an eager step; afterwards they are as before."""
    x = torch.randn(4, 6)
    y = torch.randint(3, (4,))
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = capture(model, nn.CrossEntropyLoss(), optimizer, (x, y))
    before = [p.clone() for p in model.parameters()]
    runner = step_runner(step)
    for node, value in runner.start.items():
        if value.dtype == torch.float32 and "optimizer" in step.names[step.placeholders.index(node)]:
            value.zero_()
    seen = []
    for _ in range(2):
        runner._run(lambda k, call: seen.append(k) or call())
    assert seen == 2 * [k for k, nodes in enumerate(step.nodes) if nodes]
    profiled = [p.detach().clone() for p in model.parameters()]
    runner.__exit__()
    assert all(map(torch.equal, before, model.parameters())) and not any(map(torch.equal, before, profiled))
    for _ in range(2):
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, profiled, model.parameters()))


def test_a_profiled_step_takes_no_more_device_memory_than_the_step():
    """Tensors of the user are not copied on the device, nor on the host if the step leaves them unchanged."""
    step = captured(frozen=["stem.0.weight"])
    runner = step_runner(step)
    saved = {storage.data_ptr() for storage, _ in runner._saved}
    for node, name, source in zip(step.placeholders, step.names, step.sources, strict=True):
        if source is not None:
            memory = source.untyped_storage().data_ptr()
            assert runner.start[node].untyped_storage().data_ptr() == memory
            if isinstance(source, nn.Parameter):
                assert (memory in saved) is (name != "stem.0.weight"), name


@pytest.mark.parametrize("host_bytes", [0, 2**40])
def test_a_failed_step_leaves_the_users_tensors(host_bytes, monkeypatch):
    step = captured()
    before = [t.clone() for t in step.sources if t is not None]
    monkeypatch.setattr(profiler, "available", lambda: (host_bytes, ""))
    if host_bytes:
        last = [nodes[0] for nodes in step.nodes if nodes][-1]
        monkeypatch.setattr(last, "target", lambda *args, **options: 1 / 0)
    with pytest.raises(ProfileError, match="cannot be run to profile it" if host_bytes else "on the host, which has 0"):
        measure(step, "cpu", repeats=1, cache="step")
    assert all(map(torch.equal, before, [t for t in step.sources if t is not None]))


def test_tied_tensors_stay_tied():
    model = nn.Linear(4, 4, bias=False)
    model.twin = nn.Parameter(model.weight.data.T)  # a view of the same memory
    model.forward = lambda x: x @ model.twin @ model.weight
    step = capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), (torch.ones(2, 4), torch.ones(2, 4)))
    runner = step_runner(step)
    places = {
        runner.start[n].untyped_storage().data_ptr()
        for n, s in zip(step.placeholders, step.sources, strict=True)
        if s is model.weight or s is model.twin
    }
    assert places == {model.weight.untyped_storage().data_ptr()}
    moved = StepRunner(step, CPU, _Runner(step, CPU, 1).devices, is_moved=True)
    copies = {
        moved.start[n].untyped_storage().data_ptr()
        for n, s in zip(step.placeholders, step.sources, strict=True)
        if s is model.weight or s is model.twin
    }
    assert len(copies) == 1 and not copies & places


def test_indices_are_in_range_and_not_all_the_same():
    step = shared("lstm")
    run = _Runner(step, CPU, 1)
    (embedding,) = [n[0] for n in step.nodes if n and "embedding.default" in str(n[0].target)]
    indices = torch.cat([run._inputs(embedding)[0][1].flatten() for _ in range(20)])
    assert indices.min() >= 0 and indices.max() < 40 and len(indices.unique()) > 5


def test_equal_kernels_are_measured_once():
    step = shared()
    durations = measure(step, "cpu", repeats=1).durations_ns
    convolutions = [k for k, n in enumerate(step.nodes) if n and str(n[0].target) == "aten.convolution.default"]
    convolution_ns = [durations[k] for k in convolutions]
    assert len(convolution_ns) == 3 and convolution_ns[1] == convolution_ns[2]


@pytest.mark.parametrize(
    ("cache", "fails", "ends"),
    [
        ("cold", r"^kernel \d+ \(aten.addmm.default\) cannot be run alone: ", "was over at kernel 0 of "),
        ("step", "^the step cannot be run to profile it: ", "was over before a step was measured; allow more seconds$"),
    ],
)
def test_unrunnable_kernels_and_timeouts_are_reported(cache, fails, ends):
    step = captured()
    node = next(n[0] for n in step.nodes if n and str(n[0].target) == "aten.addmm.default")
    node.args = (node.args[0], node.args[2], node.args[1])  # operands in the wrong order
    with pytest.raises(ProfileError, match=fails):
        measure(step, "cpu", repeats=1, cache=cache)
    with pytest.raises(ProfileError, match=f"^the time for profiling {ends}"):
        measure(shared(), "cpu", repeats=1, seconds=-1, cache=cache)


def test_durations_and_workspaces_are_put_in():
    # 30 + 40 instead of 5 + 6; modeled variants are dropped.
    program = with_profile(PROGRAM, PROFILE)
    assert [(k.duration_ns, k.workspace, k.variants) for k in program.kernels] == [(30, 1, ()), (40, 2, ())]
    unknown = with_profile(PROGRAM, replace(PROFILE, workspaces=None))
    assert [(k.duration_ns, k.workspace) for k in unknown.kernels] == [(30, 7), (40, 0)]


@pytest.mark.parametrize("profile", [PROFILE, replace(PROFILE, workspaces=None, cache="step", event_ns=3)])
def test_a_profile_survives_a_round_trip(tmp_path, profile):
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    assert path_of(replace(profile, program="a/b c")) == PROFILES / "a_b_c-m.json"


def test_attention_runs_backward_with_what_its_forward_pass_has_drawn():
    """The state is on the host, where the kernel reads it: a GPU address would crash the process."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            x = self.inner(x).view(2, 3, 2, 4).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    model = Attention()
    x = torch.randn(2, 3, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = capture(model, lambda out, y: out.sum(), optimizer, (x, x), as_cuda=True)
    nodes = [n[0] for n in step.nodes if n]
    forward, backward = (
        next(n for n in nodes if str(n.target) == f"aten._scaled_dot_product_efficient_attention{end}")
        for end in (".default", "_backward.default")
    )
    random_state = torch.tensor(7), torch.tensor(11)
    forward.target = lambda q, *args, **options: (q, q, *random_state)
    args, _ = _Runner(step, CPU, 1)._inputs(backward)
    bound = dict(zip((a.name for a in backward.target._schema.arguments), args, strict=False))
    assert bound["philox_seed"] is random_state[0] and bound["philox_offset"] is random_state[1]


def test_kernels_in_a_row_take_no_longer_than_the_row():
    assert limit_to_row([10_000, 10_000, 100_000], 114_000) == [8000, 8000, 98_000]  # each 2,000 less
    assert limit_to_row([5, 6], 20) == [5, 6]  # gaps belong to no kernel
    # 667 less is more than half of the short ones: they are halved, and all three are scaled from 2,333 to 2,000.
    assert limit_to_row([1000, 1000, 2000, 0], 2000) == [429, 429, 1143, 0]


def test_compute_bound_kernels_carry_what_steps_in_a_row_take_longer():
    assert slow_down([10, 30, 60], [True, False, True], 35) == [15, 30, 90]
    assert slow_down([10, 30], [True, False], -5) == [10, 30] == slow_down([10, 30], [False, False], 5)


@pytest.mark.parametrize(("lead_s", "expected"), [(0.001, 3_000_000), (0.0, None)])
def test_steps_in_a_row_count_if_the_device_is_behind_the_host(lead_s, expected, monkeypatch):
    """``lead_s``: seconds by which the host has issued its steps before the device ends them."""
    waits = iter([0.0, lead_s])
    steps = []
    clock = SimpleNamespace(now=0.0)

    class Event:
        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            steps.append(self)

        def elapsed_time(self, other):
            return 3.0 if steps.index(other) > 2 else 1.0  # clocks settle after two steps

    def synchronize():
        clock.now += next(waits)

    for name, double in {"Event": Event, "synchronize": synchronize, "device": lambda device: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(profiler.time, "perf_counter", lambda: clock.now)
    runner = StepRunner.__new__(StepRunner)
    runner.device = CPU
    runner._run = lambda around: setattr(clock, "now", clock.now + 0.1)
    assert runner.sustained_ns() == expected and len(steps) == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("cache", ["cold", "hot", "step"])
@pytest.mark.parametrize("network", ["lstm", "resnet"])
def test_on_a_gpu(network, cache, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", network != "lstm")  # cuDNN's RNNs cannot be captured
    step = captured(network, "cuda")
    before = torch.cuda.memory_allocated()
    profile = measure(step, "cuda", cache=cache)
    assert (profile.event_ns > 0) == (cache != "hot")
    assert torch.cuda.memory_allocated() - before < 2**26  # only what libraries keep
    assert all((ns > 0) == bool(nodes) for ns, nodes in zip(profile.durations_ns, step.nodes, strict=True))
    assert profile.workspaces is not None and len(profile.workspaces) == len(step.nodes)
    assert with_profile(step.program.with_durations(profile.durations_ns), profile).ideal_ns > 0
    measure(captured(), "cuda", str(Machine.load("h200").name), repeats=2, cache=cache)  # captured on the CPU
