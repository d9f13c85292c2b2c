"""Tests of capture against eager PyTorch: lifetimes, in-place updates, values, and unchanged user objects."""

import contextlib
import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor import Captured, CaptureError, capture, capture_step, with_roofline
from simulator import Machine, Program

GPU = Machine("test", 2**34, 10**10, 10**10, flops_per_s={"float32": 10**13}, memory_bytes_per_s=4 * 10**11)


class Residual(nn.Module):
    """conv, batch-norm, ReLU, residual sum, pool, dropout, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.stem(x)))
        return self.head(torch.relu(self.body(h) + h))


class Held(nn.Module):
    """Dead values that Python still references: an argument, a local variable, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.tail = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        scaled = 2 * x
        shifted = scaled + 1
        self.last = (3 * shifted).detach()
        return self.tail(self.norm(self.conv(shifted)))


class Branches(nn.Module):
    """One value used three times, tied weights, layer norm, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.norm = nn.LayerNorm(16)
        self.attend = nn.Linear(16, 48)
        self.out = nn.Linear(16, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        q, k, v = self.attend(self.norm(h)).chunk(3, dim=-1)
        h = h + torch.softmax(q @ k.transpose(1, 2) / 4, dim=-1) @ v
        return self.out(h + h.sin() * h.cos()).mean(1)


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8), torch.randint(10, (4,))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(10, (4, 6)), torch.randint(10, (4,))


CASES = [(Residual, images), (Held, images), (Branches, tokens)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer whose bias correction uses Python numbers, which are nodes of the graph."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


def build(model_type: type[nn.Module], batch: Callable[[], tuple[Tensor, Tensor]], optimizer=sgd):
    torch.manual_seed(0)
    model = model_type()
    return model, nn.CrossEntropyLoss(), optimizer(model), batch()


def eager_step(model, loss_fn, optimizer, batch) -> Tensor:
    x, y = batch
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def resident(program: Program) -> list[int]:
    """Returns the bytes of non-persistent tensors alive before each kernel."""
    spans = [
        (u[0], u[-1], t.nbytes)
        for t, u in zip(program.tensors, program.accesses, strict=True)
        if u and not t.persistent
    ]
    return [sum(n for first, last, n in spans if first < k <= last) for k in range(len(program.kernels))]


def state(model: nn.Module, optimizer: torch.optim.Optimizer, batch) -> list[Tensor]:
    moments = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [*model.parameters(), *model.buffers(), *moments, *batch]


@pytest.mark.parametrize(("model_type", "batch"), CASES)
def test_lifetimes_equal_allocator(model_type, batch):
    """Records a step with the profiler, without a dispatch mode, so that gradients are summed in place."""
    training = build(model_type, batch)
    program = capture(*training, machine=GPU, keep_grads=True).program  # gradients live to the end, as in eager mode
    eager_step(*training)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = eager_step(*training)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    live = 0
    position = 0
    ended = 0
    expected = [
        (k.name.split(".")[1], n) for k, n in zip(program.kernels, resident(program), strict=True) if k.name != "marker"
    ]
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
        elif position < len(expected) and event.start_ns() >= ended:
            name, nbytes = expected[position]
            if event.name() == f"aten::{name}":
                # A Python number in an operator (`+= 1`) is a host scalar of 8 bytes while the operator runs.
                assert live - nbytes in (0, 8), (position, name)
                position = position + 1
                ended = event.start_ns() + event.duration_ns()
    assert position == len(expected) and loss.isfinite()


def test_eager_copies_the_gradient_of_a_view_changed_in_place_and_a_capture_does_not() -> None:
    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def step() -> Tensor:
        loss = model(x).view(2, 2, 8).relu_().square().sum()
        loss.backward()
        return loss.detach()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    captured = [k.name for k in capture_step(step).program.kernels]
    with Names():
        step()
    copies = [names.count("aten.copy_.default") for names in (seen, captured)]
    zeros = [names.count("aten.new_zeros.default") for names in (seen, captured)]
    assert (copies, zeros) == ([3, 2], [1, 0])


def run_graph(captured: Captured, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return captured.graph(*inputs)


def values(captured: Captured) -> list[Tensor]:
    """Returns copies of the user's tensors, and zeros for state that does not exist yet."""
    return [
        torch.zeros(node.meta["tensor_meta"].shape) if source is None else source.detach().clone()
        for node, source in zip(captured.placeholders, captured.sources, strict=True)
    ]


