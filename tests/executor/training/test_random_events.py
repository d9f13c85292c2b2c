"""Tests random events between steps: each later step equals eager PyTorch bit by bit, or its refusal names the event.

A program draws a small model, an optimizer, the way it is planned, and what the user's loop does around each step
(``EVENTS``). It runs twice from equal seeds, with planned and with eager steps. After each step, everything that the
user can see must be equal. A refused step runs eagerly instead, sometimes after a new capture.
"""

from __future__ import annotations

import copy
import gc
import io
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from executor import PlannedStep, PlannedSteps, capture_step, fit
from simulator import Plan
from tests.executor.training.programs import GPU, bit_identical, drawn_at_night, random_plan
from tests.executor.training.test_ambient_modes import MODES, bfloat16
from tests.executor.training.test_hooks import KINDS, hook_of
from tests.executor.training.test_random_steps import CLASSES, FEATURES, REFUSALS, WIDTH, Twin

ROWS = 6
STEPS = 4
BLOCKS = (
    "convolution",
    "attention",
    "layer",
    "batch norm",
    "dropout",
    "rebound buffer",
    "written buffer",
    "appended list",
    "recent tensors",
    "logged tensors",
    "boxed state",
    "nonlocal mean",
    "global mean",
    "global list",
    "carried state",
    "own generator",
    "forward hook",
    "gradient hooks",
    "losses",
    "average of weights",
)


class Trainer(Twin):
    """A model and its optimizer with a step that also takes a number, and gradients that may remain after it."""

    divisor = 1.0

    def __init__(self, drawn: Program) -> None:
        super().__init__(drawn)
        self.scale = 1.0
        self.zero_first = drawn.keep_grads

    def step(self, x: Tensor, y: Tensor, *factors: Any) -> Tensor:
        if self.zero_first:
            self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y) * self.scale / self.divisor
        for factor in factors:
            loss = loss * factor
        loss.backward()
        for block in self.blocks:
            block.after_backward(loss)
        self.optimizer.step()
        if not self.zero_first:
            self.optimizer.zero_grad()
        return loss.detach()


@dataclass
class Run:
    """A loop in progress.

    Attributes:
        step: the step that the loop calls.
        rng: source of the events' choices.
        until_end: what is undone when the loop ends.
        modes: contexts around the next step.
        edit: changes the next batch.
        saved: values that one event leaves for another.
    """

    trainer: Trainer
    step: Callable[..., Any]
    rng: random.Random = field(default_factory=random.Random)
    until_end: ExitStack = field(default_factory=ExitStack)
    modes: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    edit: Callable[..., tuple[Any, ...]] | None = None
    saved: dict[str, Any] = field(default_factory=dict)
    log: list[Any] = field(default_factory=list)

    @property
    def model(self) -> Any:
        return self.trainer.model

    @property
    def optimizer(self) -> Any:
        return self.trainer.optimizer

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    def module(self, kind: type[nn.Module]) -> Any:
        """Returns one of the model's modules of a kind, or the last layer."""
        found = [m for m in self.model.modules() if type(m) is kind]
        return self.rng.choice(found) if found else self.model.last


@dataclass(frozen=True)
class Event:
    """Something that a loop does between two steps.

    Attributes:
        act: does it.
        cause: regular expression of the refusal that it may cause; no step is refused because of it if empty.
        stays: whether a new capture may be refused, too.
    """

    act: Callable[[Run], object]
    cause: str = ""
    stays: bool = False


EVENTS: dict[str, Event] = {}


def event(cause: str = "", stays: bool = False) -> Callable[[Callable[[Run], object]], Callable[[Run], object]]:
    """Adds a function to ``EVENTS`` under its name."""

    def add(act: Callable[[Run], object]) -> Callable[[Run], object]:
        EVENTS[act.__name__.replace("_", " ")] = Event(act, cause, stays)
        return act

    return add


# ------------------------------------------------------------------------------------ modes, in force for a step

