"""``PlannedStrategy`` beside Lightning's own: losses, logs, weights, optimizer state, checkpoints to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning")
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.amp import GradScaler
from torch.utils.data import DataLoader

from executor import CaptureError, StepError
from executor.integrations import PlannedStrategy

pytestmark = [  # Lightning's advice, the mean squared error's memory; but a schedule comes after its update
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("error:Detected call of"),
]


class Lines(DummyLogger):
    """Keeps all that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:  # type: ignore[override]
        self.lines.append((step, dict(metrics)))


class Losses(Callback):
    """What a step returns."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append({key: value.clone() for key, value in outputs.items()})


class Module(LightningModule):
    """Logs by steps and by epochs, validates, has a schedule and the norm of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"half": loss / 2, "whole": loss.bfloat16()}, on_epoch=True)
        return {"loss": loss, "twice": 2 * loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(samples: int) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    rows = [{key: torch.randn(64, generator=generator) for key in "xy"} for _ in range(samples)]
    return DataLoader(rows, batch_size=32)


class Pair:
    """A Trainer with the strategy and one without."""

    def __init__(
        self, out: Path, make: Callable[[], LightningModule] = Module, samples: int = 160, callbacks: Any = lambda: [],
        plugins: Any = lambda: None, **chosen: Any,
    ) -> None:  # fmt: skip
        self.samples = samples
        self.modules, self.trainers, self.losses, self.logs = [], [], [Losses(), Losses()], [Lines(), Lines()]
        options = {"planner": "capuchin"}
        for i, name in enumerate(("ours", "own")):
            seed_everything(0, verbose=False)
            self.modules.append(make())
            more = {"strategy": PlannedStrategy(0.7, options)} if name == "ours" else {}
            self.trainers.append(Trainer(**{
                "max_epochs": 2, "accelerator": "cpu", "devices": 1, "default_root_dir": out / name,
                "logger": self.logs[i], "log_every_n_steps": 1, "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": False, "num_sanity_val_steps": 1, "callbacks": [self.losses[i], *callbacks()],
                "gradient_clip_val": 0.5, "plugins": plugins(), **more, **chosen,
            }))  # fmt: skip
        self.ours, self.own = self.trainers

    def fit(self, **options: Any) -> Pair:
        for module, trainer in zip(self.modules, self.trainers, strict=True):
            seed_everything(1, verbose=False)
            trainer.fit(module, data(self.samples), data(32), **options)
        self.same()
        return self

    def same(self) -> None:
        assert self.ours.global_step == self.own.global_step > 2
        assert self.logs[0].lines == self.logs[1].lines and len(self.logs[1].lines) > 4
        assert {"train_loss_step", "train_loss_epoch", "half_epoch", "norm", "val_loss"} <= {
            key for _, line in self.logs[1].lines for key in line
        }
        ours, own = (losses.outputs for losses in self.losses)
        assert len(ours) == len(own)
        for a, b in zip(ours, own, strict=True):
            assert a.keys() == b.keys() == {"loss", "twice"} and all(torch.equal(a[k], b[k]) for k in b)
        for a, b in zip(*(module.state_dict().values() for module in self.modules), strict=True):
            assert torch.equal(a, b)
        for p, q in zip(*(module.parameters() for module in self.modules), strict=True):
            ours, own = (t.optimizers[0].state[r] for t, r in zip(self.trainers, (p, q), strict=True))
            assert own and all(torch.equal(value, ours[key]) for key, value in own.items())
        planned = self.ours.strategy.planned
        assert any(step.plan.decisions for step in planned.steps.values()) and planned.peak_bytes <= planned.limit
        assert not self.ours.optimizers[0]._optimizer_step_pre_hooks
        assert "log" not in vars(self.modules[0])


def test_a_planned_strategy_is_lightnings_own(tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        return [LearningRateMonitor("step"), EarlyStopping("val_loss", patience=5)]

    pair = Pair(tmp_path, samples=144, callbacks=callbacks, val_check_interval=2).fit()  # the last batch is shorter
    assert len(pair.ours.strategy.planned.steps) == 2
    assert any("lr-AdamW" in line for _, line in pair.logs[1].lines)
    assert "model.net.0" in str(pair.ours.strategy.planned.report())


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        return [ModelCheckpoint(every_n_train_steps=3, save_top_k=-1, filename="{step}")]

    pair = Pair(tmp_path, callbacks=callbacks, enable_checkpointing=True, max_steps=8).fit()
    files = [sorted((tmp_path / name).rglob("step=3.ckpt"))[0] for name in ("ours", "own")]
    ours, own = (torch.load(file, weights_only=True) for file in files)
    assert ours.keys() == own.keys() and ours["global_step"] == own["global_step"] == 3
    assert all(torch.equal(value, ours["state_dict"][key]) for key, value in own["state_dict"].items())
    for i, state in own["optimizer_states"][0]["state"].items():
        assert all(torch.equal(value, ours["optimizer_states"][0]["state"][i][key]) for key, value in state.items())
    again = Pair(tmp_path / "again", max_steps=8).fit(ckpt_path=str(files[1]), weights_only=True)
    assert again.ours.global_step == 8 == pair.ours.global_step


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_accumulation_and_clipping(algorithm: str, tmp_path: Path) -> None:
    """Three micro-batches, then the two that an epoch has left."""
    pair = Pair(tmp_path, accumulate_grad_batches=3, gradient_clip_val=0.01, gradient_clip_algorithm=algorithm).fit()
    assert {len(forms) for forms in pair.ours.strategy.planned.steps} == {3, 2} and pair.ours.global_step == 4


def test_autocast(tmp_path: Path) -> None:
    pair = Pair(tmp_path, precision="bf16-mixed", gradient_clip_val=None).fit()
    assert "bfloat16" in str(pair.ours.strategy.planned.captured.graph.graph)


def test_float16_with_its_scaler(tmp_path: Path) -> None:
    def plugins() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**10))

    pair = Pair(tmp_path, plugins=plugins, gradient_clip_val=0.01).fit()
    assert "torch.float16" in str(pair.ours.strategy.planned.captured.graph.graph)
    ours, own = (trainer.precision_plugin.scaler.state_dict() for trainer in pair.trainers)
    assert ours == own