@pytest.mark.parametrize(("model_type", "batch", "optimizer"), [(*CASES[0], sgd), (*CASES[1], sgd), (*CASES[2], adam)])
def test_graph_is_bit_identical_to_eager(model_type, batch, optimizer):
    model, loss_fn, optimizer, example = build(model_type, batch, optimizer)
    captured = capture(model, loss_fn, optimizer, example, machine=GPU)
    assert optimizer.param_groups[0].get("capturable") in (None, False) and not optimizer.state
    inputs = values(captured)
    for seed in range(3):
        torch.manual_seed(seed)
        loss = run_graph(captured, inputs)[0]
        torch.manual_seed(seed)
        assert torch.equal(loss, eager_step(model, loss_fn, optimizer, example))
    eager = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {id(p): n for n, p in model.named_parameters()}
    eager |= {f"optimizer.{names[id(p)]}.{k}": v for p, s in optimizer.state.items() for k, v in s.items()}
    graph = dict(zip(captured.names, inputs, strict=True))
    assert {n for n in graph if not n.startswith("input")} >= {n for n, v in eager.items() if isinstance(v, Tensor)} - {
        "out.weight"  # tied to embed.weight
    }
    for name, tensor in graph.items():
        if name in eager:
            assert torch.equal(tensor, eager[name]), name


def test_capture_leaves_the_users_objects_unchanged():
    model, loss_fn, optimizer, example = build(Held, images)
    eager_step(model, loss_fn, optimizer, example)
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    identities = [id(t) for t in state(model, optimizer, example)]
    attribute = model.last
    rng = (torch.get_rng_state(), random.getstate())
    capture(model, loss_fn, optimizer, example, machine=GPU)
    with pytest.raises(CaptureError):
        capture(model, lambda x, y: x.nonzero().sum(), optimizer, example, machine=GPU)
    assert identities == [id(t) for t in state(model, optimizer, example)]
    assert model.last is attribute and parameter.grad.eq(1).all()
    assert torch.equal(rng[0], torch.get_rng_state()) and rng[1] == random.getstate()
    after = (model.state_dict(), optimizer.state_dict())
    assert str(before[1]["param_groups"]) == str(after[1]["param_groups"])
    for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new
    assert not torch.compiler.is_compiling()


def test_no_memory_of_the_models_size():
    with torch.device("meta"):
        model = nn.Linear(10**6, 10**6, bias=False)  # 4 TB
        batch = torch.empty(8, 10**6), torch.empty(8, 10**6)
    program = capture(model, nn.MSELoss(), sgd(model), batch, machine=GPU).program
    assert program.peak_bytes > 3 * 4 * 10**12  # weight, momentum, gradient


def test_batch_norm_and_in_place():
    program = capture(*build(Residual, images), machine=GPU).program
    index = {t.name: i for i, t in enumerate(program.tensors)}
    norms = [k for k in program.kernels if k.kind == "norm" and k.phase == "forward"]
    assert len(norms) == 2 and all(k.recomputable for k in norms)
    for name in ("norm.running_mean", "norm.running_var"):
        assert index[name] in norms[0].outputs and index[name] not in norms[0].inputs
    counter = index["norm.num_batches_tracked"]
    (count,) = (k for k in program.kernels if counter in k.outputs)
    assert counter in count.inputs and not count.recomputable
    relu = next(k for k in program.kernels if k.name == "aten.relu_.default")
    assert relu.inputs == relu.outputs and relu.recomputable
    pool = next(k for k in program.kernels if k.kind == "pool" and k.phase == "forward")
    assert len(pool.outputs) == 2
    updates = [k for k in program.kernels if k.phase == "optimizer" and k.name != "marker"]
    assert updates and {k.kind for k in updates} == {"optimizer"}
    parameters = [i for i, t in enumerate(program.tensors) if t.kind == "parameter"]
    written = {t for k in updates for t in k.outputs if not k.recomputable}
    assert written >= set(parameters)
    # one sum of gradients, where the shortcut joins, done in place
    sums = [k for k in program.kernels if k.phase == "backward" and k.name.startswith("aten.add")]
    assert [k.name for k in sums] == ["aten.add_.Tensor"]
    assert Program.from_dict(program.to_dict()).fingerprint == program.fingerprint


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_has_its_flops(causal):
    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        loss = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).sum()
        return torch.autograd.grad(loss, (q, k, v))

    inputs = [torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3)]
    program = capture_step(step, *inputs, machine=GPU).program
    # Two products of 2 x 3 heads, 8 x 8 pairs and size 4, and five backward; half of them where no token sees ahead.
    product_flops = 2 * 2 * 3 * 8 * 8 * 4 // (2 if causal else 1)
    assert [k.flops for k in program.kernels if k.flops] == [2 * product_flops, 5 * product_flops]
    assert max(t.nbytes for t in program.tensors) == 4 * 2 * 3 * 8 * 4  # no tensor of pairs


