"""Runs commands as ``python -m`` does, each in a fork of this process, which has imported what takes them long. What
they would start anew, another command, is a fork of theirs.

Reads a call per line, a list as JSON: the module and its words, the folder to run in, the environment, and the folder
of its output (the files ``stdout`` and ``stderr``) or the terminal that it runs in. Writes its exit status on a line.
"""

import atexit
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from runpy import run_module
from typing import Any, NoReturn

import highspy  # noqa: F401
import hydra
import matplotlib.pyplot
import numpy
import rich.progress  # noqa: F401
import scipy.optimize  # noqa: F401
import torch._functorch.partitioners  # what a first capture imports
import torch.utils.tensorboard  # noqa: F401
import torch_geometric.nn  # noqa: F401
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra

import executor  # noqa: F401
import simulator.compiled.scoring  # noqa: F401

run_anew = subprocess.run


def prepare() -> None:
    """Does once what every command would: builds the tables of Hydra's grammar, finds the fonts. Hydra composes the
    config once more to see whether it names a mode; none of ours does."""
    Hydra.get_mode = lambda *args, **options: None  # type: ignore[method-assign]
    subprocess.run = run  # type: ignore[assignment]
    with hydra.initialize_config_dir(os.path.join(os.environ["PYTHONPATH"], "configs"), version_base="1.3"):
        hydra.compose("evaluate", overrides=["limits=[0.5,0.7]", "program=a/b.json", "machine=h100"])
    GlobalHydra.instance().clear()
    figure = matplotlib.pyplot.figure()
    figure.gca().set_title("title")
    figure.savefig(os.devnull, format="png")
    matplotlib.pyplot.close(figure)


def serve() -> None:
    """Answers calls."""
    for line in sys.stdin:
        call = json.loads(line)
        pid = os.fork()
        if pid == 0:
            end(*call)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run``, where that is another command with this one's output, in a fork."""
    if words[:2] != [sys.executable, "-m"] or options != {"check": False}:
        return run_anew(words, **options)
    pid = os.fork()
    if pid == 0:
        GlobalHydra.instance().clear()
        atexit._clear()  # what this command does at its end
        end(words[2:], os.getcwd(), dict(os.environ), None)
    return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def command(typed: list[str], folder: str, environment: dict[str, str], output: str | None) -> None:
    """Runs a command as if this process had begun with it; its output is a folder, a terminal, or this process's."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    random.seed()
    numpy.random.seed()  # noqa: NPY002
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    if output is None:
        files = []
    elif os.path.isdir(output):
        files = [os.path.join(output, name) for name in (os.devnull, "stdout", "stderr")]
    else:
        os.setsid()  # the terminal that is opened next is its own, and sends it Ctrl-C
        files = [output] * 3
    for number, name in enumerate(files):
        file = os.open(name, os.O_CREAT | (os.O_RDWR if number else os.O_RDONLY))
        os.dup2(file, number)
        os.close(file)
    # As of a new process: this one's may have been a file, whose position a terminal does not have.
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.path[0] = folder
    sys.argv[:] = ["-m", *typed[1:]]
    run_module(typed[0], run_name="__main__", alter_sys=True)


def end(*call: Any) -> NoReturn:
    """Runs a command and ends as Python does, but takes no module apart, which takes as long as a small command."""
    status: object = 0
    try:
        command(*call)
    except SystemExit as stop:
        status = stop.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    prepare()
    gc.freeze()  # so that forks share it
    serve()
