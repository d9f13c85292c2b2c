"""Tests that invalid files and settings yield one sentence naming the cause, status 2, and no leftover files."""

from __future__ import annotations

import json
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agents.learned.checkpoint import TrainingStateError, read_training_state, write_training_state
from experiments.common import report
from experiments.plotting.plots import figure
from simulator import Plan, Program, Swap
from tests.experiments.conftest import Run, chain, refused
from tests.tiny import PROGRAM

MACHINE = """
name: mine
memory_bytes: 1000000000
h2d_bytes_per_s: 2000000000
d2h_bytes_per_s: 1000000000
"""
CALLS = "hydra: {callbacks: {x: {_target_: os.mkdir, path: made}}}\nworkload: {family: vgg}\n"


def program(change: Callable[[dict[str, Any]], Any]) -> str:
    data = PROGRAM.to_dict()
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("word", "content", "named"),
    [
        ("machine=a.yaml", None, ["a.yaml"]),
        ("machine=a.yaml", "", ["machine"]),
        ("machine=a.yaml", "a: [1", ["a.yaml"]),
        ("machine=a.yaml", "name: x", ["memory_bytes"]),
        ("machine=a.yaml", MACHINE + "copy_engines: 3", ["machine.copy_engines"]),
        ("machine=a.yaml", MACHINE + "duplex: 3", ["'duplex'"]),
        ("machine=a.yaml", "a: 1\nb:\n  c: 1\n  c: 2\n", ["line 4", "'c'"]),
        ("machine=a.yaml", "[" * 40 + "]" * 40, ["a.yaml"]),
        ("workload=a.yaml", None, ["a.yaml"]),
        ("workload=a.yaml", "- vgg16", ["a.yaml"]),
        ("workload=a.yaml", "name: a\nname: b", ["line 2", "'name'"]),
        ("workload=a.yaml", "name: a\nbatch_size: 3", ["workload.family"]),
        ("workload=a.yaml", "name: a\nfamily: mlp\ndept: 3", ["workload", "'dept'"]),
        ("workload=a.yaml", "# @package _global_\n" + CALLS, ["'hydra'"]),
        ("workload=a.yaml", "# @package hydra\n" + CALLS, ["'hydra'"]),
        ("workload=a.yaml", "# @package agent\n" + CALLS, ["'agent'"]),
        ("program=a.json", None, ["a.json"]),
        ("program=a.json", '{"format": "program/1"', ["a.json"]),
        ("program=a.json", '{"format": "program/1", "name": {"x": 1, "x": 2}}', ["'x'"]),
        ("program=a.json", program(lambda data: data.update(name="\x1b[2J")), ["program.name"]),
        ("program=a.json", program(lambda data: data["tensors"][0].update(name="a\nb")), ["tensors[0].name"]),
        ("program=a.json", program(lambda data: data["kernels"][0].update(name="\u202e")), ["kernels[0].name"]),
        ("file=a.csv", None, ["a.csv"]),
        ("file=a.csv", "id,lower,upper,size\n", ["a.csv"]),
        ("file=a.csv", "id,lower,upper,size\na,0,1,0\n", ["a.csv"]),
        ("file=a.csv", "\n\n", ["a.csv"]),
        ("file=a.csv", "id,lower,upper,size\na,0,1,-1\n", ["a.csv", "line 2", "size"]),
    ],
)
def test_malformed_files_are_reported_in_one_line(
    word: str, content: str | None, named: list[str], run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "work" / word.partition("=")[2]
    if content is not None:
        file.write_text(content)
    done = run(*(("pack", word) if word.startswith("file") else ("evaluate", "planners=none", word)))
    refused(done, *named)
    assert done.stderr.strip().isprintable()
    assert [path.name for path in (tmp_path / "work").iterdir()] == [file.name] * (content is not None)


SETTINGS = [
    ("evaluate {program} limits=[abc]", ["limits", "'abc'"]),
    ("evaluate {program} planners=[anealing]", ["'anealing'", "'annealing'"]),
    ("evaluate {program} mode=both", ["mode", "'both'"]),
    ("evaluate {program} seed=-1", ["seed", "-1"]),
    ("evaluate {program} workspace=fast", ["workspace", "'fast'"]),
    ("evaluate {program} workspace=true", ["workspace"]),
    ("evaluate {program} machine.memory_bytes=-1", ["machine.memory_bytes"]),
    ("evaluate {program} machine=mine", ["machine/mine", ".yaml"]),
    ("evaluate {program} plan={plan}", ["another program"]),
    ("evaluate -m machine=gtx1080ti,h10", ["h10"]),
    ("train_dqn limt=0.6", ["limt", "'limit'"]),
    ("train_dqn +limt=0.6", ["limt", "'limit'"]),
    ("train_dqn agent=3", ["agent=3"]),
    ("train_dqn agent=dqm", ["agent/dqm", "dqn"]),
    ("train_dqn copy_engines=1", ["'machine.copy_engines'"]),
    ("train_dqn seed=1,2", ["seed=1,2", "-m"]),
    ("train_dqn limit=[0.6", ["limit"]),
    ("train_dqn ~limit", ["limit"]),
    ("train_dqn agent=dqn_paper agent.walks=3", ["agent.num_envs"]),
    ("train_dqn agent.walkers=0", ["agent", "walkers"]),
    ("train_dqn hydra/launcher=nowhere", ["hydra/launcher"]),
    ("train_dqn {program} limit=0.01", ["chain"]),
    ("train_dqn {program} resume=none.pt", ["resume", "none.pt"]),
    ("train_dqn {program} resume={plan}", ["plan.json"]),
    ("train_dqn {program} reward=causal", ["reward", "agent=dqn_paper"]),
    ("train_dqn {program} agent=dqn_paper network=json:loads", ["network"]),
    ("train_sb3 limit=1", ["small"]),
    ("train_sb3 tracker=neptune", ["tracker"]),
    ("train_sb3 task=GpuMemory/unet-51-v1", ["'GpuMemory/unet-50-v1'"]),
    ("plan", ["target=", "workload=", "program="]),
    ("plan {program} target=a:b", ["target=", "workload=", "program="]),
    ("plan {program} times=fast", ["times", "'fast'"]),
    ("plan {program} memory=2G", ["memory", "2GiB or 2GB"]),
    ("plan {program} machine=h10", ["machine/h10", "'h100'", ".yaml"]),
    ("plan workload=gpt2_smal", ["workload/gpt2_smal", "'gpt2_small'"]),
    ("reproduce figure=smartpool_tabl1", ["figure/smartpool_tabl1", "'smartpool_table1'"]),
    ("reproduce smartpool_table1", ["expected figure=smartpool_table1"]),
    ("plan workload=mlp times=measured", ["times"]),
    ("pretrain training.width=0", ["width", "0"]),
    ("pretrain 'sets=[{{programs: 1, networks: [vgg]}}]'", ["sets[0].networks[0]", "'vgg'"]),
    ("reproduce figure=all machine=h100", ["machine", "gpu"]),
    ("pack", ["file"]),
    ("pack a.csv b.csv", ["-m"]),
    ("pack {blocks} algorithms=[smartpol]", ["'smartpol'", "'smartpool'"]),
    ("pack {blocks} algorithms=[cudamalloc]", ["algorithms", "cudamalloc"]),
    ("pack {blocks} capacity=24G", ["capacity", "'24G'"]),
    ("__main__ evaluete seed=1", ["'evaluete'", "'evaluate'"]),
]
# The same checks of further keys and commands.
OTHERS = [
    ("evaluate {program} limits=24G", ["limits", "'24G'"]),
    ("train_dqn machine.copy_engine=1", ["'machine.copy_engines'"]),
    ("train_dqn agent.greedy_calls=3", ["agent", "greedy_calls"]),
    ("train_dqn {program} network=json:loads", ["network"]),
    ("train_dqn {program} actions=full", ["actions", "agent=dqn_paper"]),
    ("train_sb3 +algo.walks=3", ["walks"]),
    ("train_sb3 network=nowhere:Mine", ["network", "'nowhere'"]),
    ("train_sb3 task=GpuMemory/unet-50-v1 limit=0.4", ["limit="]),
    ("plan {program} step_ms=0", ["step_ms", "0"]),
    ("pretrain held_out=[vgg19]", ["held_out", "'vgg19'"]),
    ("pretrain training.epochs=0", ["training", "epochs"]),
    ("pretrain sets=[vgg]", ["sets[0]"]),
    ("pretrain 'sets=[{{programs: 0, networks: []}}]'", ["sets[0].programs"]),
    ("pack .", ["."]),
    ("pack {blocks} algorithms=[]", ["algorithms"]),
    ("pack {blocks} seconds=soon", ["seconds"]),
    ("pack {blocks} iteration=maybe", ["iteration", "'maybe'"]),
    ("pack {blocks} iteration=true", ["iteration"]),
]


@pytest.mark.parametrize(
    ("words", "named"), [*SETTINGS, *(pytest.param(*other, marks=pytest.mark.nightly) for other in OTHERS)]
)
def test_invalid_settings_are_reported_in_one_line(
    words: str, named: list[str], run: Run, program_file: Path, tmp_path: Path
) -> None:
    other = chain(layers=7)
    Plan((Swap(*other.gaps()[0]),), other.fingerprint).save(tmp_path / "plan.json")
    (tmp_path / "blocks.csv").write_text("id,lower,upper,size\na,0,3,4\n")
    given = {"program": f"program={program_file}", "plan": tmp_path / "plan.json", "blocks": tmp_path / "blocks.csv"}
    refused(run(*shlex.split(words.format(**given))), *named)
    assert not any((tmp_path / "work").rglob("*.*"))


@pytest.mark.parametrize(
    "words", ["evaluate limits=[0.5,24]", "train_dqn limit=24", "train_sb3 limit=24", "plan memory=24"]
)
def test_a_limit_is_refused_before_a_capture(words: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Program:
        raise AssertionError("captured")

    monkeypatch.setattr("experiments.workloads.load", load)
    refused(run(*words.split(), "workload=vgg16"), "24 would be 24 bytes; was 24GiB meant?")


# ------------------------------------------------------------------------------------ readers


def test_a_name_is_no_path_no_formula_and_no_markup(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = r"x/../../y $\frac$ [red]z[/red]"
    Program(name, PROGRAM.tensors, PROGRAM.kernels).save(tmp_path / "step.json")
    run("evaluate", f"program={tmp_path / 'step.json'}", "limits=[0.95]", "planners=[none]").ok()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.json", "work"]
    (out,) = (tmp_path / "work" / "runs").iterdir()
    assert out.name.startswith("evaluate-x_.._.._y") and list(out.glob("*.png"))
    with figure(tmp_path / "a.png") as axes:
        axes.set_title(name)
    report.console().print("[red]a[/red]")
    assert capsys.readouterr().out == "[red]a[/red]\n"


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
    with pytest.raises(TrainingStateError):
        read_training_state(path)