def test_costs_and_mappings():
    captured = capture(*build(Residual, images), machine=GPU)
    program = captured.program
    stem = program.kernels[0]
    assert stem.kind == "conv" and stem.flops == 2 * 4 * 8 * 8 * 8 * 3 * 9
    assert stem.bytes == 4 * (4 * 3 * 64 + 8 * 3 * 9 + 8 + 4 * 8 * 64)
    assert stem.duration_ns == GPU.kernel_ns("conv", stem.flops, stem.bytes)
    for kernel, nodes in zip(program.kernels, captured.nodes, strict=True):
        assert (kernel.name == "marker") == (not nodes)
        results = {captured.values[n] for n in nodes if n in captured.values}
        assert results <= set(kernel.accesses)
        assert not nodes or str(nodes[0].target) == kernel.name
    for node, name in zip(captured.placeholders, captured.names, strict=True):
        if node in captured.values:
            assert program.tensors[captured.values[node]].persistent and name
    assert [program.tensors[captured.values[n]].nbytes for n in captured.outputs] == [4]
    tied = capture(*build(Branches, tokens), machine=GPU)
    assert sum(t.kind == "parameter" for t in tied.program.tensors) == 5  # out.weight is embed.weight
    recaptured = capture(*build(Residual, images), machine=GPU).program
    assert recaptured.fingerprint == program.fingerprint


def test_roofline_scales_exactly():
    program = capture(*build(Residual, images), machine=GPU).program
    scaled = with_roofline(program, GPU, iteration_ns=7_000_001)
    assert scaled.ideal_ns == 7_000_001
    for slow, fast in zip(program.kernels, scaled.kernels, strict=True):
        assert abs(fast.duration_ns - slow.duration_ns * 7_000_001 / program.ideal_ns) <= 1
    with pytest.raises(ValueError, match="iteration_ns"):
        with_roofline(program, GPU, iteration_ns=0)


TABLE = torch.arange(12.0).reshape(3, 4)


def test_capture_step_finds_state_of_any_callable():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    running = {"sum": torch.zeros(3)}

    def step(x: Tensor) -> dict[str, Tensor]:
        out = model(x) + TABLE.sum(1) * torch.tensor(2.0)
        running["sum"].add_(out.detach().sum(0))
        out.square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"out": out.detach()}

    x = torch.randn(2, 4)
    captured = capture_step(step, x, machine=GPU)
    assert sorted(captured.names) == [
        "TABLE",
        "input",
        "model.bias",
        "model.weight",
        "optimizer.model.bias.momentum_buffer",
        "optimizer.model.weight.momentum_buffer",
        "running.sum",
    ]
    assert {k.phase for k in captured.program.kernels} == {"forward", "backward", "optimizer"}
    inputs = values(captured)
    (out,) = run_graph(captured, inputs)
    assert torch.equal(out, step(x)["out"])
    actual = dict(zip(captured.names, inputs, strict=True))
    assert torch.equal(actual["model.weight"], model.weight) and torch.equal(actual["running.sum"], running["sum"])

    inference = capture_step(nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval(), x, machine=GPU)
    assert [k.name.split(".")[1] for k in inference.program.kernels if k.name != "marker"] == ["addmm", "relu"]
    assert {t.kind for t in inference.program.tensors if t.persistent} == {"parameter", "input"}


def test_numbers_read_in_the_untraced_step_are_forgotten(monkeypatch):
    """The numbers are forgotten even if PyTorch's setting that ignores them is lost in between."""
    monkeypatch.setattr(ShapeEnv, "ignore_fresh_unbacked_symbols", lambda self: contextlib.nullcontext())
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    captured = capture(model, nn.MSELoss(), optimizer, (torch.randn(3, 4), torch.randn(3, 2)))
    assert captured.program.kernels[-1].phase == "optimizer"


def test_updates_of_many_parameters_are_in_buckets_of_64_mib() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(9)))  # of 16 MiB each
        batch = torch.empty(1, 2048), torch.empty(1, 2048)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    captures = [
        capture(model, nn.MSELoss(), optimizer, batch, machine=GPU, **options).program
        for options in ({}, {"bucket_bytes": None})
    ]
    assert [sum("_foreach_add_" in k.name for k in program.kernels) for program in captures] == [3, 1]
