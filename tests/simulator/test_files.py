"""Tests that files are written atomically and reproducibly, and that errors on reading are one sentence."""

import gzip
import json
import os
import time
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from hypothesis import given, strategies as st

from simulator import FormatError, simulate
from simulator.files import fields, integers, write_json, write_text
from simulator.schedule import lower
from simulator.settings import at_least, check, one_of, positive, read
from tests.strategies import machines, plans, programs, with_algorithms


@given(st.data())
def test_dictionaries_and_back(data):
    """Programs, plans, machines and timelines survive a round trip."""
    program, variants = data.draw(programs().flatmap(with_algorithms))
    plan = replace(data.draw(plans(program, reruns=True)), variants=variants)
    machine = data.draw(machines())
    plan.check(program)
    timeline = simulate(program, plan, machine, lower(program, plan).required_bytes)
    for one in (program, plan, machine, timeline):
        assert type(one).from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert ("variants" in plan.to_dict()) == bool(variants)


def test_folders_are_made(tmp_path):
    for name in ("deep/er/a.json", "deep/er/b.json"):  # the second time the folders exist
        write_json(tmp_path / name, [1])
        assert (tmp_path / name).read_text() == "[1]\n"


def test_others_may_read_and_only_the_owner_write(tmp_path):
    before = os.umask(0)
    try:
        write_text(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o7777 == 0o644


def test_equal_content_is_equal_bytes(tmp_path, monkeypatch):
    path = tmp_path / "a.json.gz"
    made = []
    for now in (1.0, 10**9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        write_json(path, {"x": [1, 2]})
        made.append(path.read_bytes())
    assert made[0] == made[1] and gzip.decompress(made[0]) == b'{"x": [1, 2]}\n'
    assert made[0][4:8] == bytes(4)  # the time stamp of the format


def test_a_long_value_is_cut():
    """Messages quote up to 40 characters of JSON, quotes included; longer values are cut to 37 and three dots."""
    for length, shown in ((38, '"' + 38 * "a" + '"'), (39, '"' + 36 * "a" + "...")):
        with pytest.raises(FormatError) as caught:
            integers(length * "a", "here")
        assert str(caught.value) == f"here: expected a list, got {shown}"


def test_an_optional_key_has_its_default_and_its_type():
    optional = {"n": (int, 7)}
    assert fields({}, "here", {}, optional) == {"n": 7} and fields({"n": 8}, "here", {}, optional) == {"n": 8}
    with pytest.raises(FormatError, match=r"^here\.n: expected an integer, got null$"):
        fields({"n": None}, "here", {}, optional)


@dataclass(frozen=True)
class Options:
    """Settings of every supported type."""

    steps: int = at_least(1)
    rate: float = positive(0.5)
    kind: str = one_of(("a", "b"), "a")
    level: Literal["low", "high"] = "low"
    names: tuple[str, ...] = ()
    seconds: float | None = None

    def __post_init__(self) -> None:
        check(self)


def test_a_mapping_is_read_into_a_dataclass() -> None:
    assert read(Options, {"steps": 2, "rate": 1, "level": "high", "names": ["x"]}, "here").rate == 1.0
    for wrong, message in (
        ({}, "here: missing key 'steps'"),
        (
            {"steps": 1, "step": 1},
            "here: unknown key 'step'; expected some of steps, rate, kind, level, names, seconds",
        ),
        ({"steps": 0}, "here.steps: expected at least 1, got 0"),
        ({"steps": True}, "here.steps: expected an integer, got true"),
        ({"steps": 1, "rate": 0}, "here.rate: expected more than 0, got 0.0"),
        ({"steps": 1, "kind": "c"}, "here.kind: expected one of a, b, got 'c'"),
        ({"steps": 1, "level": "mid"}, 'here.level: expected one of low, high, got "mid"'),
        ({"steps": 1, "seconds": None}, "here.seconds: expected a number, got null"),
    ):
        with pytest.raises(FormatError) as caught:
            read(Options, wrong, "here")
        assert str(caught.value) == message
