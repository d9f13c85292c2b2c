"""Tests machines, workloads and limits from the user's own files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from executor.calibrate import Calibration
from experiments import workloads
from experiments.common import cli
from experiments.measure.speed import suite as speed
from experiments.reproduce import FigureRun
from simulator import Machine, Program
from tests.experiments.conftest import Run, refused, rows_in

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
ODD = "a=b (1), ü.yaml"  # a name outside Hydra's grammar


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def made(work: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the summaries of a sweep by machine and workload."""
    found = [json.loads(file.read_text()) for file in (work / "runs").glob("evaluate-*/summary.json")]
    return {(one["config"]["machine"]["name"], one["program"]["name"]): one for one in found}


def test_a_calibrated_machine_is_swept_beside_a_preset(run: Run, program_file: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    words = (f"program={program_file}", "planners=none", "limits=1.0", "jobs=1", "machine.copy_engines=1")
    machine = replace(Machine.load("k40c"), name="my_machine", h2d_bytes_per_s=6 * 10**9)
    both = {"h2d": 1.0, "d2h": 0.9}
    copies = {way: [(4096, 9000), (16384, 11000)] for way in both}
    Calibration(machine, "a GPU", copies, 0.01, both, both, 0.02, both, 0.01).save(work / "my_machine.yaml")
    written(work, ODD, MACHINE)
    done = run("evaluate", "-m", *words, f"machine=gtx1080ti,my_machine.yaml,'{ODD}'").ok()
    assert "my_machine.yaml" in (work / done.stdout.splitlines()[-1] / "table.txt").read_text()
    found = {name: one for (name, _), one in made(work).items()}
    assert set(found) == {"gtx1080ti", "my_machine", "mine"}
    mine = found["my_machine"]["config"]["machine"]
    preset = found["gtx1080ti"]["config"]["machine"]
    assert Machine.from_dict(mine) == replace(machine, copy_engines=1)  # no keys of the default, gtx1080ti
    assert preset["copy_engines"] == 1
    assert all(f"machine=gtx1080ti,my_machine.yaml,'{ODD}'" in one["command"] for one in found.values())


def test_a_path_needs_no_quotes_and_the_run_can_be_repeated(run: Run, program_file: Path, tmp_path: Path) -> None:
    written(tmp_path / "work", f"a folder/{ODD}", MACHINE)
    words = (f"program={program_file}", "planners=none", "limits=1.0", "jobs=1", f"out={tmp_path / 'out'}")
    run("evaluate", *words, f"machine=a folder/{ODD}").ok()
    assert rows_in(tmp_path / "out")[0]["machine"] == "mine"
    typed = OmegaConf.load(tmp_path / "out" / ".hydra" / "overrides.yaml")
    assert sorted(typed) == sorted((*words, f"machine=a folder/{ODD}"))
    run("evaluate", *typed, f"out={tmp_path / 'again'}").ok()
    assert rows_in(tmp_path / "again")[0]["machine"] == "mine"


def test_figures_and_the_suite_speed_take_files(tmp_path: Path) -> None:
    file = written(tmp_path, "mine.yaml", MACHINE)
    config = cli.to_dict(OmegaConf.load(cli.CONFIGS / "figure" / "superneurons_table3.yaml"))
    assert FigureRun(config, True, str(file), tmp_path).machine == Machine.load(file)
    _, program = speed.capture(str(written(tmp_path, "my_net.yaml", NETWORK)), Machine.load(file))
    assert (program.name, program.ideal_ns) == ("small", 7_000_000)
    with pytest.raises(cli.UsageError, match="'my_net'"):
        speed.capture("my_net", Machine.load(file))


def test_workloads_of_ones_own_are_swept_beside_a_preset(run: Run, tmp_path: Path) -> None:
    work = tmp_path / "work"
    written(work, "mymodel.py", FACTORY)
    written(work, "mine.yaml", MACHINE)
    written(work, "nets/my_net.yaml", NETWORK)
    written(work, "model.yaml", "name: model\nfamily: module\ntarget: mymodel:factory\n")
    written(work, "short.yml", "target: mymodel:factory")
    words = ("planners=none", "limits=1.0", "jobs=1", "machine=mine.yaml")
    run("evaluate", "-m", *words, "workload=nets/my_net.yaml,model.yaml,short.yml,mlp").ok()
    found = made(work)
    assert set(found) == {("mine", name) for name in ("small", "model", "Sequential", "mlp")}
    assert found["mine", "small"]["program"]["ideal_ns"] == 7_000_000
    assert found["mine", "small"]["config"]["workload"] == OmegaConf.create(NETWORK)


def test_a_workload_file_is_changed_as_a_preset_is(run: Run, tmp_path: Path) -> None:
    work = tmp_path / "work"
    out = tmp_path / "out"
    written(work, "my_net.yaml", NETWORK)
    written(work, "mymodel.py", FACTORY)
    written(work, "copy.yaml", (cli.CONFIGS / "workload" / "module.yaml").read_text())
    words = ("planners=none", "limits=1.0", "jobs=1", f"out={out}")
    run("evaluate", *words, "workload=my_net.yaml", "workload.width=64").ok()
    fingerprint = json.loads((out / "summary.json").read_text())["program"]["fingerprint"]
    config = cli.workload(str(work / "my_net.yaml"))
    assert fingerprint == workloads.load({**config, "width": 64}, Machine.load("gtx1080ti")).program.fingerprint
    run("evaluate", *words, "workload=copy.yaml", "target=mymodel:factory").ok()
    assert rows_in(out)[0]["workload"] == "module"
    refused(run("evaluate", *words, "workload=my_net.yaml", "workload.depth=3"), "workload.depth")


def test_limits_with_units(run: Run, program: Program, program_file: Path, tmp_path: Path) -> None:
    words = (f"program={program_file}", "planners=autoswap_doa", "jobs=1", f"out={tmp_path / 'out'}")
    run("evaluate", *words, "limits=[200MB,0.75,170MiB,1.5e8,80%,160 MB]").ok()
    peak = program.peak_bytes
    expected = [200_000_000, int(0.75 * peak), 170 * 2**20, 150_000_000, int(0.8 * peak), 160_000_000]
    assert [row["limit_bytes"] for row in rows_in(tmp_path / "out")] == sorted(expected, reverse=True)
    run("evaluate", *words, "limits=0.8", f"min_bytes={2**30}").ok()
    assert "min_bytes=" in rows_in(tmp_path / "out")[0]["reason"]
