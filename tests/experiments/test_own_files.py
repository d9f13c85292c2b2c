"""Machines, workloads and limits of one's own, as a new user types them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from executor.calibrate import Calibration
from experiments import workloads
from experiments.benchmark import speed
from experiments.common import cli
from experiments.reproduce import Work
from simulator import FormatError, Machine, Program
from tests.experiments.common.test_cli import refused, rows_in
from tests.experiments.conftest import Run, chain

MACHINE = """
name: mine
memory_bytes: 1000000000
h2d_bytes_per_s: 2000000000
d2h_bytes_per_s: 1000000000
flops_per_s: {float32: 1000000000000}
memory_bytes_per_s: 100000000000
"""
NETWORK = "name: small\nfamily: mlp\nbatch_size: 64\nwidth: 32\nlayers: 2\niteration_ms: {mine: 7}\n"
FACTORY = """
import torch

def factory():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    batch = torch.empty(32, 16), torch.zeros(32).long()
    return model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), batch
"""
ODD = "a=b (1), ü.yaml"  # a name that Hydra's grammar has no place for


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def made(work: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The summaries of a sweep by machine and workload."""
    found = [json.loads(file.read_text()) for file in (work / "runs").glob("evaluate-*/summary.json")]
    return {(one["config"]["machine"]["name"], one["program"]["name"]): one for one in found}


# ------------------------------------------------------------------------------------------- machines


