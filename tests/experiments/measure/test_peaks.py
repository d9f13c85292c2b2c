"""Tests of published peaks: the data points, and our prediction of one point."""

from __future__ import annotations

import pytest

from experiments.measure.published import peaks


def test_the_points() -> None:
    found = peaks.points()
    assert len(found) == 22 and sum(not p.fits for p in found) == 5
    assert {p.zero_grad for p in found} == {"start", "backward"}
    assert {p.network for p in found} <= set(peaks.NETWORKS)
    first = found[0]
    assert (first.network, first.batch, first.gpu, first.memory_bytes) == ("ConvNeXtBase", 209, "RTX 4060", 8318222336)
    assert first.estimates["llmem"] is None and first.verdicts["xmem"] is True


@pytest.mark.nightly
def test_ours_beside_the_measured_and_the_means() -> None:
    (point,) = (p for p in peaks.points() if (p.network, p.optimizer) == ("MobileNetV2", "SGD"))
    row = peaks.row(point)
    assert row["ours_bytes"] == sum(row[part] for part in ("tensors", "loop", "workspaces", "allocator"))
    assert abs(row["error"]) < 0.03 and row["ours_fits"] and row["fits"]
    lost = {**row, "fits": False, "error": None, "xmem_error": None}
    found = peaks.means([row, lost])
    assert found["ours"] == {"error": abs(row["error"]), "of": 1, "wrong": 1, "verdicts": 2}
    assert found["llmem"]["of"] == 0 and found["llmem"]["error"] is None