_GRADIENTS = r"|needs gradients"
for _name, (_context, _) in MODES.items():
    _cause = {
        "no_grad": r"is_grad_enabled" + _GRADIENTS,
        "inference_mode": r"nference|is_grad_enabled" + _GRADIENTS,
        "default dtype": "default_dtype|has type torch.float64",
        "default device": "default_device",
        "deterministic algorithms": "deterministic_algorithms",
        "deterministic cuDNN": "cudnn.deterministic",
        "oneDNN": "mkldnn.enabled",
        "matmul precision": "matmul_precision",
        "autocast": "autocast|bfloat16",
        "autocast of another type": "autocast|float16",
    }.get(_name, _name)
    EVENTS[_name] = Event(
        partial(lambda context, run: run.modes.append(context), _context),
        _cause,
        _name in ("no_grad", "inference_mode") or "autocast" in _name,
    )


@event(r"autocast|bfloat16", stays=True)
def autocast_over_steps(run: Run) -> None:
    run.saved.setdefault("autocast", ExitStack()).enter_context(bfloat16())


@event()
def autocast_ends(run: Run) -> None:
    run.saved.pop("autocast", ExitStack()).close()


@event()
def autocast_disabled(run: Run) -> None:
    run.modes.append(partial(torch.autocast, "cpu", enabled=False))


@event()
def forked_random_state(run: Run) -> None:
    run.modes.append(torch.random.fork_rng)


@event(r"ModuleTracker")
def counted_flops(run: Run) -> None:
    run.modes.append(partial(FlopCounterMode, display=False))


@event()
def profiled(run: Run) -> None:
    run.modes.append(torch.autograd.profiler.profile)


@event(r"saved_tensors_hooks", stays=True)
def rounded_activations(run: Run) -> None:
    def pack(t: Tensor) -> Tensor:
        return t.bfloat16().float() if t.dtype == torch.float32 else t

    run.modes.append(partial(torch.autograd.graph.saved_tensors_hooks, pack, lambda t: t))


@event(r"saved_tensors_hooks", stays=True)
def activations_on_host(run: Run) -> None:
    run.modes.append(torch.autograd.graph.save_on_cpu)


@event(r"anomaly", stays=True)
def anomaly_detection(run: Run) -> None:
    run.modes.append(torch.autograd.detect_anomaly)


# ------------------------------------------------------------------------------------ hooks


def kind_of(run: Run) -> str:
    return run.rng.choice(list(KINDS))


@event(r"hook hook_of\.<locals>\.doubling \(.*\) of .* was (added|exchanged)|hook_of.*(order|number of times)")
def hook_added(run: Run) -> None:
    name = kind_of(run)
    kind = KINDS[name]
    layer = run.module(nn.Linear)
    register = partial(kind.register(SimpleNamespace(model={4: layer}, optimizer=run.optimizer)), **kind.options)
    handle = register(hook_of(kind))
    run.until_end.callback(handle.remove)
    run.saved["hook"] = handle, register, kind


@event(r"hook hook_of\.<locals>\.doubling \(.*\) of .* was (removed|exchanged)|hook_of.*(order|number of times)")
def hook_removed(run: Run) -> None:
    if "hook" in run.saved:
        run.saved.pop("hook")[0].remove()


@event(r"hook hook_of\.<locals>\.doubling \(.*\) of .* was (added|exchanged)|hook_of.*(order|number of times)")
def hook_exchanged(run: Run) -> None:
    if "hook" in run.saved:
        handle, register, kind = run.saved["hook"]
        handle.remove()
        handle = register(hook_of(kind))
        run.until_end.callback(handle.remove)
        run.saved["hook"] = handle, register, kind


# ------------------------------------------------------------------------------------ replaced tensors and modules


@event()
def tensor_replaced(run: Run) -> None:
    for block in run.trainer.blocks:
        for name in ("mean", "hidden", "state"):
            if isinstance(value := getattr(block, name, None), Tensor):
                setattr(block, name, torch.full_like(value, 0.5))


@event()
def running_statistics_replaced(run: Run) -> None:
    for module in run.model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean = torch.ones(WIDTH)
            module.reset_running_stats()


@event()
def data_replaced(run: Run) -> None:
    layer = run.module(nn.Linear)
    layer.weight.data = layer.weight.data.clone() / 2


