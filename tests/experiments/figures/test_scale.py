"""The suite of scale: one small program of it, and what it says of the rows."""

import pytest
from omegaconf import DictConfig

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
