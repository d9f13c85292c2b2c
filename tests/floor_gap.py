"""Shows which part of the floor is far from plans: its transfers, its recomputation, or its peak of memory.

python -m tests.floor_gap PROGRAM.json MACHINE.yaml LIMIT [CALLS]    # LIMIT: bytes, or a fraction of the peak

Prints the floor of mode joint, and with the memory of the heaviest kernel as its only memory constraint; then floor and
plan of mode swap, in which nothing is recomputed. Overheads are in %.
"""

from __future__ import annotations

import sys
import time
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from agents.floor import Floor, floor
from agents.floor.transfers import Groups
from agents.planner import Infeasible
from agents.search.annealing import Annealing
from simulator import Machine, Program, simulate


def peak_only(groups: Groups, load: NDArray[np.int64], min_load: NDArray[np.int64], limit: int) -> list[int]:
    """Returns the heaviest kernel alone (see ``Groups.heaviest``)."""
    return [int(load.argmax())]


def report(name: str, result: Floor, begin: float) -> None:
    """Prints a floor and the processor time since ``begin``."""
    print(f"{name:<36} {100 * result.overhead:8.2f}   {time.process_time() - begin:.0f} CPU s", flush=True)


def main(path: str, machine_path: str, limit_text: str, calls: str = "3000") -> None:
    """Runs the command."""
    program = Program.load(path)
    machine = Machine.load(machine_path)
    limit = int(float(limit_text) * (program.peak_bytes if float(limit_text) <= 1 else 1))
    begin = time.process_time()
    report("joint, floor", floor(program, machine, limit), begin)
    begin = time.process_time()
    with patch.object(Groups, "heaviest", peak_only):
        report("joint, floor, memory at the peak only", floor(program, machine, limit), begin)
    begin = time.process_time()
    report("swap, floor", floor(program, machine, limit, "swap"), begin)
    try:
        plan = Annealing(calls=int(calls), mode="swap").plan(program, machine, limit)
        print(f"{'swap, plan':<36} {100 * simulate(program, plan, machine, limit).overhead:8.2f}")
    except Infeasible as error:
        print(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