@event(r"weight was replaced by another parameter|other parts|has a gradient", stays=True)
def parameter_replaced(run: Run) -> None:
    layer = run.module(nn.Linear)
    layer.weight = nn.Parameter(layer.weight.detach() / 2)


@event(r"'?2'? (of|was)|has other parts|has a gradient", stays=True)
def layer_replaced(run: Run) -> None:
    run.model[2] = nn.Linear(WIDTH, CLASSES)


@event(r"extra|has other parts")
def module_added(run: Run) -> None:
    run.trainer.blocks[0].add_module("extra", nn.Linear(2, 2))


@event()
def buffer_added(run: Run) -> None:
    run.model.register_buffer("extra", torch.zeros(2))


@event(r"parametrizations|other parts|weight|has a gradient", stays=True)
def layer_parametrized(run: Run) -> None:
    nn.utils.parametrizations.weight_norm(run.model[0])


@event(r"hook .*L1Unstructured|weight|has a gradient", stays=True)
def weights_pruned(run: Run) -> None:
    if not hasattr(run.model[2], "weight_orig"):
        prune.l1_unstructured(run.model[2], "weight", 3)


@event()
def model_to_double_and_back(run: Run) -> None:
    run.model.double().float()


@event(r"float64")
def model_in_double(run: Run) -> None:
    run.model.double()


@event()
def model_in_float(run: Run) -> None:
    run.model.float()


@event(r"shared with other processes", stays=True)
def model_shared(run: Run) -> None:
    run.model.share_memory()


# ------------------------------------------------------------------------------------ numbers of Python


@event(r"norm\.momentum was")
def norm_momentum_changed(run: Run) -> None:
    for module in run.model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = run.rng.random()


@event(r"scale was")
def number_of_the_trainer(run: Run) -> None:
    run.trainer.scale = run.rng.choice([0.5, 1.0, 2])


# ------------------------------------------------------------------------------------ optimizer and schedule


@event()
def schedule_step(run: Run) -> None:
    run.trainer.schedule.step()


@event(r"optimizer\.lr is a float")
def learning_rate_set(run: Run) -> None:
    run.group["lr"] = run.rng.choice([0.0, 0.02, 1, 0.5])


@event(r"optimizer's lr|optimizer\.lr|lr as a Tensor")
def learning_rate_tensor(run: Run) -> None:
    run.group["lr"] = torch.tensor(0.03)


@event(r"weight_decay")
def weight_decay_set(run: Run) -> None:
    if "weight_decay" in run.group:
        run.group["weight_decay"] = 0.1


@event(r"(momentum|betas|eps|lr_decay)")
def momentum_set(run: Run) -> None:
    if "betas" in run.group:
        run.group["betas"] = (run.rng.choice([0.5, 0.0]), 0.99)
    elif "momentum" in run.group:
        run.group["momentum"] = run.rng.choice([0.5, 0.0])


@event(r"nesterov|amsgrad|maximize")
def flag_set(run: Run) -> None:
    run.group["maximize"] = run.rng.random() < 0.7


@event(r"parameter groups|params")
def group_added(run: Run) -> None:
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@event(r"params|has a gradient", stays=True)
def parameter_dropped(run: Run) -> None:
    if len(run.group["params"]) > 2:
        run.group["params"].pop()


@event()
def optimizer_state_cleared(run: Run) -> None:
    run.optimizer.state.clear()


@event()
def optimizer_state_zeroed(run: Run) -> None:
    for state in run.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = torch.zeros_like(value)


# ------------------------------------------------------------------------------------ freezing and evaluation


@event(r"was (un)?frozen|frozen or unfrozen")
def layer_frozen(run: Run) -> None:
    run.module(nn.Linear).requires_grad_(False)


@event(r"was (un)?frozen|frozen or unfrozen")
def all_unfrozen(run: Run) -> None:
    run.model.requires_grad_(True)


