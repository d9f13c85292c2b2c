"""Tests ``train_dqn resume=RUN``: a run's settings become arguments; settings of an untrusted run never name code."""

from pathlib import Path
from typing import Any

import pytest

from experiments.common.cli import UsageError
from experiments.common.resume import resume_args
from simulator.files import write_json
from tests.tiny import PROGRAM

COMMAND = ["python", "-m", "experiments.train_dqn", "agent=dqn_paper"]


def settings(folder: Path, config: object, command: object = COMMAND) -> Path:
    write_json(folder / "summary.json", {"command": command, "config": config})
    return folder / "summary.json"


def test_typed_words_override_recorded_settings(tmp_path: Path) -> None:
    file = settings(
        tmp_path,
        {
            "seed": 1,
            "limit": "24GiB",
            "out": "elsewhere",
            "resume": None,
            "workload": {"name": "vgg16"},
            "agent": {"lr": 0.5, "layers": [1, None]},
            "planners": ["none", "it's"],
            "network": "mine:Net",
        },
    )
    PROGRAM.save(tmp_path / "program.json")
    typed = [f"resume={tmp_path}", "limit=0.5", "network=mine:Net"]
    assert resume_args(file, typed) == [
        "agent=dqn_paper",
        "seed=1",
        "agent.lr=0.5",
        "agent.layers=[1,null]",
        "planners=['none','it\\'s']",
        f"program='{tmp_path / 'program.json'}'",
        *typed,
    ]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"network": "evil:Net"}, "network"),
        ({"+hydra.callbacks.x._target_": "os.mkdir"}, r"\+hydra.callbacks.x._target_"),
        ({"hydra": {"callbacks": {"x": {"_target_": "os.mkdir"}}}}, "hydra"),
        ({"agent": {"lr=1 +hydra.x": 1}}, r"lr=1 \+hydra.x"),
        ({"planners": [{"a: 1}, +hydra.x": 1}]}, r"a: 1}, \+hydra.x"),
        ({"limit": "${oc.env:HOME}"}, r"\${oc.env:HOME}"),
        ([], "summary.json"),
    ],
)
def test_unknown_settings_are_refused(config: Any, word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=word):
        resume_args(settings(tmp_path, config), [])


def test_the_command_names_an_option_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\[dqn\]"):
        resume_args(settings(tmp_path, {}, [*COMMAND[:3], "agent=[dqn] +hydra.x=1"]), [])
