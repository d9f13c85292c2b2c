"""Measures planned steps and PyTorch's methods beside their predictions and bars in 15 minutes on a GPU.

    python -m experiments.validate_gpu.probe [out=DIR] [backend=cuda|host] [step=1|2] [section …]    (make gpu STEP=1)
    python -m experiments.validate_gpu.probe short      compile, gpt2 and tight: five minutes
    python -m experiments.validate_gpu.probe plans      makes the committed plans and reserved.json again, without a GPU

Each section (experiments/measure/gpu/sections.py) runs in its own process with its own time limit, so a section that
fails, hangs or breaks CUDA does not stop the next one. Every row is appended to DIR/probe.jsonl immediately and names
the bars that it missed; DIR/probe.json collects all rows. A later command with this DIR measures what is missing.
``backend=host`` runs all sections on small networks without a GPU.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from experiments.measure.gpu.bars import BARS
from experiments.measure.gpu.plan_files import write_plans
from experiments.measure.gpu.reserved import load_rows
from experiments.measure.gpu.sections import (
    COMMITTED,
    FRACTION,
    MACHINE,
    NETWORKS,
    SECTIONS,
    SHORT,
    Probe,
    committed_program,
    network_of,
)
from experiments.measure.gpu.stages import HOST
from experiments.measure.networks import build
from experiments.measure.record import Record
from experiments.measure.runner import Status, run_part, run_process
from experiments.measure.settings import Backend, UsageError, check_known, parse, values_of
from simulator import Machine
from simulator.files import write_json

RESERVED = {"llama_fused_bf16": "llama_bf16", "gpt2_medium_bf16": "gpt2_medium_bf16"}  # traced -> its plans


@dataclass(frozen=True)
class Options:
    """Command-line keys.

    Attributes:
        out: results folder.
        backend: "cuda" or "host".
        step: run only the sections of command 1 or 2; 0: of both.
        seconds: if positive, run the one named section in this process for at most this time.
    """

    out: str = "runs/gpu"
    backend: Backend = "cuda"
    step: Literal[0, 1, 2] = 0
    seconds: float = 0.0


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0 if every section ended normally."""
    words = sys.argv[1:] if words is None else words
    names = [word for word in words if "=" not in word]
    if list(words) == ["plans"]:
        make_plans(COMMITTED / "plans", "cuda")
        rows = load_rows(COMMITTED, Machine.load(MACHINE), FRACTION, RESERVED)
        write_json(COMMITTED / "reserved.json", {"format": "reserved/1", "rows": rows}, indent=1)
        return 0
    names = [name for word in names for name in (SHORT if word == "short" else (word,))]
    try:
        options = Options(**values_of(Options, [word for word in words if "=" in word]))
        check_known("section", names, SECTIONS)
        if options.backend == "cuda" and not torch.cuda.is_available():
            raise UsageError("no CUDA GPU found; backend=host runs a small probe without one")
    except UsageError as error:
        print(error, str(__doc__).splitlines()[2].strip(), sep="\nusage: ", file=sys.stderr)
        return Status.FAILED
    out = Path(options.out)
    if options.seconds:
        (name,) = names
        settings = parse([f"backend={options.backend}"])
        record = Record(out, options.seconds, settings.device, "probe")
        return run_part(lambda: SECTIONS[name].run(Probe(settings, record, name)))
    if options.backend == "host":
        make_plans(out / "plans", options.backend)
    chosen = names or [name for name, section in SECTIONS.items() if options.step in (0, section.step)]
    return run_sections(chosen, out, options.backend)


def run_sections(names: Sequence[str], out: Path, backend: Backend) -> int:
    """Runs each section in its own process and updates probe.json."""
    for name in names:
        section = SECTIONS[name]
        bars = "; ".join(str(bar) for bar in BARS if bar.section == name)
        print(f"{name:15}{section.seconds:4} s  {section.question}: {bars}")
    status = 0
    for name in names:
        begin = time.monotonic()
        seconds = float(SECTIONS[name].limit_s(backend))
        print(f"== {name}, at most {seconds:.0f} s", flush=True)
        words = [f"out={out}", f"backend={backend}", name, f"seconds={seconds:.0f}"]
        try:
            exit_status = run_process("experiments.validate_gpu.probe", words, seconds, SECTIONS[name].environment)
            failed = f"its process ended with status {exit_status}" if exit_status else ""
        except subprocess.TimeoutExpired:
            exit_status = 1
            failed = f"stopped after {seconds:.0f} s"
        record = Record(out, seconds, name="probe")
        if failed:
            status = 1
            record.add(section=name, failed=failed)
        record.add(section=name, seconds=round(time.monotonic() - begin, 1))
        gather(record, backend)
        if exit_status == Status.STOPPED:
            return exit_status
    print(f"results are in {out / 'probe.json'}; {shutil.make_archive(str(out), 'gztar', out)} has all files")
    return status


def make_plans(folder: Path, backend: Backend) -> None:
    """Writes the plans of all networks; for the host backend, of the tiny networks as captured here."""
    for name in NETWORKS:
        network = network_of(name, backend)
        machine = Machine.load(MACHINE) if backend == "cuda" else HOST
        program = committed_program(name) if backend == "cuda" else build(network, "cpu").captured(machine).program
        seconds = write_plans(folder, network, FRACTION, program, machine)
        print(f"{network}: {seconds:.1f} s of a processor", flush=True)


def gather(record: Record, backend: Backend) -> None:
    """Writes the rows of the record to probe.json."""
    device = torch.cuda.get_device_name() if backend == "cuda" else "host"
    document = {"format": "probe/1", "device": device, "torch": torch.__version__, "rows": record.rows}
    write_json(record.out / "probe.json", document, indent=1)


if __name__ == "__main__":
    sys.exit(main())