@event()
def evaluation(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.log.append(run.model(torch.ones(ROWS, FEATURES)))
    run.model.train()


@event(r"outputs\.out|is_inference|in inference mode", stays=True)
def evaluation_in_inference_mode(run: Run) -> None:
    run.model.eval()
    with torch.inference_mode():
        run.log.append(run.model(torch.ones(3, FEATURES)))
    run.model.train()


@event(r"eval mode|train mode")
def left_in_eval(run: Run) -> None:
    run.model.eval()


@event(r"eval mode|train mode")
def back_in_train(run: Run) -> None:
    run.model.train()


@event(r"eval mode|train mode")
def one_layer_in_eval(run: Run) -> None:
    run.trainer.blocks[0].eval()


# ------------------------------------------------------------------------------------ state


@event()
def state_saved(run: Run) -> None:
    file = io.BytesIO()
    torch.save((run.model.state_dict(), run.optimizer.state_dict()), file)
    run.saved["state"] = file.getvalue()


@event()
def state_loaded(run: Run) -> None:
    if "state" in run.saved:
        model, optimizer = torch.load(io.BytesIO(run.saved["state"]), weights_only=False)
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)


@event()
def optimizer_loaded(run: Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


@event()
def half_of_the_model_loaded(run: Run) -> None:
    halves = {key: value / 2 for key, value in run.model.state_dict().items() if value.is_floating_point()}
    run.model.load_state_dict(halves, strict=False)


@event(r"was replaced by another parameter|has a gradient", stays=True)
def state_assigned(run: Run) -> None:
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()), assign=True)


@event()
def best_model_restored(run: Run) -> None:
    best = copy.deepcopy(run.model)
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(1)
    run.model.load_state_dict(best.state_dict())


@event()
def weights_changed_in_place(run: Run) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.clamp_(-0.3, 0.3)
    for module in run.model.modules():
        if type(module) is nn.Linear and module.weight.requires_grad and module.weight.is_leaf:
            module.reset_parameters()


@event()
def average_updated(run: Run) -> None:
    average = run.saved.setdefault("average", [p.detach().clone() for p in run.model.parameters()])
    params = [p.detach() for p in run.model.parameters()]
    if len(params) == len(average):
        torch._foreach_lerp_(average, params, 0.1)
    run.log.append([a.clone() for a in average])


@event()
def random_numbers_drawn(run: Run) -> None:
    run.log.append((torch.rand(2), random.random(), np.random.rand()))  # noqa: NPY002


@event()
def generators_seeded(run: Run) -> None:
    torch.manual_seed(5)
    for block in run.trainer.blocks:
        if hasattr(block, "generator"):
            block.generator.manual_seed(4)


# ------------------------------------------------------------------------------------ gradients


@event()
def gradients_zeroed(run: Run) -> None:
    run.rng.choice([run.optimizer, run.model]).zero_grad(set_to_none=run.rng.random() < 0.5)


@event()
def gradients_logged(run: Run) -> None:
    params = [p for group in run.optimizer.param_groups for p in group["params"]]
    run.log.append([p.grad if p.grad is None else p.grad.norm() for p in params])


@event(r"has a gradient", stays=True)
def gradient_left(run: Run) -> None:
    p = run.rng.choice(list(run.model.parameters()))
    p.grad = torch.ones_like(p)


@event(r"has a gradient", stays=True)
def gradients_accumulated(run: Run) -> None:
    F.cross_entropy(run.model(torch.ones(ROWS, FEATURES)), torch.zeros(ROWS, dtype=torch.long)).backward()


# ------------------------------------------------------------------------------------ the next batch


def edited(change: Callable[[Tensor, Tensor], tuple[Any, ...]]) -> Callable[[Run], None]:
    return lambda run: setattr(run, "edit", change)


class Custom(Tensor):
    pass