def test_a_calibrated_machine_is_swept_beside_a_preset(run: Run, program_file: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    file = work / "my_machine.yaml"
    words = (f"program={program_file}", "planners=none", "limits=1.0", "jobs=1", "machine.copy_engines=1")
    copies = {"h2d": [(4096, 9000), (16384, 11000)], "d2h": [(4096, 9000), (16384, 11000)]}
    machine = replace(Machine.load("k40c"), name="my_machine", h2d_bytes_per_s=6 * 10**9)
    # As executor.calibrate does it.
    Calibration(
        machine,
        "a GPU",
        copies,
        0.01,
        {"h2d": 1.0, "d2h": 1.1},
        {"h2d": 1.0, "d2h": 0.95},
        0.02,
        {"h2d": 0.02, "d2h": 0.01},
        0.01,
    ).save(file)
    written(work, ODD, MACHINE)
    done = run("evaluate", "-m", *words, f"machine=gtx1080ti,my_machine.yaml,'{ODD}'")
    assert done.returncode == 0, done.stderr
    found = {name: one for (name, _), one in made(work).items()}
    assert set(found) == {"gtx1080ti", "my_machine", "mine"}
    mine, preset = found["my_machine"]["config"]["machine"], found["gtx1080ti"]["config"]["machine"]
    assert Machine.from_dict(mine) == replace(machine, copy_engines=1)  # nothing of gtx1080ti, the default
    assert preset["copy_engines"] == 1
    assert all(f"machine=gtx1080ti,my_machine.yaml,'{ODD}'" in one["command"] for one in found.values())


def test_a_path_needs_no_quotes(run: Run, program_file: Path, tmp_path: Path) -> None:
    written(tmp_path / "work", f"a folder/{ODD}", MACHINE)
    words = (f"program={program_file}", "planners=none", "limits=1.0", "jobs=1", f"out={tmp_path / 'out'}")
    done = run("evaluate", *words, f"machine=a folder/{ODD}")
    assert done.returncode == 0, done.stderr
    assert rows_in(tmp_path / "out")[0]["machine"] == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("", "machine: expected an object"),
        ("a: [1", "cannot be read (while parsing"),
        ("name: x", "machine: missing key 'memory_bytes'"),
        (MACHINE + "copy_engines: 3", "machine.copy_engines: expected 1 or 2, got 3"),
        (MACHINE + "duplex: 3", "machine: unknown key 'duplex'"),
    ],
)
@pytest.mark.parametrize("sweep", [False, True])
def test_a_wrong_machine_is_one_sentence(
    text: str | None, words: str, sweep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        written(tmp_path, "my=machine.yaml", text)
    with pytest.raises(FormatError) as caught:
        cli.with_own_files(["machine=h100,my=machine.yaml" if sweep else "machine=my=machine.yaml"])
    assert cli.sentence(caught.value).startswith(f"my=machine.yaml: {words}")


def test_errors_about_a_file_name_it(run: Run, program_file: Path, tmp_path: Path) -> None:
    written(tmp_path / "work", "mine.yaml", MACHINE)
    base = (f"program={program_file}", "planners=none", "jobs=1")
    refused(run("evaluate", *base, "machine=none.yaml"), "none.yaml: cannot be read (No such file or directory)")
    refused(run("evaluate", *base, "machine=mine"), "no such machine", "a file of your own ends in .yaml")
    refused(run("evaluate", *base, "machine=mine.yaml,h100"), "machine=mine.yaml,h100: several values", "-m")
    refused(run("reproduce", "figure=all", "machine=mine.yaml"), "machine=mine.yaml: unknown key", "gpu")
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["mine.yaml"]


def test_what_is_no_file_stays_as_it_was_typed() -> None:
    words = [
        "machine=gtx1080ti",
        "-m",
        "machine=h100,k40c",
        "limit=0.5",
        "program=step.json",
        "~x",
        "machine={name: x}",
    ]
    assert cli.with_own_files(words) == (words, {})


def test_a_figure_takes_a_machine_file(tmp_path: Path) -> None:
    file = written(tmp_path, "mine.yaml", MACHINE)
    config = cli.plain(OmegaConf.load(cli.CONFIGS / "figure" / "superneurons_table3.yaml"))  # type: ignore[arg-type]
    assert Work(config, True, str(file), tmp_path).machine == Machine.load(file)


# ------------------------------------------------------------------------------------------ workloads


def test_workloads_of_ones_own_are_swept_beside_a_preset(run: Run, tmp_path: Path) -> None:
    work = tmp_path / "work"
    written(work, "mymodel.py", FACTORY)
    written(work, "mine.yaml", MACHINE)
    written(work, "nets/my_net.yaml", NETWORK)
    written(work, "model.yaml", "name: model\nfamily: module\ntarget: mymodel:factory\n")
    written(work, "short.yml", "target: mymodel:factory")
    words = ("planners=none", "limits=1.0", "jobs=1", "machine=mine.yaml")
    done = run("evaluate", "-m", *words, "workload=nets/my_net.yaml,model.yaml,short.yml,mlp")
    assert done.returncode == 0, done.stderr
    found = made(work)
    assert set(found) == {("mine", name) for name in ("small", "model", "Sequential", "mlp")}
    assert found["mine", "small"]["program"]["ideal_ns"] == 7_000_000
    assert found["mine", "small"]["config"]["workload"] == OmegaConf.create(NETWORK)


def test_a_workload_file_is_changed_as_a_preset_is(run: Run, tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    written(work, "my_net.yaml", NETWORK)
    written(work, "mymodel.py", FACTORY)
    written(work, "copy.yaml", (cli.CONFIGS / "workload" / "module.yaml").read_text())
    words = ("planners=none", "limits=1.0", "jobs=1", f"out={out}")
    done = run("evaluate", *words, "workload=my_net.yaml", "workload.width=64")
    assert done.returncode == 0, done.stderr
    fingerprint = json.loads((out / "summary.json").read_text())["program"]["fingerprint"]
    config = cli.workload(str(work / "my_net.yaml"))
    assert fingerprint == workloads.load({**config, "width": 64}, Machine.load("gtx1080ti")).program.fingerprint
    done = run("evaluate", *words, "workload=copy.yaml", "target=mymodel:factory")
    assert done.returncode == 0, done.stderr
    assert rows_in(out)[0]["workload"] == "module"
    with pytest.raises(cli.UsageError, match=r"unknown key 'workload\.depth'"):
        words = [f"workload={work / 'my_net.yaml'}", "workload.depth=3"]
        cli.check_overrides("evaluate", cli.with_own_files(words)[0], sweep=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("", "not a workload"),
        ("- vgg16", "not a workload"),
        ("name: [1", "cannot be read (while parsing"),
        ("name: a\nname: b", "line 2: key 'name' stands twice"),
    ],
)
def test_a_wrong_workload_is_one_sentence(text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "my_net.yaml" if text is None else written(tmp_path, "my_net.yaml", text)
    with pytest.raises(cli.UsageError) as caught:
        cli.with_own_files([f"workload={file}"])
    assert cli.sentence(caught.value).startswith(f"{file}: {words}")


def test_the_keys_of_a_workload_file_are_checked_as_a_presets(run: Run, tmp_path: Path) -> None:
    written(tmp_path / "work", "key.yaml", NETWORK + "dept: 3\n")
    refused(run("evaluate", "workload=key.yaml"), "workload: unknown key 'dept'; mlp has ")
    family = written(tmp_path, "family.yaml", "name: a\nbatch_size: 3")
    with pytest.raises(workloads.WorkloadError, match=r"workload.family: expected alexnet, .*, got None"):
        workloads.build(cli.workload(str(family)))


def test_the_suite_speed_takes_a_workload_file(tmp_path: Path) -> None:
    machine = Machine.load(written(tmp_path, "mine.yaml", MACHINE))
    _, program = speed.capture(str(written(tmp_path, "my_net.yaml", NETWORK)), machine)
    assert (program.name, program.ideal_ns) == ("small", 7_000_000)
    with pytest.raises(cli.UsageError, match="no workload 'my_net'"):
        speed.capture("my_net", machine)


# --------------------------------------------------------------------------------------------- limits


def test_limits_with_units(run: Run, program: Program, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = (f"program={program_file}", "planners=autoswap_doa", "jobs=1", f"out={out}")
    done = run("evaluate", *words, "limits=[200MB,0.75,170MiB,1.5e8,80%,160 MB]")
    assert done.returncode == 0, done.stderr
    peak = program.peak_bytes
    expected = [200_000_000, int(0.75 * peak), 170 * 2**20, 150_000_000, int(0.8 * peak), 160_000_000]
    assert [row["limit_bytes"] for row in rows_in(out)] == sorted(expected, reverse=True)
    refused(run("evaluate", *words, "limits=24G"), "limits: expected a positive fraction", "24GiB", "got '24G'")
    refused(run("train_dqn", f"program={program_file}", "limit=1MB"), "cannot run in 1,000,000 bytes")
    refused(run("pack", program_file, "capacity=24G"), "capacity: expected an integer", "got '24G'")


def test_an_error_names_min_bytes_and_it_can_be_lowered(run: Run, tmp_path: Path) -> None:
    chain(nbytes=50_000).save(tmp_path / "small.json")
    words = (f"program={tmp_path / 'small.json'}", "limits=0.97", "planners=autoswap_doa", "jobs=1")
    why = "because every tensor that could leave is below min_bytes (1,048,576 bytes): min_bytes=50000 could help"
    assert run("evaluate", *words, f"out={tmp_path / 'a'}").returncode == 0
    assert str(rows_in(tmp_path / "a")[0]["reason"]).endswith(why)
    assert run("evaluate", *words, f"out={tmp_path / 'b'}", "min_bytes=50000").returncode == 0
    assert rows_in(tmp_path / "b")[0]["feasible"]
