"""Worker processes for the tasks of a command, on this computer or on a Ray cluster.

- ``processes``: spawned on this computer.
- ``ray``: the cluster at RAY_ADDRESS, else a local one that starts and stops with the command. A task whose worker
  dies is retried on another. The output of a task is forwarded when it finishes.

Cluster workers need the same installation and the command's directory under the same path.
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
from importlib.util import find_spec
from itertools import islice
from typing import Any

from experiments import defer_ctrl_c

Submit = Callable[..., Future[Any]]


def results(
    launcher: str, jobs: int | None, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, Any]]:
    """Yields, in order of completion, the index of each task and the result of ``function(*task)`` or its Exception.

    Args:
        launcher: a key of LAUNCHERS.
        jobs: number of concurrent tasks; None (Ray only): one per available core.
    """
    max_running = jobs or len(tasks)
    with LAUNCHERS[launcher](jobs) as submit:
        pending = enumerate(tasks)
        running = dict[Future[Any], int]()
        while True:
            for i, task in islice(pending, max_running - len(running)):
                running[submit(_call, os.getcwd(), function, task)] = i
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                result = future.exception()
                if result is None:
                    result, *output = future.result()
                    for stream, text in zip((sys.stdout, sys.stderr), output, strict=True):
                        stream.write(text)
                        stream.flush()
                elif not isinstance(result, Exception):
                    raise result
                yield running.pop(future), result


def missing_extra(launcher: str) -> str | None:
    """Returns the extra to install for a launcher; None if it is available."""
    return None if launcher == "processes" or find_spec(launcher) else launcher


class Pool(ProcessPoolExecutor):
    """Pool of spawned single-threaded processes that end with this process.

    Workers are spawned, not forked, since a progress bar is a thread. Ctrl-C reaches only this process. Leaving the
    context with an exception terminates the workers at once.

    Args:
        initializer: called in each worker with ``args`` when it starts.
    """

    def __init__(self, jobs: int, initializer: Callable[..., None] | None = None, args: tuple[Any, ...] = ()) -> None:
        if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
            multiprocessing.set_start_method("spawn", force=True)  # joblib's is unknown
        super().__init__(jobs, multiprocessing.get_context("spawn"), _initialize, (initializer, args))

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        """Submits a task with SIGINT blocked, so that new workers inherit the mask.

        Ctrl-C is deferred meanwhile, because another thread (a progress bar) may receive it, and a half-started worker
        would print a traceback.
        """
        with defer_ctrl_c():
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


def _initialize(initializer: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
    """Initializes a worker: one thread, and an exit when the parent dies (it would wait for tasks forever)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    if initializer is not None:
        initializer(*args)


def _call(folder: str, function: Callable[..., Any], task: tuple[Any, ...]) -> tuple[Any, str, str]:
    """Returns the function's result, or its exception with the traceback as a note; and no captured output."""
    os.chdir(folder)
    os.environ["HEADROOM_WORKER"] = "1"  # workers share the cores (simulator/compiled/engine.py)
    try:
        return function(*task), "", ""
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        return error, "", ""


def _call_captured(*task: Any) -> tuple[Any, str, str]:
    """Runs ``_call`` and captures stdout and stderr of this process and its subprocesses."""
    streams = ((1, sys.stdout), (2, sys.stderr))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        saved = []
        for (number, stream), file in zip(streams, (out, err), strict=True):
            stream.flush()
            saved.append(os.dup(number))
            os.dup2(file.fileno(), number)
        try:
            result, *_ = _call(*task)
        finally:
            for (number, stream), original in zip(streams, saved, strict=True):
                stream.flush()
                os.dup2(original, number)
                os.close(original)
        for file in (out, err):
            file.seek(0)
        return result, out.read().decode(errors="replace"), err.read().decode(errors="replace")


@contextmanager
def _processes(jobs: int) -> Iterator[Submit]:
    with Pool(jobs) as pool:
        yield pool.submit


@contextmanager
def _ray(jobs: int | None) -> Iterator[Submit]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    local = {"address": "local", "num_cpus": jobs, "include_dashboard": False}
    for retries in reversed(range(10)):
        try:
            # Output is returned with the result: Ray's forwarding would prefix each line with "(name pid=…)".
            ray.init(logging_level="ERROR", log_to_driver=False, **({} if os.environ.get("RAY_ADDRESS") else local))
            break
        except Exception as error:  # Ray has no specific class
            # Ray allows its processes 30 s to start, which a busy computer can exceed.
            if not retries or "timed out" not in str(error):
                raise
            ray.shutdown()
    remote = ray.remote(max_retries=3)(_call_captured)  # if its worker dies
    try:
        yield lambda _, *task: remote.remote(*task).future()
    finally:
        ray.shutdown()


LAUNCHERS: dict[str, Callable[[Any], Any]] = {"processes": _processes, "ray": _ray}
