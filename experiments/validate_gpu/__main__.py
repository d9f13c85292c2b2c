"""Does the simulator say what a GPU does?

    python -m experiments.validate_gpu [backend=cuda|host] [stages=…] [out=DIR] [key=value …]

It calibrates the machine, captures and profiles each workload, plans it by every planner that needs no training,
replays each plan, and trains real steps under some of them; of stages, ``compare`` adds what PyTorch offers
(pytorch_baselines.py), ``largest`` the largest batch of each (largest_batch.py). Each stage is a process of its own,
and reads in ``out`` what those before it, or other commands, have left there (stages.py); nothing is measured twice.
Only ``plan`` needs no GPU: it may be done elsewhere. Every measurement is a line of ``measurements.jsonl`` at once; all
are gathered in results.json, table.md and PNGs, and the directory in one file beside it, DIR.tar.gz.

What there is no time for has a row that says so, and is tried again by the next command. ``backend=host`` does the same
in small without a GPU. Needed: PyTorch, CuPy, NumPy, SciPy, Numba, PyYAML. Results: executor/README.md.
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

# Before PyTorch is imported: experiments/validate_gpu/conditions.py says why.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from agents.deadline import TimeUp
from executor import CaptureError
from executor.fit import FitError
from executor.replay.backend import BackendError
from experiments.common import help
from experiments.common.lock import Busy, held
from experiments.validate_gpu import results, stages
from experiments.validate_gpu.record import DEATHS, Broken, Record
from experiments.validate_gpu.settings import LEAST, STAGES, Settings, UsageError, parse
from experiments.validate_gpu.stages import Run
from simulator import Machine
from simulator.files import FormatError

FAILED, BROKEN, STOPPED = 2, 3, 130  # exit statuses


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    keys = help.attributes(Settings)
    parser = argparse.ArgumentParser("experiments.validate_gpu", description=str(__doc__), epilog=f"keys:\n{keys}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("settings", nargs="*", metavar="key=value")
    words = parser.parse_args(words).settings
    try:
        settings = parse(words)
        if settings.backend == "cuda" and settings.stages != ("plan",) and not torch.cuda.is_available():
            raise UsageError("there is no CUDA GPU here; backend=host runs the same in small without one")
        if settings.machine:
            Machine.load(settings.machine)
    except (UsageError, FormatError) as error:
        print(error, file=sys.stderr)
        return FAILED
    out = Path(settings.out or f"runs/validate_gpu-{time.strftime('%Y%m%d-%H%M%S')}")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with held(out):
            if len(settings.stages) == 1:
                return one(settings, out)
    except Busy as error:
        print(error, file=sys.stderr)
        return FAILED
    status = in_turn(settings, words, out)
    print(f"results are in {out}, all of them in {results.pack(out)}")
    return status


def in_turn(settings: Settings, words: Sequence[str], out: Path) -> int:
    """Each stage in a process of its own, with its share of the time: what breaks CUDA, or a process, ends one stage,
    which begins anew without what broke it."""
    end, status = time.monotonic() + settings.seconds, 0
    given = [word for word in words if word.partition("=")[0] not in ("stages", "out", "seconds")]
    for i, stage in enumerate(settings.stages):
        for _ in range(1 + DEATHS):
            share = STAGES[stage] / sum(STAGES[other] for other in settings.stages[i:])
            seconds = max(LEAST.get(stage, 1.0), share * (end - time.monotonic()))
            command = [sys.executable, "-m", "experiments.validate_gpu", *given]
            with subprocess.Popen([*command, f"stages={stage}", f"out={out}", f"seconds={seconds:.0f}"]) as process:
                try:
                    status = process.wait()
                except KeyboardInterrupt:  # the process has heard it, too
                    return process.wait()
            if status >= 0 and status != BROKEN:
                break
        if status > 0 and status != BROKEN:
            break
    return status


def one(settings: Settings, out: Path) -> int:
    """A stage in this process; returns the exit status."""
    settings = replace(settings, out=str(out))
    record, machine = Record(out, settings.seconds, settings.device), None
    run = Run(settings, record)
    (stage,) = settings.stages
    try:
        if stage != "calibrate":
            machine = run.machine
        getattr(stages, stage)(run)
    except TimeUp:
        pass  # what was under way has its row
    except (BackendError, CaptureError, FitError, FormatError, UsageError) as error:
        print(error, file=sys.stderr)
        return FAILED
    except Broken as error:
        print(error, file=sys.stderr)
        return BROKEN
    except KeyboardInterrupt:
        print("stopped; what was measured until now is kept", file=sys.stderr)
        return STOPPED
    finally:
        results.write(settings, machine, record)
    print(f"results of {stage} are in {out}, all of them in {results.pack(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
