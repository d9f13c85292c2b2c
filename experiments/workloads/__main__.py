"""``python -m experiments.workloads``: captured peaks and roofline times, beside the paper's."""

from __future__ import annotations

import time
from pathlib import Path

import yaml

from experiments.common import cli, report
from experiments.workloads import load
from simulator.machine import Machine

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "workload"


def main() -> None:
    """Prints one row per network; ideal is the unscaled roofline. MB are 2**20 bytes, as the paper's
    (experiments/figures/smartpool_table1.py)."""
    machine = Machine.load("gtx1080ti")
    print("workload   peak MB  paper MB    diff   ideal ms  paper ms    diff   kernels  capture s")
    configs = [yaml.safe_load(path.read_text()) for path in CONFIGS.glob("*.yaml")]
    known = {c["name"]: c for c in configs if "paper_peak_mb" in c}
    for name in report.tracked(sorted(known, key=lambda name: known[name]["paper_peak_mb"]), "capturing"):
        config = known[name]
        begin = time.perf_counter()
        program = load({**config, "iteration_ms": {}}, machine).program
        seconds = time.perf_counter() - begin
        peak, paper = program.peak_bytes / 2**20, config["paper_peak_mb"]
        ideal, measured = program.ideal_ns / 1e6, config["iteration_ms"][machine.name]
        print(
            f"{config['name']:10s} {peak:7.0f}  {paper:8d}  {peak / paper - 1:+6.1%}   {ideal:8.1f}  {measured:8d}  "
            f"{ideal / measured - 1:+6.1%}   {len(program.kernels):7d}  {seconds:9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt as stop:
        cli.stopped(stop)
