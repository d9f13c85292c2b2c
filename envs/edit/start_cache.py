"""Start plans of named starts on disk, so that a task is planned only once.

The folder is ``headroom/starts`` in ``$XDG_CACHE_HOME`` (default: ``~/.cache``). It has one file per start, program,
machine, limit, mode and ``min_bytes``; its name also depends on the code and the weights that make the plans. Files
may be deleted at any time.
"""

from __future__ import annotations

import os
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray

from envs.tasks import fingerprint
from simulator.compiled.encoding import COLUMNS, Ints, decisions_of
from simulator.files import FormatError, fields, label, load_json, write_json
from simulator.plan import Plan, PlanError

if TYPE_CHECKING:
    from envs.edit.task import EditTask, StartMaker

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("simulator", "envs", "agents")


class _Starts(NamedTuple):
    """What a start maker leaves in a task of G gaps."""

    calls: int  # of the simulator
    plans: list[Ints]  # (k, COLUMNS) each
    weights: NDArray[np.float64]  # (G, choices): the moves' weights
    priors: NDArray[np.float64]  # (G, choices)


def folder() -> Path:
    """Returns the folder of the files."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG base directory specification ignores relative paths.
    return (cache_home if cache_home.is_absolute() else Path.home() / ".cache") / "headroom" / "starts"


def cached(name: str, make: StartMaker) -> StartMaker:
    """Returns a start maker that reads what ``make``, called ``name``, left for an equal task, or makes and stores it.

    A damaged file is replaced, and a folder that cannot be written is not used; both warn.
    """

    def start(task: EditTask) -> list[Ints]:
        key = [name, fingerprint(task.program, task.machine), task.limit, task.mode, task.min_bytes, _code_digest()]
        path = folder() / f"{label(task.program.name)}-{sha256(repr(key).encode()).hexdigest()[:16]}.json.gz"
        if path.exists():
            try:
                starts = load_json(path, lambda data: _read(data, task))
            except FormatError as error:
                gymnasium.logger.warn(f"{error}; the start plans are replaced")
            else:
                task.engine.calls += starts.calls
                task.moves.weights = starts.weights
                task.priors = starts.priors
                return starts.plans
        calls = task.engine.calls
        plans = list(make(task))
        data = {
            "calls": task.engine.calls - calls,
            "plans": [rows.tolist() for rows in plans],
            "weights": task.moves.weights.tolist(),
            "priors": task.priors.tolist(),
        }
        try:
            write_json(path, data)
        except OSError as error:
            gymnasium.logger.warn(f"{path}: the start plans are not cached ({error.strerror})")
        return plans

    return start


@cache
def _code_digest() -> str:
    """Returns the digest of all code and weights that plans depend on."""
    digest = sha256()
    for package in PACKAGES:
        for path in sorted(path for kind in ("*.py", "*.pt") for path in (ROOT / package).rglob(kind)):
            digest.update(path.relative_to(ROOT).as_posix().encode() + sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _read(data: object, task: EditTask) -> _Starts:
    """Returns the content of a file for a task; raises FormatError if it does not fit it."""
    entries = fields(data, "starts", {"calls": int, "plans": list, "weights": list, "priors": list}, {})
    shape = task.moves.weights.shape
    plans = [_array(rows, f"plans[{i}]", np.int64, (-1, COLUMNS)) for i, rows in enumerate(entries["plans"])]
    for i, rows in enumerate(plans):
        if not task.moves.accepts(rows):
            raise FormatError(
                f"plans[{i}]: evicts tensors in gaps or modes that the task does not allow; delete the file"
            )
        try:
            Plan.of(task.program, decisions_of(rows), "", task.limit, task.machine.name).check(task.program)
        except PlanError as error:
            raise FormatError(f"plans[{i}]: {error}") from None
    weights, priors = (_array(entries[name], name, np.float64, shape) for name in ("weights", "priors"))
    if weights.min(initial=0.0) < 0 or not np.isfinite(weights).all() or not np.isfinite(priors).all():
        raise FormatError("weights, priors: expected finite numbers, and weights of at least 0")
    return _Starts(entries["calls"], plans, weights, priors)


def _array(values: Any, where: str, kind: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Returns nested lists of numbers as an array; -1 in ``shape``: any. Raises FormatError for other lists."""
    if values == []:  # a plan without decisions
        return np.empty((0, *shape[1:]), kind)
    try:
        array = np.array(values)
    except ValueError:  # ragged
        array = np.empty(0, object)
    if array.ndim != 2 or array.shape[1:] != shape[1:] or shape[0] not in (-1, len(array)):
        raise FormatError(f"{where}: expected a list of lists of {shape[1]} numbers")
    if not np.can_cast(array.dtype, kind, "safe"):
        raise FormatError(f"{where}: expected {np.dtype(kind).name}, got {array.dtype}")
    return array.astype(kind)
