"""Files from strangers: nothing in them runs, writes elsewhere, speaks to the terminal or grows without end."""

from __future__ import annotations

import gzip
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from agents.learned.training_state import TrainingStateError, read_training_state, write_training_state
from experiments.common import cli, report
from experiments.common.cli import UsageError
from experiments.plotting.plots import figure
from simulator import FormatError, Machine, Program, files
from simulator.files import write_json
from simulator.pool.files import load
from tests.experiments.conftest import Run
from tests.tiny import PROGRAM

CALLS = {"callbacks": {"x": {"_target_": "os.mkdir", "path": "made"}}}


@pytest.mark.parametrize("package", ["_global_", "hydra", "agent"])
def test_a_workload_sets_nothing_but_itself(package: str, run: Run, tmp_path: Path) -> None:
    node = {"hydra": CALLS, "workload": {"family": "vgg"}}
    path = tmp_path / "net.yaml"
    path.write_text(f"# @package {package}\n" + OmegaConf.to_yaml(OmegaConf.create(node)))
    done = run("evaluate", f"workload={path}", "planners=[none]")
    assert done.returncode == 2 and not (tmp_path / "work" / "made").exists()
    assert "unknown key 'hydra'" in done.stderr if package == "_global_" else "is for the package" in done.stderr


def test_a_name_is_no_path_no_formula_and_no_markup(run: Run, tmp_path: Path) -> None:
    name = r"x/../../y $\frac$ [red]z[/red]"
    Program(name, PROGRAM.tensors, PROGRAM.kernels).save(tmp_path / "step.json")
    done = run("evaluate", f"program={tmp_path / 'step.json'}", "limits=[0.95]", "planners=[none]")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.json", "work"]
    (out,) = (tmp_path / "work" / "runs").iterdir()
    assert out.name.startswith("evaluate-x_.._.._y") and list(out.glob("*.png"))
    with figure(tmp_path / "a.png") as axes:
        axes.set_title(name)  # as it stands there


def test_a_name_that_speaks_to_the_terminal_is_refused(tmp_path: Path) -> None:
    for where, text in (("program.name", "\x1b[2J"), ("tensors[0].name", "a\nb"), ("kernels[0].name", "\u202e")):
        data = PROGRAM.to_dict()
        entry = data if where == "program.name" else data[where.partition("[")[0]][0]
        entry["name"] = text
        write_json(tmp_path / "step.json", data)
        with pytest.raises(FormatError) as caught:
            Program.load(tmp_path / "step.json")
        assert f"{where}: " in str(caught.value) and "cannot be printed" in str(caught.value)
        assert str(caught.value).isprintable()


def test_a_file_is_as_large_as_it_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b" " * 10**6))
    (tmp_path / "a.csv").write_bytes(b" " * 1001)
    for name, read in (("a.json.gz", Program.load), ("a.csv", load)):
        with pytest.raises(FormatError, match="larger than 1,000 bytes"):
            read(tmp_path / name)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    for read in (Program.load, Machine.load, load, cli._workload_file):
        with pytest.raises((FormatError, UsageError), match="it is no file"):
            read(tmp_path / "a.json")


@pytest.mark.parametrize(("text", "message"), [
    ("a: &x [1, 2]\nb: *x\n", "line 2: aliases are not read"),
    ("a: 1\nb:\n  c: 1\n  c: 2\n", "line 4: key 'c' stands twice"),
    ("[" * 40 + "]" * 40, "nested too deeply"),
])  # fmt: skip
def test_yaml_is_plain(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    for read in (Machine.load, cli._workload_file):
        with pytest.raises((FormatError, UsageError), match=message):
            read(tmp_path / "a.yaml")


def test_json_has_a_key_once(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"format": "program/1", "name": {"x": 1, "x": 2}}')
    with pytest.raises(FormatError, match="key 'x' stands twice in an object"):
        Program.load(tmp_path / "a.json")


def test_pickles_that_take_for_ever_to_hash(tmp_path: Path) -> None:
    nested: tuple[Any, ...] = ()
    for _ in range(40):
        nested = (nested, nested)
    bombs = [pickle.dumps([nested], protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    bombs.append(b"\x80\x02}" + b")" + b"2\x86" * 40 + b"K\x01s.")  # {tuple: 1}, by DUP
    for bomb in bombs:
        (tmp_path / "a.pickle").write_bytes(bomb)
        with pytest.raises(FormatError, match=r"refused to unpickle byte \d+: (a tuple in a tuple|DUP)"):
            load(tmp_path / "a.pickle")


def test_a_checkpoint_with_another_byte(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    write_training_state(path, {"weights": torch.ones(64)})
    read_training_state(path)
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as parts:
        data = max(parts.infolist(), key=lambda part: part.file_size)
    raw[raw.index(torch.ones(64).numpy().tobytes())] ^= 1
    assert data.file_size == 256
    path.write_bytes(bytes(raw))
    with pytest.raises(TrainingStateError, match="not a checkpoint, or a damaged one"):
        read_training_state(path)


def test_what_a_console_prints_is_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    report.console().print("[red]a[/red]")
    assert capsys.readouterr().out == "[red]a[/red]\n"
