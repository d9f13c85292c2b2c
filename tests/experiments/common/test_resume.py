"""Tests ``train_dqn resume=RUN``: the settings of a run become arguments."""

from pathlib import Path
from typing import Any

import pytest

from experiments.common.cli import UsageError
from experiments.common.resume import resume_args
from experiments.train_dqn import complete, settings_of
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
        ({"hydra": {"callbacks": {"x": {"_target_": "os.mkdir"}}}}, "hydra"),
        ([], "summary.json"),
    ],
)
def test_unknown_settings_are_refused(config: Any, word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=word):
        resume_args(settings(tmp_path, config), [])


def test_the_former_spelling_of_a_key_is_read_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings(tmp_path, {"agent": {"neighbours": 8}}, [*COMMAND[:3], "agent=dqn"])
    assert settings_of([f"resume={tmp_path}"]) == ["agent=dqn", "agent.neighbors=8", f"resume={tmp_path}"]
    assert settings_of(["agent.neighbours=8"]) == ["agent.neighbors=8"]
    (note, same) = capsys.readouterr().err.splitlines()
    assert note == same and "agent.neighbours" in note and "agent.neighbors" in note
    assert settings_of(["agent.neighbors=8"]) == ["agent.neighbors=8"] and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "added"),
    [
        ("seed=1 tracker=none agent.iterations=3 several.calls=9", []),
        ("agent=dqn_scratch agent.width=16", []),
        ("limit=0.6", ["agent=dqn", "workload=vgg16"]),
        ("agent=dqn_paper agent.episodes=2", ["workload=vgg16"]),
        ("machine.copy_engines=1 agent=dqn_scratch", ["workload=vgg16"]),
        ("workload=vgg16", ["agent=dqn"]),
        ("program=step.json agent=dqn", []),
    ],
)
def test_a_key_of_one_task_selects_the_agent_and_the_workload_of_one(typed: str, added: list[str]) -> None:
    assert complete(typed.split()) == [*added, *typed.split()]
