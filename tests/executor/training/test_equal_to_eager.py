"""Tests that training under a plan is bit-identical to eager PyTorch.

It compares losses, parameters, buffers, optimizer state and random numbers. ``CASES`` is a table of training loops,
each captured once and trained under every kind of plan.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from executor.capture.reach import CaptureError
from tests.executor.networks import CLASSES, NETWORKS, Attention, ResNet, adamw, images, sgd, words
from tests.executor.training.programs import Loop, Twins, custom, network, standard, under_every_plan

CASES: dict[str, Callable[[], Loop]] = {}
NIGHTLY = {
    "vgg16",
    "unet",
    "rnn",
    "gru",
    "lstm_both_ways",
    "checkpoint",
    "reentrant_checkpoint",
    "accumulated_gpt2",
    "scaler_resnet",
    "scaler_gpt2",
    "warm_up",
    "foreach_gpt2",
    "fused_gpt2",
    "gradients_kept_in_bfloat16",
    "one_cycle_of_momentum",
    "numbers_of_rmsprop",
    "numbers_of_nadam",
    "numbers_of_adamax",
    "numbers_of_adadelta",
    "numbers_of_rprop",
    "foreach_adamw",
    "foreach_adagrad",
    "foreach_rmsprop",
    "fused_adam",
    "fused_adagrad",
    "skipped_foreach",
    "foreach_adamw_from_zero",
    "fused_sgd_from_zero",
    "distillation",
}
CHECKED = {"small", "metrics", "accumulated", "gradients_kept", "skipped_at_first", "muon"}  # the others by night


def case(make: Callable[[], Loop]) -> Callable[[], Loop]:
    CASES[make.__name__] = make
    return make


def net(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 5))


def pairs(_: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8), torch.randint(5, (8,))


# ------------------------------------------------------------------------------------------------- networks and layers

for name in ("vgg16", "resnet", "unet", "gpt2", "lstm", "small"):
    CASES[name] = partial(network, name, sgd if name in ("vgg16", "unet", "small") else adamw)


class Recurrent(nn.Module):
    """Bidirectional recurrent network with two layers and dropout between them."""

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = cell(8, 8, 2, dropout=0.3, bidirectional=True, batch_first=True)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class ChannelsLast(ResNet):
    def __init__(self) -> None:
        super().__init__(8)  # with 4, oneDNN's backward of a strided 1x1 convolution overruns its buffer on AVX2
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous(memory_format=torch.channels_last))


class Checkpointed(ResNet):
    """ResNet whose blocks, with dropout and batch norm, use activation checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.Sequential(*(nn.Sequential(block, nn.Dropout(0.2)) for block in self.blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Attentions(nn.Module):
    """Fused attention with dropout and with a mask, and PyTorch's encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.first = Attention(16, 2, 0.2)
        self.second = nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True)
        self.out = nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = x + self.first(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        x = x + F.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.1)
        return self.out(self.second(x)).transpose(1, 2)


def vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 3, 8), torch.randint(CLASSES, (3,))


CASES |= {
    "rnn": partial(network, (lambda: Recurrent(nn.RNN), vectors), adamw),
    "gru": partial(network, (lambda: Recurrent(nn.GRU), vectors), sgd),
    "lstm_both_ways": partial(network, (lambda: Recurrent(nn.LSTM), vectors), adamw),
    "channels_last": partial(network, (ChannelsLast, images(8)), adamw),
    "checkpoint": partial(network, (lambda: Checkpointed(False), images(8)), adamw),
    "reentrant_checkpoint": partial(network, (lambda: Checkpointed(True), images(8)), sgd),
    "checkpoint_in_micro_batches": partial(network, (lambda: Checkpointed(False), images(8)), sgd, accumulate=2),
    "attention": partial(network, (Attentions, words), adamw),
}


# ------------------------------------------------------------------------------------------- micro-batches and clipping

CASES |= {
    "clipped": partial(network, "small", adamw, clip_norm=0.05),
    "accumulated": partial(network, "small", sgd, accumulate=3, clip_norm=0.05),
    "accumulated_gpt2": partial(network, "gpt2", adamw, accumulate=2, clip_norm=0.05),
    "losses_added": partial(network, "mlp", adamw, accumulate=2, average=False),
    "gradients_kept": partial(network, "small", adamw, clip_norm=0.05, keep_grads=True),
    "gradients_kept_in_micro_batches": partial(network, "mlp", sgd, accumulate=2, clip_norm=0.05, keep_grads=True),
    "gradients_kept_in_bfloat16": partial(network, "mlp", sgd, autocast=torch.bfloat16, keep_grads=True),
}


# ------------------------------------------------------------------------------------------------------ mixed precision


def layer_used_twice() -> nn.Module:
    """Creates a layer used twice, whose weight autocast casts once."""
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.GELU(), layer)


def mixed(name: str, optimizer: Any, bad: tuple[int, ...] = (), **options: Any) -> Loop:
    """Uses autocast and a scaler; batches with indices in ``bad`` are infinite, so their updates are skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    loop = network(name, optimizer, autocast=torch.bfloat16, scaler=scaler, **options)
    batch = loop.batch

    def some_are_infinite(number: int) -> tuple[Tensor, Tensor]:
        x, y = batch(number)
        return x * torch.inf if number in bad else x, y

    loop.batch = some_are_infinite
    return loop


@case
def scaler_off_in_a_step() -> Loop:
    """The custom step calls every method of a disabled scaler, which lacks the attributes of others."""
    model = net(8, 32)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cuda", enabled=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=scaler.is_enabled()):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach() * scaler.get_scale()

    return custom(step, [model], [optimizer], pairs)


CASES |= {
    "layer_used_twice": partial(network, (layer_used_twice, pairs), adamw, autocast=torch.bfloat16),
    "scaler_resnet": partial(mixed, "resnet", sgd),
    "scaler_gpt2": partial(mixed, "gpt2", adamw),
    "scaler_and_clipping": partial(mixed, "small", adamw, clip_norm=0.1),
    "scaler_in_micro_batches": partial(mixed, "mlp", adamw, accumulate=2, clip_norm=0.05),
    "scaler_off": partial(network, "small", adamw, clip_norm=0.1, scaler=torch.amp.GradScaler("cpu", enabled=False)),
    "skipped": partial(mixed, "small", adamw, (1, 3, 4)),
    "skipped_at_first": partial(mixed, "small", sgd, (0, 2, 5)),
    "skipped_foreach": partial(mixed, "mlp", lambda m: torch.optim.AdamW(m.parameters(), foreach=True), (0, 2, 5)),
    "skipped_foreach_sgd": partial(
        mixed, "mlp", lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True), (1, 3)
    ),
    "skipped_fused": partial(mixed, "mlp", lambda m: torch.optim.AdamW(m.parameters(), fused=True), (0, 2, 5)),
}


@case
def micro_batches_in_a_list() -> Loop:
    """The custom step itself implements micro-batches, mixed precision and gradient clipping."""
    model = net(8, 32)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def step(batches: list[Any]) -> dict[str, Tensor]:
        total = torch.zeros(())
        for x, y in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y) / len(batches)
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return {"loss": total, "norm": norm}

    return custom(step, [model], [optimizer], lambda _: ([pairs(), pairs()],), others=scaler.state_dict)


