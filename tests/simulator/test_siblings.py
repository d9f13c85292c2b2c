"""Tests the warning about a package that hides one of Headroom's."""

import sys
from pathlib import Path

import pytest

from simulator.siblings import SIBLINGS, hidden, warn_if_hidden


def test_no_package_is_hidden_here() -> None:
    assert hidden() == {}


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_package_of_the_same_name_is_reported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match=f"hides Headroom's package '{name}'.*rename it") as caught:
        warn_if_hidden()
    assert len(caught) == 1 and str(tmp_path / name) in str(caught[0].message)


def test_a_folder_without_init_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents").mkdir()
    monkeypatch.delitem(sys.modules, "agents", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert hidden() == {}
