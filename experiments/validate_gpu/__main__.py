"""Validates the simulator's predictions of time and memory on a GPU.

    python -m experiments.validate_gpu [backend=cuda|host] [stages=…] [out=DIR] [key=value …]

Stages: calibrate the machine, profile each workload, plan with every planner that needs no training, replay the plans
and train under some of them. Optional: ``compare`` (PyTorch's methods, pytorch_baselines.py) and ``largest`` (largest
batch, largest_batch.py). Each stage is a process that reuses the files in ``out`` (stages.py); only ``plan`` runs
without a GPU. Every measurement is appended to ``measurements.jsonl``; a later command retries rows that ran out of
time. Outputs: results.json, table.md, PNGs, and DIR.tar.gz with the whole directory. ``backend=host`` runs tiny
networks without a GPU. Requires PyTorch, CuPy, NumPy, SciPy, Numba, PyYAML. Results: executor/README.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# Must be set before PyTorch is imported (reason: ENVIRONMENT in conditions.py).
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from agents.deadline import TimeUp
from executor import CaptureError
from executor.fit import FitError
from executor.replay.backend import BackendError
from experiments.common import help
from experiments.common.lock import lock_directory
from experiments.measure.gpu import results, stages
from experiments.measure.gpu.stages import Run
from experiments.measure.record import DEATHS, Broken, Record
from experiments.measure.settings import LEAST, STAGES, Settings, UsageError, parse
from simulator import Machine
from simulator.files import FormatError

# exit statuses
FAILED = 2
BROKEN = 3
STOPPED = 130


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
        return FAILED
    status = run_stages(settings, words, out)
    print(f"results are in {out}, packed in {results.pack(out)}")
    return status


def run_stages(settings: Settings, words: Sequence[str], out: Path) -> int:
    """Runs each stage in its own process with a share of the time and returns the last exit status.

    A stage whose process dies or loses CUDA is restarted and skips the measurement that broke it.
    """
    end = time.monotonic() + settings.seconds
    status = 0
    forwarded = [word for word in words if word.partition("=")[0] not in ("stages", "out", "seconds")]
    for i, stage in enumerate(settings.stages):
        for _ in range(1 + DEATHS):
            share = STAGES[stage] / sum(STAGES[other] for other in settings.stages[i:])
            seconds = max(LEAST.get(stage, 1.0), share * (end - time.monotonic()))
            command = [sys.executable, "-m", "experiments.validate_gpu", *forwarded]
            with subprocess.Popen([*command, f"stages={stage}", f"out={out}", f"seconds={seconds:.0f}"]) as process:
                try:
                    status = process.wait()
                except KeyboardInterrupt:  # the child received the signal as well
                    return process.wait()
            if status >= 0 and status != BROKEN:
                break
        if status > 0 and status != BROKEN:
            break
    return status


def run_stage(settings: Settings, out: Path) -> int:
    """Runs one stage in this process and returns the exit status."""
    settings = replace(settings, out=str(out))
    record = Record(out, settings.seconds, settings.device)
    machine = None
    run = Run(settings, record)
    (stage,) = settings.stages
    try:
        if stage != "calibrate":
            machine = run.machine
        getattr(stages, stage)(run)
    except TimeUp:
        pass  # the interrupted measurement has its row already
    except (BackendError, CaptureError, FitError, FormatError, UsageError) as error:
        print(error, file=sys.stderr)
        return FAILED
    except Broken as error:
        print(error, file=sys.stderr)
        return BROKEN
    except KeyboardInterrupt:
        print("stopped; completed measurements are kept", file=sys.stderr)
        return STOPPED
    finally:
        results.write(settings, machine, record)
    print(f"results of {stage} are in {out}, packed in {results.pack(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