# --------------------------------------------------------------------------------------------- optimizers and schedules


def scheduled(name: str, optimizer: Any, make: Callable[[Any], Any]) -> Loop:
    loop = network(name, optimizer)
    schedule = make(loop.optimizer)
    loop.after = lambda _: schedule.step()
    return loop


S = torch.optim.lr_scheduler
CASES |= {
    "cosine": partial(scheduled, "small", sgd, lambda o: S.CosineAnnealingLR(o, 5)),
    "one_cycle": partial(scheduled, "mlp", adamw, lambda o: S.OneCycleLR(o, 0.1, total_steps=20)),  # beta1, too
    "one_cycle_of_momentum": partial(scheduled, "mlp", sgd, lambda o: S.OneCycleLR(o, 0.1, total_steps=20)),
    "warm_up": partial(
        scheduled, "gpt2", adamw, lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, 1.0, 2), S.StepLR(o, 1)], [2])
    ),
    "rate_in_a_tensor": partial(
        scheduled,
        "mlp",
        lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1), momentum=0.9),
        lambda o: S.ExponentialLR(o, 0.5),
    ),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **form: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True, **form),
    "adam": lambda p, **form: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, **form),
    "adamw": lambda p, **form: torch.optim.AdamW(p, lr=0.01, **form),
    "adagrad": lambda p, **form: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1, **form),
    "rmsprop": lambda p, **form: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, weight_decay=0.1, **form),
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
}


