"""Tests that start plans are planned once, and that a file is used only for the task that it was made for."""

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.edit import env as edit_env, start_cache, starts
from envs.edit.env import MemoryEditEnv

make = partial(MemoryEditEnv, limit=0.6, neighbors=8, budget=20)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the names of starts that are planned, in order; the cache is empty at first."""
    names: list[str] = []

    def record(name: str, task: Any) -> Any:
        names.append(name)
        return getattr(starts, name)(task)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(edit_env, "STARTS", {name: partial(record, name) for name in starts.STARTS})
    return names


def episode(env: MemoryEditEnv) -> list[Any]:
    """Returns all observations, rewards and infos of an episode of the first valid actions."""
    observation, info = env.reset(seed=0)
    steps: list[Any] = [observation, info]
    ended = False
    while not ended:
        step = env.step(observation["action_mask"].argmax())
        observation = step[0]
        ended = step[2] or step[3]
        steps += [*step[:4], {key: value for key, value in step[4].items() if key != "plan"}]
    return steps


@pytest.mark.parametrize("start", ["heuristic", "policy", "empty"])
def test_episodes_are_equal_with_and_without_a_file(start: str, made: list[str]) -> None:
    env = make(start=start)
    expected = episode(env)
    cached = make(start=start)
    assert made == [start]
    np.testing.assert_equal(episode(cached), expected)
    first, second = env.tasks[0], cached.tasks[0]
    assert (first.start_calls, len(first.starts)) == (second.start_calls, len(second.starts))
    np.testing.assert_equal(first.static, second.static)


def test_each_task_has_its_own_file(made: list[str], tmp_path: Path) -> None:
    for arguments in ({}, {"limit": 0.7}, {"mode": "swap"}, {"min_bytes": 2**21}, {"start": "empty"}, {}):
        make(**arguments)
    assert len(made) == 5 and len(list((tmp_path / "headroom" / "starts").iterdir())) == 5


def test_other_code_makes_other_plans(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    monkeypatch.setattr(start_cache, "_code_digest", lambda: "other")
    make()
    assert made == ["heuristic"] * 2


DAMAGES = {
    "not gzip": lambda data: b"x",
    "no object": lambda data: [],
    "a key": lambda data: {**data, "more": 1},
    "no list": lambda data: {**data, "plans": [1]},
    "columns": lambda data: {**data, "plans": [[row[:5] for row in data["plans"][0]]]},
    "a fraction": lambda data: {**data, "plans": [[[*row[:5], 0.5] for row in data["plans"][0]]]},
    "a kind": lambda data: {**data, "plans": [[[7, *row[1:]] for row in data["plans"][0]]]},
    "a tensor": lambda data: {**data, "plans": [[[row[0], 10**6, *row[2:]] for row in data["plans"][0]]]},
    "a kernel": lambda data: {**data, "plans": [[[*row[:4], 10**6, row[5]] for row in data["plans"][0]]]},
    "weights": lambda data: {**data, "weights": data["weights"][1:]},
    "a weight": lambda data: {**data, "weights": [[-1.0, *row[1:]] for row in data["weights"]]},
    "priors": lambda data: {**data, "priors": [["x"] * 4 for _ in data["priors"]]},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_replaced(damage: str, made: list[str], tmp_path: Path) -> None:
    expected = episode(make())
    (path,) = (tmp_path / "headroom" / "starts").iterdir()
    content = path.read_bytes()
    damaged = DAMAGES[damage](json.loads(gzip.decompress(content)))
    path.write_bytes(damaged if isinstance(damaged, bytes) else gzip.compress(json.dumps(damaged).encode()))
    with pytest.warns(UserWarning, match=f"{path.name}.*the start plans are replaced"):
        env = make()
    np.testing.assert_equal(episode(env), expected)
    assert made == ["heuristic"] * 2 and path.read_bytes() == content


def test_a_folder_that_cannot_be_written_is_not_used(made: list[str], tmp_path: Path) -> None:
    (tmp_path / "headroom").write_text("a file")
    for _ in range(2):
        with pytest.warns(UserWarning, match="the start plans are not cached"):
            make()
    assert made == ["heuristic"] * 2


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert start_cache.folder() == Path.home() / ".cache" / "headroom" / "starts"
