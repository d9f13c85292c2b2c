"""Worker processes for the tasks of a command: of this computer, or of a Ray cluster.

- ``processes``: spawned here.
- ``ray``: the cluster at RAY_ADDRESS, else one of this computer's cores that starts and ends with the command. A task
  whose worker dies is given to another. What a task prints is printed here as it is, when the task is done.

Workers of a cluster have the same installation, and the command's directory under the same path.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from itertools import islice
from typing import Any

from experiments import ctrl_c_waits

RETRIES = 3  # of a task whose worker died
STARTS = 10  # of Ray, until it does
Submit = Callable[..., Future[Any]]


def results(
    launcher: str, jobs: int | None, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, Any]]:
    """Of every task, as they are done: its index, and what ``function(*task)`` returned, or the Exception it raised.

    Args:
        launcher: a key of LAUNCHERS.
        jobs: how many are under way at once; None, for Ray: as many as it has cores for.
    """
    most = jobs or len(tasks)
    with LAUNCHERS[launcher](jobs) as submit:
        todo, under_way = enumerate(tasks), dict[Future[Any], int]()
        while True:
            for i, task in islice(todo, most - len(under_way)):
                under_way[submit(_caught, os.getcwd(), function, task)] = i
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                error = future.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield under_way.pop(future), error or _printed(future.result())


def missing(launcher: str) -> str | None:
    """The extra to install for a launcher; None where it is there."""
    return None if launcher == "processes" or find_spec(launcher) else launcher


class Pool(ProcessPoolExecutor):
    """Spawned processes of one thread each (not forked: a progress bar is a thread), which end with this one.

    Ctrl-C is for this process alone. As a context: where it ends with an exception, so do they, at once.

    Args:
        begin: called in each with ``shared``, when it starts.
    """

    def __init__(self, jobs: int, begin: Callable[..., None] | None = None, shared: tuple[Any, ...] = ()) -> None:
        if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
            multiprocessing.set_start_method("spawn", force=True)  # joblib's, which a process that is spawned lacks
        super().__init__(jobs, multiprocessing.get_context("spawn"), _begin, (begin, shared))

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        """As of an executor. What it starts inherits that SIGINT is blocked; here, where another thread (a progress
        bar) may receive it, Ctrl-C waits: a process that is half started would say so."""
        with ctrl_c_waits():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                return super().submit(*args, **options)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            for process in multiprocessing.active_children():
                process.terminate()
        super().__exit__(kind, *error)


def _begin(begin: Callable[..., None] | None, shared: tuple[Any, ...]) -> None:
    """A worker whose parent was killed would wait for its next task forever: it ends with it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    if begin is not None:
        begin(*shared)


def _caught(folder: str, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
    """What the function returns, or the exception that it raises, with its traceback as a note."""
    os.chdir(folder)
    os.environ["HEADROOM_WORKER"] = "1"  # the cores are shared out over the workers (simulator/compiled/engine.py)
    try:
        return function(*task)
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        return error


@dataclass(frozen=True)
class Heard:
    """What a task returned, and what it printed meanwhile."""

    value: Any
    out: str
    err: str


def _heard(*task: Any) -> Heard:
    """``_caught``, with all that it and the processes that it starts print."""
    with _taken(1) as out, _taken(2) as err:
        value = _caught(*task)
    return Heard(value, out.getvalue(), err.getvalue())


@contextmanager
def _taken(descriptor: int) -> Iterator[StringIO]:
    """All that this process writes to a file descriptor meanwhile; there at the end."""
    said, stream = StringIO(), (sys.stdout, sys.stderr)[descriptor - 1]
    with tempfile.TemporaryFile() as file:
        stream.flush()
        before = os.dup(descriptor)
        os.dup2(file.fileno(), descriptor)
        try:
            yield said
        finally:
            stream.flush()
            os.dup2(before, descriptor)
            os.close(before)
            file.seek(0)
            said.write(file.read().decode(errors="replace"))


def _printed(found: Any) -> Any:
    """What a task returned; prints what it said."""
    if not isinstance(found, Heard):
        return found
    for text, stream in ((found.out, sys.stdout), (found.err, sys.stderr)):
        stream.write(text)
        stream.flush()
    return found.value


@contextmanager
def _processes(jobs: int) -> Iterator[Submit]:
    with Pool(jobs) as pool:
        yield pool.submit


def start_ray(**own: Any) -> None:
    """The cluster at RAY_ADDRESS, else an own one (``ray.init``), not that of another command here. Ray gives its
    processes 30 s to start, which on a computer that others keep busy may be too few: then it is started again."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    settings = {} if os.environ.get("RAY_ADDRESS") else {"address": "local", **own}
    for left in reversed(range(STARTS)):
        try:
            ray.init(logging_level="ERROR", log_to_driver=False, **settings)
            return
        except Exception as error:  # Ray has no other class for it
            if not left or "timed out" not in str(error):
                raise
            ray.shutdown()


@contextmanager
def _ray(jobs: int | None) -> Iterator[Submit]:
    import ray

    # What tasks print comes with their result; Ray's own forwarding would put "(name pid=…)" before each line.
    start_ray(num_cpus=jobs, include_dashboard=False)
    remote = ray.remote(max_retries=RETRIES)(_heard)
    try:
        yield lambda _, *task: remote.remote(*task).future()
    finally:
        ray.shutdown()


LAUNCHERS: dict[str, Callable[[Any], Any]] = {"processes": _processes, "ray": _ray}