def numbers(
    name: str, size: str = "mlp", factors: tuple[float, ...] = (1, 0.7, 0.3), parts: int = 0, **form: bool
) -> Loop:
    """Multiplies all numbers of two different parameter groups by ``factors`` from step to step.

    Args:
        parts: approximate number of buckets for multi-tensor updates.
    """

    def make(model: nn.Module) -> torch.optim.Optimizer:
        every = list(model.parameters())
        return OPTIMIZERS[name]([{"params": every[:3]}, {"params": every[3:], "lr": 0.02}], **form)

    nbytes = sum(p.nbytes for p in network(size).model.parameters())
    loop = network(size, make, **({"bucket_bytes": nbytes // parts} if parts else {}))
    before = [dict(group) for group in loop.optimizer.param_groups]

    def after(i: int) -> None:
        factor = factors[(i + 1) % len(factors)]
        for group, initial in zip(loop.optimizer.param_groups, before, strict=True):
            for key, value in initial.items():
                if key == "lr" or (type(value) is float and factor):
                    group[key] = value * factor
                elif isinstance(value, tuple) and factor:
                    group[key] = tuple(v * factor for v in value)

    after(-1)
    loop.after = after
    return loop


CASES |= {f"numbers_of_{name}": partial(numbers, name) for name in OPTIMIZERS}
CASES |= {
    f"foreach_{name}": partial(numbers, name, parts=4, foreach=True)
    for name in ("sgd", "adam", "adamw", "adagrad", "rmsprop")
}
CASES |= {f"fused_{name}": partial(numbers, name, parts=4, fused=True) for name in ("sgd", "adam", "adamw", "adagrad")}
CASES |= {
    "adafactor": partial(
        network, (lambda: net(8, 32), pairs), lambda m: torch.optim.Adafactor(m.parameters(), 0.05, weight_decay=0.01)
    ),
    "foreach_gpt2": partial(numbers, "adam", "gpt2", parts=4, foreach=True),
    "fused_gpt2": partial(numbers, "sgd", "gpt2", parts=4, fused=True),
    "adamw_from_zero": partial(numbers, "adamw", factors=(0, 1, 0.5), foreach=False),
    "foreach_adamw_from_zero": partial(numbers, "adamw", factors=(0, 1, 0.5), foreach=True),
    "fused_adamw_from_zero": partial(numbers, "adamw", factors=(0, 1, 0.5), fused=True),
    "fused_sgd_from_zero": partial(numbers, "sgd", factors=(0, 1, 0.5), fused=True),
}


# ---------------------------------------------------------------------------------------------- steps of the user's own


def trained(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    loss: Callable[[Tensor, Tensor], Any] | None = None,
    **fields: Any,
) -> Loop:
    """Builds a loop of ``zero_grad``, ``loss``, ``backward`` and a step of each optimizer.

    ``loss`` returns the loss and further results of the step.
    """
    compute = loss or (lambda x, y: [F.cross_entropy(model(x), y)])

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        value, *results = compute(x, y)
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        return value.detach(), *results

    return custom(step, [model], optimizers, pairs, **fields)


@case
def muon() -> Loop:
    """Uses Muon for matrices and another optimizer for all other parameters."""
    model = net(8, 32, 32)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return trained(model, [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(others, 0.01)])


@case
def gradients_returned() -> Loop:
    """The step has no optimizer and returns gradients."""
    loop = network("small")

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        loss = F.cross_entropy(loop.model(x), y)
        return [loss, *torch.autograd.grad(loss, list(loop.model.parameters()))]

    return custom(step, loop.models, [], loop.batch)


@case
def state_and_batch_returned() -> Loop:
    """The step returns a clone of swapped state and a view of the batch."""
    model = net(8, 32)
    return trained(model, [adamw(model)], lambda x, y: [F.cross_entropy(model(x), y), model[0].weight.clone(), x[1:]])


@case
def list_of_an_optimizers_class() -> Loop:
    """The optimizer decays its rate by a tensor in a list that its class holds."""

    class Decaying(torch.optim.SGD):
        steps: ClassVar = [torch.zeros(())]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.steps[0].add_(1)
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad * (0.1 / self.steps[0]))

    model = net(8, 32)
    loop = trained(model, [Decaying(model.parameters(), 0.1)], others=lambda: Decaying.steps[0].item())
    loop.options = {"bucket_bytes": 256}  # its groups are not divided, of which it steps the first only
    return loop


@case
def data_assigned() -> Loop:
    """The step assigns ``data``: of a perturbation, of gradients, and of a weight that it restores."""
    model = net(8, 32)
    weight = model[0].weight

    def loss(x: Tensor, y: Tensor) -> list[Tensor]:
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            (slope,) = torch.autograd.grad(F.cross_entropy(model(x + delta), y), delta)
            delta.data = (delta + 0.1 * slope.sign()).clamp(-0.1, 0.1)
            delta.data.mul_(0.5)
        before = weight.data
        weight.data = before * 0.5
        half = F.cross_entropy(model(x + delta), y)
        weight.data = before
        half.backward()
        for p in model.parameters():
            p.grad.data = p.grad.data * 0.5
        return [F.cross_entropy(model(x), y), delta.detach()]

    return trained(model, [adamw(model)], loss)


@case
def metrics() -> Loop:
    """The loss function returns metrics besides the loss."""

    def loss_fn(out: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return F.cross_entropy(out, y), {"right": (out.argmax(1) == y).sum(), "logits": out, "none": None}

    model = net(8, 32)
    return standard(model, loss_fn, adamw(model), pairs)


@case
def average_after_the_step() -> Loop:
    model = net(8, 32)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loop = trained(model, [torch.optim.AdamW(model.parameters(), 0.01)], after=lambda _: mean.update_parameters(model))
    loop.models = [model, mean]
    return loop


class Adapted(nn.Module):
    """Frozen layer with a low-rank adapter (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * (self.drop(x) @ self.a.T @ self.b.T)


@case
def adapters() -> Loop:
    model = net(8, 32, 32)
    for i, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            model[i] = Adapted(layer)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return trained(model, [torch.optim.AdamW(trainable, 0.01)])


@case
def gradient_penalty() -> Loop:
    """WGAN-GP (Gulrajani et al., 2017): two models and losses, noise, and a second-order gradient."""
    make = net(5, 32)
    judge = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizers = [torch.optim.Adam(m.parameters(), 0.01, (0.5, 0.9)) for m in (make, judge)]

    def step(x: Tensor, _: Tensor) -> dict[str, Tensor]:
        real = x[:, :5]
        fake = make(torch.randn(len(x), 5))
        mix = torch.lerp(real, fake.detach(), torch.rand(len(x), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mix).sum(), mix, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        of_judge = judge(fake.detach()).mean() - judge(real).mean() + 10 * penalty
        optimizers[1].zero_grad()
        of_judge.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        of_make = -judge(fake).mean()
        of_make.backward()
        optimizers[0].step()
        return {"judge": of_judge.detach(), "make": of_make.detach(), "penalty": penalty.detach()}

    return custom(step, [make, judge], optimizers, pairs, options={"keep_grads": True})


@case
def distillation() -> Loop:
    teacher = net(8, 64).eval()
    student = net(8, 16)

    def loss(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            soft = teacher(x).softmax(1)
        out = student(x)
        divergence = F.kl_div(out.log_softmax(1), soft, reduction="batchmean")
        return F.cross_entropy(out, y) + divergence, out.detach().argmax(1)

    loop = trained(student, [adamw(student)], loss)
    loop.models = [teacher, student]
    return loop


# ---------------------------------------------------------------------------------------------------------------- hooks


@case
def around_the_optimizer() -> Loop:
    loop = network("mlp", sgd)

    def clip(*_: object) -> None:
        loop.model[-1].weight.grad.clamp_(-0.01, 0.01)

    def project(*_: object) -> None:
        loop.model[0].weight.data.clamp_(-0.2, 0.2)

    loop.optimizer.register_step_pre_hook(clip)
    loop.optimizer.register_step_post_hook(project)
    return loop


@case
def optimizer_in_backward() -> Loop:
    """Steps the optimizer of a parameter within the backward pass."""
    loop = network("mlp", sgd)
    bias = loop.optimizer.param_groups[0]["params"].pop()
    inner = torch.optim.SGD([bias], lr=0.01)

    def step(_: Tensor) -> None:
        inner.step()
        inner.zero_grad()

    bias.register_post_accumulate_grad_hook(step)
    return loop


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.filterwarnings(
    "error:Detected call of `lr_scheduler", "ignore:The epoch parameter", "ignore:None of the inputs have requires_grad"
)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.nightly] * (n in NIGHTLY)) for n in CASES])
def test_equal_to_eager(name: str) -> None:
    """Tests every kind of plan at its smallest feasible limit, with micro-batches one by one and at once."""
    twins = Twins(CASES[name])
    reruns = ("reruns",) if name in NETWORKS else ()
    under_every_plan(twins, twins.captured(check=name in CHECKED), zlib.crc32(name.encode()), reruns)


SCALER = "a GradScaler decides after the last gradient"
KEPT = "keep_grads keeps all gradients"
NORM = "clip_norm needs the norm of all gradients first"
LATE = {  # cases whose update cannot move into the backward pass, with the cause
    "clipped": NORM,
    "accumulated": NORM,
    "accumulated_gpt2": NORM,
    "gradients_kept": KEPT,
    "gradients_kept_in_micro_batches": KEPT,
    "gradients_kept_in_bfloat16": KEPT,
    "scaler_off_in_a_step": "share a result of aten.clamp.default .*test_equal_to_eager.py",
    "scaler_resnet": SCALER,
    "scaler_gpt2": SCALER,
    "scaler_and_clipping": SCALER,
    "scaler_in_micro_batches": SCALER,
    "scaler_off": NORM,
    "skipped": SCALER,
    "skipped_at_first": SCALER,
    "skipped_foreach": SCALER,
    "skipped_foreach_sgd": SCALER,
    "skipped_fused": SCALER,
    "micro_batches_in_a_list": SCALER,
    "gradients_returned": "the step has no update",
    "list_of_an_optimizers_class": "share a result of aten.add_.Tensor .*test_equal_to_eager.py",
    "gradient_penalty": KEPT,
}
MOVED = {
    "losses_added",
    "muon",
    "adafactor",
    "numbers_of_sgd",
    "fused_adamw",
    "average_after_the_step",
}  # others by night


@pytest.mark.filterwarnings("ignore:The epoch parameter", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n not in MOVED | LATE.keys())) for n in CASES]
)
def test_equal_with_the_update_in_the_backward_pass(name: str) -> None:
    """Tests every kind of plan with the kernels of the update moved, which is refused by its cause for ``LATE``."""
    twins = Twins(CASES[name])
    options = {"bucket_bytes": 2048, "optimizer_in_backward": True}
    if name in LATE:
        with pytest.raises(CaptureError, match=f"^optimizer_in_backward: .*{LATE[name]}"):
            twins.captured(**options)
        return
    captured = twins.captured(**options)
    update, backward = (
        [k for k, kernel in enumerate(captured.program.kernels) if kernel.phase == phase]
        for phase in ("optimizer", "backward")
    )
    assert update[0] < backward[-1]
    under_every_plan(twins, captured, zlib.crc32(name.encode()))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(CASES.keys() - CHECKED))
def test_the_differential_check_accepts(name: str) -> None:
    Twins(CASES[name]).captured(check=True)
