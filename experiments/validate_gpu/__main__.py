"""Validates the simulator's predictions of time and memory on a GPU.

    python -m experiments.validate_gpu [backend=cuda|host] [stages=…] [out=DIR] [key=value …]

Stages: calibrate the machine, profile each workload, plan with every planner that needs no training, replay the plans
and train under some of them (experiments/measure/gpu/stages.py). Optional: ``compare`` (PyTorch's methods) and
``largest`` (largest batch). Each stage is a process that reuses the files in ``out``; only ``plan`` runs without a GPU.
Every measurement is appended to ``measurements.jsonl``; a later command retries rows that ran out of time. Outputs:
results.json, table.md, PNGs, and DIR.tar.gz with the whole directory. ``backend=host`` runs tiny networks without a
GPU. Requires PyTorch, CuPy, NumPy, SciPy, Numba, PyYAML. Results: executor/README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.common import help
from experiments.common.lock import lock_directory
from experiments.measure.gpu import results
from experiments.measure.gpu.stages import run_stage, run_stages
from experiments.measure.runner import Status
from experiments.measure.settings import Settings, UsageError, parse
from simulator import Machine
from simulator.files import FormatError


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    keys = help.attributes(Settings)
    parser = argparse.ArgumentParser(
        "experiments.validate_gpu",
        description=str(__doc__),
        epilog=f"keys:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", metavar="key=value")
    words = parser.parse_args(words).settings
    try:
        settings = parse(words)
        if settings.backend == "cuda" and settings.stages != ("plan",) and not torch.cuda.is_available():
            raise UsageError("no CUDA GPU found; backend=host runs tiny networks without one")
        if settings.machine:
            Machine.load(settings.machine)
        out = Path(settings.out or f"runs/validate_gpu-{time.strftime('%Y%m%d-%H%M%S')}")
        out.mkdir(parents=True, exist_ok=True)
        with lock_directory(out):
            if len(settings.stages) == 1:
                return run_stage(settings, out)
    except (UsageError, FormatError) as error:
        print(error, file=sys.stderr)
        return Status.FAILED
    status = run_stages(settings, words, out)
    print(f"results are in {out}, packed in {results.pack(out)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