class ReadsTheNumber(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 if batch_idx % 2 else 2)


class LogsANumber(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", 0.1)
        return self.loss(batch)


class ReturnsATensor(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "all": batch["x"]}


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class LooksAtGradients(Module):
    def on_after_backward(self) -> None:
        pass


class ReadsTheStep(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.part()

    def part(self) -> float:
        return 1 / (1 + self.global_step)


class Skips(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [(ReadsTheNumber, CaptureError, "training_step reads batch_idx"),
     (LogsANumber, CaptureError, "logs 'rate', which is float"),
     (ReturnsATensor, CaptureError, r"returns 'all', which is a tensor of shape \(32, 64\)"),
     (Manual, CaptureError, "manual optimization"),
     (LooksAtGradients, CaptureError, "LooksAtGradients has on_after_backward"),
     (ReadsTheStep, StepError, "reads global_step, which was 0 at the capture and is 1 now"),
     (Skips, StepError, "the optimizer's step is not where")],
)  # fmt: skip
def test_what_a_planned_step_cannot_do_is_refused(make: Any, error: Any, says: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, make, gradient_clip_val=None)
    before = {key: value.clone() for key, value in pair.modules[0].state_dict().items()}
    with pytest.raises(error, match=says):
        pair.ours.fit(pair.modules[0], data(96))
    if make is not ReadsTheStep:
        assert all(torch.equal(value, before[key]) for key, value in pair.modules[0].state_dict().items())


def test_validation_within_a_step_is_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path, accumulate_grad_batches=3, val_check_interval=2)
    with pytest.raises(StepError, match="validate and save between steps"):
        pair.ours.fit(pair.modules[0], data(160), data(32))


def test_several_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="on one device, not on 2"):
        Pair(tmp_path, devices=2)