def with_hook(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    x.requires_grad_().register_hook(lambda g: 2 * g)
    return x, y


def as_inference(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    with torch.inference_mode():
        return x.clone(), y.clone()


_FORM = r"has (shape|type|stride|device)|the batch is|the next form is unknown"
EVENTS |= {
    "fewer rows": Event(edited(lambda x, y: (x[:4], y[:4])), _FORM, True),
    "one row": Event(edited(lambda x, y: (x[:2].clone(), y[:2])), _FORM, True),
    "columns first": Event(edited(lambda x, y: (x.t().contiguous().t(), y)), _FORM),
    "expanded": Event(edited(lambda x, y: (x[:1].expand(ROWS, -1), y)), _FORM),
    "a view": Event(edited(lambda x, y: (torch.cat([x, x], 1)[:, FEATURES:], y)), _FORM),
    "negated view": Event(edited(lambda x, y: (torch._neg_view(x), y)), _FORM + "|neg"),
    "soft targets": Event(edited(lambda x, y: (x, F.one_hot(y, CLASSES) / 2.0)), _FORM),
    "numbers as targets": Event(edited(lambda x, y: (x, y.int())), _FORM + r"|Int", True),
    "double input": Event(edited(lambda x, y: (x.double(), y)), _FORM + r"|float64|double|Double|dtype", True),
    "wrong width": Event(edited(lambda x, y: (x[:, 1:], y)), _FORM + r"|same reduction dim", True),
    "target out of range": Event(edited(lambda x, y: (x, y + CLASSES)), r"Target \d+ is out of bounds"),
    "input with gradient": Event(
        edited(lambda x, y: (x.requires_grad_(), y)), r"requires.gradient|requires_grad", True
    ),
    "input with a hook": Event(edited(with_hook), r"requires.gradient|requires_grad|hook", True),
    "inference tensors": Event(edited(as_inference), r"[Ii]nference", True),
    "a parameter as input": Event(edited(lambda x, y: (nn.Parameter(x), y)), r"requires.gradient|requires_grad", True),
    "a subclass of Tensor": Event(edited(lambda x, y: (x.as_subclass(Custom), y)), r"Custom"),
    "a float": Event(edited(lambda x, y: (x, y, 0.5)), _FORM + "|argument"),
    "another float": Event(edited(lambda x, y: (x, y, 0.25)), _FORM + "|argument"),
    "an integer": Event(edited(lambda x, y: (x, y, 2)), _FORM + "|argument"),
    "a boolean": Event(edited(lambda x, y: (x, y, True)), _FORM + "|argument"),
    "NumPy's number": Event(edited(lambda x, y: (x, y, np.float64(0.5))), _FORM + "|argument|NumPy"),
    "NumPy's array": Event(edited(lambda x, y: (x, y, np.float32([0.5]).sum())), _FORM + "|argument|NumPy"),
    "a tensor as number": Event(edited(lambda x, y: (x, y, torch.tensor(0.5))), _FORM + "|argument"),
    "two numbers": Event(edited(lambda x, y: (x, y, 0.5, 3)), _FORM + "|argument"),
}


@event(r"shar|memory|alias|overlap" + "|" + _FORM)
def batch_of_the_models_memory(run: Run) -> None:
    run.edit = lambda x, y: (run.model[0].weight.detach()[:ROWS], y)


# ------------------------------------------------------------------------------------ the loop itself


@event()
def exception_in_the_loop(run: Run) -> None:
    raise KeyError("logger")


@event()
def evaluation_that_fails(run: Run) -> None:
    run.model(torch.ones(2, 3))


@event(r"has a gradient", stays=True)
def eager_step(run: Run) -> None:
    run.log.append(run.trainer.step(torch.ones(ROWS, FEATURES), torch.zeros(ROWS, dtype=torch.long)))


@event()
def finished(run: Run) -> None:
    if hasattr(run.step, "finish"):
        run.step.finish()


@event()
def garbage_collected(run: Run) -> None:
    gc.collect()


@event()
def benchmark_of_cudnn(run: Run) -> None:
    run.modes.append(partial(torch.backends.cudnn.flags, enabled=True, benchmark=True))


# ------------------------------------------------------------------------------------ replaced references


@event(r"kept|recent|log\b|box|another object|replaced|exchanged")
def containers_replaced(run: Run) -> None:
    for block in run.trainer.blocks:
        for name in ("kept", "recent", "log", "box"):
            if hasattr(block, name):
                setattr(block, name, copy.deepcopy(getattr(block, name)))


@event(r"LOGGED")
def global_list_replaced(run: Run) -> None:
    table = run.trainer.blocks[0].make.__globals__
    table["LOGGED"] = []


@event(r"MEAN")
def global_tensor_replaced(run: Run) -> None:
    table = run.trainer.blocks[0].make.__globals__
    table["MEAN"] = torch.ones(())


@event(r"generator")
def generator_replaced(run: Run) -> None:
    for block in run.trainer.blocks:
        if hasattr(block, "generator"):
            block.generator = torch.Generator().manual_seed(9)


@event(r"forward")
def forward_replaced(run: Run) -> None:
    weight = run.model[2].weight
    run.model[2].forward = lambda h: F.linear(h, weight)


@event(r"forward")
def forward_of_the_class_replaced(run: Run) -> None:
    type(run.trainer.blocks[0]).forward = lambda self, h, x: h / 2


@event(r"running_mean|mean\b|update")
def closure_replaced(run: Run) -> None:
    for block in run.trainer.blocks:
        if hasattr(block, "running_mean"):
            block.running_mean = type(block).make.__globals__["make_running_mean"]()


@event(r"class")
def class_of_a_layer_changed(run: Run) -> None:
    run.model[2].__class__ = Doubled


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@event(r"divisor")
def attribute_of_the_class_shadowed(run: Run) -> None:
    run.trainer.divisor = 2.0


@event(r"divisor")
def attribute_of_the_class_changed(run: Run) -> None:
    run.until_end.callback(setattr, Trainer, "divisor", 1.0)
    Trainer.divisor = 4.0


@event(r"optimizer")
def optimizer_replaced(run: Run) -> None:
    run.trainer.optimizer = torch.optim.SGD(run.model.parameters(), 0.01)
    run.model.zero_grad()  # parameters that the last optimizer had not keep their gradients in eager steps only


@event(r"model")
def model_replaced(run: Run) -> None:
    run.trainer.model = copy.deepcopy(run.model)
    run.trainer.blocks = list(run.trainer.model[1])
    run.trainer.optimizer = torch.optim.SGD(run.model.parameters(), 0.01)


@event(r"after_backward|blocks")
def blocks_of_the_trainer_replaced(run: Run) -> None:
    run.trainer.blocks = run.trainer.blocks[:1]


# ------------------------------------------------------------------------------------ programs


@dataclass
class Refusal:
    """A refused step: its index, the events that may be the cause, and the sentence."""

    step: int
    events: list[str]
    sentence: str

    @property
    def fault(self) -> str:
        """Says what is wrong with the refusal, or ""."""
        causes = [EVENTS[name].cause for name in self.events]
        if "\n" in self.sentence or len(self.sentence) > 700:
            return f"not one sentence: {self.sentence}"
        if not any(cause and re.search(cause, self.sentence) for cause in causes):
            return (
                f"step {self.step} is refused without naming {' or '.join(self.events) or 'an event'}: {self.sentence}"
            )
        return ""


@dataclass
class Record:
    """What a run has shown: observations after each step, refusals, and the outcome of each step's events."""

    history: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass(frozen=True)
class Program:
    """A random training with events before each of its steps.

    Attributes:
        entry: how the step is planned.
        eager: number of first steps without a plan.
        recaptures: whether a refused step is captured again, by step.
    """

    seed: int
    blocks: tuple[str, ...]
    optimizer: str
    entry: str
    keep_grads: bool
    check: bool
    eager: int
    events: tuple[tuple[str, ...], ...]
    recaptures: tuple[bool, ...]

    def batch(self, i: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + i)
        x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float32)
        return x, torch.randint(CLASSES, (ROWS,), generator=generator)

    def planned(self, trainer: Trainer, batch: tuple[Any, ...]) -> Callable[..., Any]:
        """Plans the trainer's step, with swaps of nearly everything except for ``fit``."""
        options = {"keep_grads": self.keep_grads, "check": self.check}
        if self.entry == "fit":
            return fit(trainer.step, example_batch=batch, memory=1.0, **options)
        if self.entry == "step":
            captured = capture_step(trainer.step, *batch, machine=GPU, **options)
            plan = random_plan(captured.program, self.seed, empty_share=0.1)
            return PlannedStep(captured, plan, GPU, 2**30)

        def planner(program: Any, *_: Any) -> Plan:
            return random_plan(program, self.seed, empty_share=0.1)

        steps = PlannedSteps(trainer.step, None, None, GPU, 2**30, planner, **options)
        steps.step_for(*batch)
        return steps

    def trained(self, expected: list[dict[str, Any]] | None) -> Record:
        """Trains with planned steps, or eagerly if ``expected`` is None."""
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)  # noqa: NPY002
        trainer = Trainer(self)
        run = Run(trainer, trainer.step)
        record = Record()
        pending: list[str] = []
        with run.until_end:
            run.until_end.callback(lambda: run.saved.pop("autocast", ExitStack()).close())
            for i, names in enumerate(self.events):
                if expected is not None and i == self.eager:
                    run.step = self.planned(trainer, self.batch(i))
                run.rng = random.Random(f"{self.seed} {i}")
                run.modes.clear()
                run.edit = None
                if "autocast" in run.saved:  # whose cache what else happens in its context would fill
                    names = tuple(name for name in names if name == "autocast ends")
                for name in names:
                    try:
                        EVENTS[name].act(run)
                    except Exception as error:
                        run.log.append(type(error).__name__)
                batch = self.batch(i)
                if run.edit is not None:
                    batch = run.edit(*batch)
                pending += names
                refusals = len(record.refusals)
                if run.step == trainer.step:
                    result = self.eagerly(run, batch)
                else:
                    assert expected is not None
                    result = self.attempt(run, batch, i, pending, record, expected[i]["result"])
                if run.step == trainer.step or len(record.refusals) > refusals:
                    pending.append("eager step")
                outcome = "refused" if len(record.refusals) > refusals else "equal"
                record.counts.update((name, outcome) for name in set(names) or {"nothing"})
                pending += ["autocast over steps"] * ("autocast" in run.saved)
                if record.refusals and "autocast" in run.saved:
                    break  # the eager step in its place uses other weights of autocast's cache
                record.history.append(self.observed(run, batch, result))
        return record

    def eagerly(self, run: Run, batch: tuple[Any, ...]) -> Any:
        with ExitStack() as stack:
            for mode in run.modes:
                stack.enter_context(mode())
            try:
                return run.trainer.step(*batch)
            except Exception as error:
                return f"raised {type(error).__name__}"

    def attempt(
        self, run: Run, batch: tuple[Any, ...], i: int, pending: list[str], record: Record, expected: Any
    ) -> Any:
        """Runs a planned step; if it is refused, perhaps captures it again, or else runs the eager step."""
        for is_new in (False, True):
            with ExitStack() as stack:
                for mode in run.modes:
                    stack.enter_context(mode())
                try:
                    if is_new:
                        run.step.finish()
                        if self.entry == "step":
                            run.step = self.planned(run.trainer, batch)
                        else:
                            run.step.recapture()
                    result = run.step(*batch)
                    if is_new:
                        pending[:] = self.events[i]
                    return result
                except REFUSALS as error:
                    refusal = Refusal(i, list(pending), str(error))
                    record.refusals.append(refusal)
                    if refusal.fault:
                        record.faults.append(refusal.fault)
                    if is_new and not (isinstance(expected, str) or any(EVENTS[name].stays for name in pending)):
                        record.faults.append(f"step {i} is refused after a new capture, too: {error}")
            if not self.recaptures[i]:
                break
        return self.eagerly(run, batch)

    def observed(self, run: Run, batch: tuple[Any, ...], result: Any) -> dict[str, Any]:
        """Returns everything that the user can see after a step."""
        observations = run.trainer.observed()
        observations["result"] = result
        trained = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
        for name, p in run.model.named_parameters():
            if id(p) not in trained:  # such gradients do not stay
                continue
            observations[f"gradient of {name}"] = None if p.grad is None else p.grad.detach().clone()
        for i, x in enumerate(batch):
            observations[f"batch {i}"] = x.detach().clone() if isinstance(x, Tensor) else x
            gradient = x.grad if isinstance(x, Tensor) and x.is_leaf else None
            observations[f"gradient of batch {i}"] = None if gradient is None else gradient.clone()
        logged = torch.utils._pytree.tree_leaves(run.log)
        observations |= {f"log {i}": x.detach().clone() if isinstance(x, Tensor) else x for i, x in enumerate(logged)}
        observations["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]
        observations["random"] = random.getstate()[1][-1], np.random.get_state()[2]  # noqa: NPY002
        return observations

    def outcome(self) -> tuple[str, str, Record]:
        """Returns "equal", "refused", "different", "crashed" or "unnamed", why, and the record."""
        with warnings.catch_warnings(action="ignore"):
            expected = self.trained(None).history
            try:
                record = self.trained(expected)
            except Exception as error:
                return "crashed", f"{type(error).__name__}: {error}", Record()
        if mismatch := difference(record.history, expected):
            return "different", mismatch, record
        if record.faults:
            return "unnamed", record.faults[0], record
        return ("refused" if record.refusals else "equal"), "", record

    def shrunk(self) -> Program:
        """Returns a smaller program with the same kind of outcome by dropping events and blocks."""
        kind = self.outcome()[0]
        for smaller in self.smaller():
            if smaller.outcome()[0] == kind:
                return smaller.shrunk()
        return self

    def smaller(self) -> Iterable[Program]:
        if len(self.events) > self.eager + 1:
            yield replace(self, events=self.events[:-1])
        for i, names in enumerate(self.events):
            for name in names:
                rest = tuple(other for other in names if other != name)
                yield replace(self, events=(*self.events[:i], rest, *self.events[i + 1 :]))
        if len(self.blocks) > 1:
            for i in range(len(self.blocks)):
                yield replace(self, blocks=self.blocks[:i] + self.blocks[i + 1 :])


def difference(planned: list[dict[str, Any]], eager: list[dict[str, Any]]) -> str:
    """Names the first value that is not bit-identical."""
    for i, (ours, theirs) in enumerate(zip(planned, eager, strict=False)):
        for name in dict.fromkeys((*theirs, *ours)):
            a = ours.get(name, ...)
            b = theirs.get(name, ...)
            if b is ... and isinstance(a, Tensor) and name.startswith(".state") and not a.any():
                continue  # planning has created the initial state
            if a is not b and not (
                bit_identical(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else repr(a) == repr(b)
            ):
                return f"{name} after step {i}: {str(a)[:60]} for {str(b)[:60]}"
    return ""


def program(seed: int) -> Program:
    """Draws a program; most of its events are such that no step may be refused because of them."""
    rng = random.Random(seed)
    names = sorted(EVENTS)
    accepted = [name for name in names if not EVENTS[name].cause]
    eager = rng.choice((0, 0, 1))
    counts = [(rng.choice((0, 1, 1, 2)), rng.choice((0, 0, 1))) for _ in range(STEPS)]
    events = [(*rng.sample(accepted, count), *rng.sample(names, more)) for count, more in counts]
    return Program(
        seed,
        tuple(rng.sample(BLOCKS, rng.randint(1, 3))),
        rng.choice(["sgd", "adamw", "foreach", "adagrad", "two_means"]),
        rng.choice(("fit", "steps", "step")),
        rng.random() < 0.3,
        rng.random() < 0.1,
        eager,
        ((),) * (eager + 1) + tuple(events),
        tuple(rng.random() < 0.5 for _ in range(eager + 1 + STEPS)),
    )


@pytest.mark.parametrize("seeds", [pytest.param(range(12), id="some"), *drawn_at_night(200)])
def test_random_events_between_steps(seeds: Iterable[int]) -> None:
    kinds: Counter[str] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    for drawn in map(program, seeds):
        kind, reason, record = drawn.outcome()
        kinds[kind] += 1
        counts += record.counts
        if kind not in ("equal", "refused"):
            wrong.append(f"{kind}: {reason}: {drawn.shrunk()}")
    print(*(f"{count:5} {kind}" for kind, count in kinds.most_common()), sep="\n")
    for name in sorted({name for name, _ in counts}):
        print(f"{counts[name, 'equal']:5} equal {counts[name, 'refused']:5} refused: {name}")
    total = sum(counts.values())
    refused = sum(count for (_, outcome), count in counts.items() if outcome == "refused")
    print(f"{refused} of {total} events came before a refused step")
    assert not wrong, "\n".join(wrong)
    assert refused < total / 2
