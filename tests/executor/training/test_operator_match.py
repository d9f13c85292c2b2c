"""Tests that the check of a capture on a part of its batch needs no second trace, and finds what one would find."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import CaptureError, PlannedStep, capture_step
from executor.capture.capture import _Call
from executor.training import check
from executor.training.check import Digest, equal
from executor.training.operator_match import OperatorMatch
from tests.executor.networks import NETWORKS, ResNet, adamw, images, masks, sgd, words
from tests.executor.training.programs import Twins, network


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets small steps be checked as large ones are."""
    monkeypatch.setattr(check, "SMALL_FLOPS", -1)


def match_of(captured: Any, args: Any) -> OperatorMatch:
    """Returns the match of the second eager step on some arguments."""
    match = OperatorMatch(captured)
    comparison = check._Comparison(captured, args)
    with comparison.restored():
        comparison.run(comparison.step, 1)
        comparison.run(comparison.step, 1, match)
    return match


def four(batch: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that makes batches of twice as many examples."""
    return lambda: tuple(map(torch.cat, zip(batch(), batch(), strict=True)))


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize(("name", "batch"), [("resnet", images(16, 4)), ("gpt2", four(words)), ("unet", four(masks))])
def test_the_sizes_are_those_of_a_second_capture(name: str, batch: Any, make_optimizer: Any) -> None:
    captured = Twins(network, (NETWORKS[name][0], batch), make_optimizer).captured()
    args = check.first_examples(captured.source.args, 2)
    before = str(captured.graph.graph)
    match = match_of(captured, args)
    assert not match.difference
    again = captured.source.recapture(args)
    with match.resized() as resized:
        assert [t.nbytes for t in resized.program.tensors] == [t.nbytes for t in again.program.tensors]
        assert str(resized.graph.graph) == str(again.graph.graph) != before
    assert str(captured.graph.graph) == before


def test_a_part_of_the_batch_is_checked_without_a_second_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: list[int] = []
    prepare = PlannedStep.__init__

    def recorded(self: PlannedStep, captured: Any, *args: Any, **options: Any) -> None:
        peaks.append(captured.program.peak_bytes)
        prepare(self, captured, *args, **options)

    monkeypatch.setattr(PlannedStep, "__init__", recorded)
    monkeypatch.setattr(_Call, "recapture", lambda self, args: pytest.fail("captured again"))
    twins = Twins(network, (ResNet, images(16, 4)))
    captured = twins.captured(check=True)
    assert len(peaks) == 1 and peaks[0] < captured.program.peak_bytes
    twins.go_on_eagerly(2)


def hidden_count() -> int:
    """Counts its calls where no capture sees it."""
    os.environ["HEADROOM_CALLS"] = str(int(os.environ["HEADROOM_CALLS"]) + 1)
    return int(os.environ["HEADROOM_CALLS"])


STEPS: dict[str, Callable[[nn.Linear, Tensor, bool], Tensor]] = {
    "number": lambda layer, x, later: layer(x) * (2.0 if later else 1.0),
    "size": lambda layer, x, later: layer(x)[:, : 3 if later else 4],
    "tensor": lambda layer, x, later: layer(x) * (layer.weight[0] if later else layer.bias),
    "view": lambda layer, x, later: layer(x) * layer.weight[0 if later else 1],
    "operator": lambda layer, x, later: layer(x).exp() if later else layer(x).sin(),
    "further operator": lambda layer, x, later: layer(x) + 1 if later else layer(x),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_second_step_that_differs_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_CALLS", "0")
    layer = nn.Linear(8, 8)
    optimizer = sgd(layer)
    function = STEPS[kind]

    def step(x: Tensor) -> Tensor:
        loss = function(layer, x, hidden_count() > 2).mean()  # after the capture and the first eager step
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = capture_step(step, torch.randn(4, 8), check=False)
    assert match_of(captured, (captured.source.args[0][:2],)).difference
    monkeypatch.setenv("HEADROOM_CALLS", "0")
    with pytest.raises(CaptureError, match="from the eager step"):
        capture_step(step, torch.randn(4, 8))


@pytest.mark.filterwarnings("error::executor.training.check.CheckNotRun")
def test_a_step_that_needs_its_whole_batch_is_checked_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    layer = nn.Linear(8, 8)
    weights = torch.rand(4, 8)

    def step(x: Tensor) -> Tensor:
        return torch.stack([layer(x), weights]).sum().detach()

    judge = check._Comparison._judge

    def recorded(self: Any, *args: Any) -> None:
        sizes.append(len(self.args[0]))
        judge(self, *args)

    monkeypatch.setattr(check._Comparison, "_judge", recorded)
    capture_step(step, torch.randn(4, 8))
    assert sizes == [4]


def test_a_mean_over_the_batch_matches() -> None:
    layer = nn.Linear(8, 8)
    optimizer = sgd(layer)

    def step(x: Tensor) -> Tensor:
        loss = layer(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = capture_step(step, torch.randn(4, 8), check=False)
    assert not match_of(captured, (captured.source.args[0][:2],)).difference


def test_few_pixels_are_a_corner_of_images_and_masks() -> None:
    batch = {"x": torch.randn(2, 3, 160, 128), "mask": torch.zeros(2, 160, 128), "y": torch.tensor([0, 1])}
    cut = check.few_pixels(batch)
    assert torch.equal(cut["x"], batch["x"][:, :, :64, :64])
    assert cut["mask"].shape == (2, 64, 64) and cut["y"] is batch["y"]
    small = (torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))
    assert check.few_pixels(small) is small


@pytest.mark.parametrize("flipped", [(0, 1), (2, 3), (1, 3), (40, 41)])
def test_a_digest_sees_signs_places_and_ends(flipped: tuple[int, int]) -> None:
    x = torch.randn(1000, 517)
    digest = Digest.from_tensor(x)
    assert equal(digest, x.clone()) and not equal(digest, x.double())
    changed = x.clone().view(-1)
    changed[list(flipped)] *= -1
    assert not equal(digest, changed.view_as(x))
    changed = x.clone().view(-1)
    changed[list(flipped)] = changed[list(flipped[::-1])]
    assert not equal(digest, changed.view_as(x))
    bytes_ = torch.zeros(2**20 + 3, dtype=torch.uint8)[2:]
    digest = Digest.from_tensor(bytes_)
    for i in (0, -1):
        other = bytes_.clone()
        other[i] = 1
        assert equal(digest, bytes_.clone()) and not equal(digest, other)
