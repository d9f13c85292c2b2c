"""Tests of zoo models and of the zoo command: peaks equal MemTracker's, three steps are bit-identical to eager mode."""

from collections.abc import Iterator

import pytest
import torch

from tests.zoo import __main__ as zoo

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["SegFormer", "Gemma 2"])  # hooks that the model adds itself; a cache that is empty
def test_a_model_of_the_zoo(name: str) -> None:
    row = zoo.look(name, "capuchin")
    assert row.good and row.same and row.peak == row.tracked > 0 and row.moved > 0


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main(["GraphSAGE (torch_geometric)", "GCN (torch_geometric)"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 equal eager mode, 1 refused, 0 wrong" in printed
    assert "| the same |" in printed and "the shape of a result depends on the values" in printed
    assert zoo.main(["no such"]) == 2

    def broken(*_: object, **__: object) -> None:
        raise KeyError(3)

    monkeypatch.setattr(zoo, "fit", broken)
    assert zoo.main(["GPT-2"]) == 1
    assert "WRONG: KeyError: 3" in capsys.readouterr().out
