"""The suite of scale: one small program of it, and what it says of the rows."""

import pytest
from omegaconf import DictConfig

from experiments.common.cli import UsageError
from experiments.figures import scale
from simulator import Machine

SETTINGS = {
    "machine_of_the_rest": "gtx1080ti", "limit": 0.8, "modes": ["joint", "swap"],
    "programs": {"mlp": {}, "small": {"workload": "mlp", "machine": "h100", "batch_size": 32}},
}  # fmt: skip


def test_a_task_as_a_user_runs_it() -> None:
    tasks = scale.tasks(DictConfig(SETTINGS))
    where = (("mlp", "gtx1080ti"), ("small", "h100"))
    found = [(t["program"], t["machine"], t["mode"]) for t in tasks]
    assert found == [(*w, m) for w in where for m in ("joint", "swap")]
    assert tasks[2]["changes"] == {"batch_size": 32}
    row = scale.run(tasks[1], Machine.load("v100"))
    assert 0 <= row["floor_percent"] <= min(row["lp_round_percent"], row["annealing_percent"])
    assert row["annealing_s"] == pytest.approx(row["lp_round_s"], abs=1)


def test_what_is_said_of_the_rows(tmp_path) -> None:
    def row(name, kernels, floor, lp, annealing):
        return {"program": name, "workload": name, "machine": "h100", "mode": "joint", "changes": {"layers": 2},
                "kernels": kernels, "floor_percent": floor, "floor_s": kernels / 1000, "lp_round_percent": lp,
                "lp_round_s": kernels / 100, "annealing_percent": annealing}  # fmt: skip

    rows = [row("vgg16", 100, 1.0, 1.05, 1.2), row("lstm", 900, 1.0, None, 2.0), row("vgg11", 100, 0.0, 2.0, 1.0)]
    _, cells = scale.table(rows)
    assert cells[1] == ["LSTM (layers 2)", "900", "h100", "joint", "1.00%", "0.9", "–", "9.0", "2.00%"]
    slow_floor, slow, sides, proven = scale.notes(rows)
    assert "0.9 s (LSTM (layers 2), joint)" in slow_floor and "9.0 s" in slow
    assert "ahead of annealing at 1 of 2 and behind it at 1" in sides and "at 1 of 3" in proven
    scale.draw(rows, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000


@pytest.mark.parametrize(("change", "message"), [
    ({"limit": 2}, "figure.limit: expected a share"), ({"modes": ["swop"]}, "figure.modes: expected some of"),
    ({"programs": {"mlq": {}}}, "figure.programs.mlq.workload: there is no workload 'mlq'"),
])  # fmt: skip
def test_wrong_settings(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scale.tasks(DictConfig({**SETTINGS, **change}))
