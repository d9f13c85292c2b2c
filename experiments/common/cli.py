"""What every entry point shares: Hydra, and one endings.sentence for every expected error.

An unknown key, a group option that does not exist and any error that bad input can cause end in one
endings.sentence on stderr and exit status 2. Anything else is a bug in this project and keeps its traceback.

``machine=`` and ``workload=`` take a YAML file of one's own (its name ends in .yaml, .yml or .json; relative to the
working directory) wherever they take a preset, in sweeps too (own_files.py).
"""

from __future__ import annotations

import atexit
import difflib
import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agents.learned.dqn_config import moved
from experiments import begun
from experiments.common import endings, help, ray_launcher, sweep, workers
from experiments.common.endings import UsageError
from experiments.common.own_files import IN_GLOBAL, SUFFIXES, as_typed, quoted, read_workload, with_own_files
from simulator.compiled import warm
from simulator.files import FormatError
from simulator.limits import size_bytes
from simulator.machine import Machine
from simulator.program import Program

T = TypeVar("T")

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"


def entry(
    config_name: str, positional: str | None = None, prepare: Callable[[list[str]], list[str]] = lambda words: words
) -> Callable[[Callable[[DictConfig], Path | None]], Callable[[], None]]:
    """Turns ``task(cfg)`` into the command of ``configs/<config_name>.yaml``. Single runs, sweeps (``-m``) and Hydra's
    launchers all go through it. The task returns its run directory, where the table of a sweep is to have it.

    Args:
        positional: the key that words without one stand for; several such words are a sweep over them.
        prepare: what the words ``key=value`` stand for.
    """

    def decorate(task: Callable[[DictConfig], Path | None]) -> Callable[[], None]:
        typed: list[str] = []  # the words of the command line: what results record

        @functools.wraps(task)
        def guarded(cfg: DictConfig) -> Path | None:
            sys.argv[:] = [f"experiments.{config_name}", *typed]  # which a launcher's process does not know
            try:
                known = keys(config_name)
                if added := [str(key) for key in cfg if key not in known]:  # by +KEY=VALUE
                    raise UsageError(f"{added[0]}: unknown key{nearest(added[0], known)}")
                return task(cfg)
            except Exception as error:
                if not isinstance(error, endings.expected_errors()):
                    raise
                if HydraConfig.get().mode == RunMode.MULTIRUN:  # let the other jobs of the sweep finish
                    raise UsageError(endings.sentence(error)) from None
                endings.refuse(error)

        def command() -> None:
            if task.__module__ == "__main__":  # under its own name: other processes find nothing in __main__
                # Not that of sys.modules["__main__"], which may be a profiler's.
                spec = inspect.unwrap(task).__globals__["__spec__"]
                assert spec is not None, "run as python -m experiments.NAME"
                getattr(import_module(spec.name), task.__name__)()
                return
            try:
                begun()
                atexit.register(endings.last_words)
                warm.start()
                ray_launcher.register()
                os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach this function, which explains them
                args = get_args_parser().parse_intermixed_args()
                if args.help:
                    help.show(help_text(config_name, str(sys.modules[task.__module__].__doc__), args.overrides))
                    return
                overrides = prepare(keyed(args.overrides, positional) if positional else args.overrides)
                # Hydra's own parser wants the options before the overrides; here they come in any order.
                options = [word for word in sys.argv[1:] if word not in args.overrides]
                typed[:] = options + overrides
                sys.argv[1:] = options + with_own_files(overrides) + [sweep.OVERRIDE] * args.multirun
                try:
                    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(guarded)()
                except HydraException:  # before any job
                    sweep.forget()
                    raise
                finally:
                    if args.multirun:
                        sweep.shown()
            except HydraException as error:
                endings.refuse(explained(error, config_name, typed))
            except (OmegaConfBaseException, UsageError, FormatError) as error:
                endings.refuse(as_typed(str(error)))
            except ValueError as error:
                if not str(error).startswith("Config group override"):  # Hydra's, of an option that is a number
                    raise
                endings.refuse(f"{' '.join(typed)}: {error}")
            except KeyboardInterrupt as stop:
                endings.stopped(stop)
            except OSError as error:
                if error.errno not in endings.NO_ROOM:
                    raise
                endings.refuse(endings.unwritten(error))

        return command

    return decorate


def help_text(name: str, doc: str, words: list[str]) -> str:
    """The help of a command (help.py), with what its YAML adds at the end."""
    footer = OmegaConf.select(OmegaConf.load(CONFIGS / f"{name}.yaml"), "hydra.help.footer")
    return "\n\n".join([help.text(CONFIGS, name, doc, words), *([footer] if footer else [])])


def explained(error: HydraException, config_name: str, words: list[str]) -> str:
    """Hydra's message about a command line; of an unknown key also what became of it, or the nearest."""
    text = as_typed(endings.sentence(error))
    if override := getattr(error, "override", None):  # it cannot be parsed
        return f"{override}: {text}"
    if found := re.match(r"Could not override '(\S+)'", text):
        key = found[1]
        why = moved(key.removeprefix("agent."))
        return f"{key}: {why or f'unknown key{nearest(key, help.names(CONFIGS, config_name, words))}'}"
    return f"{text}; a file of your own ends in .yaml" if re.search("'(machine|workload)/", text) else text


# ------------------------------------------------------------------------------------------ the keys


def keyed(words: list[str], key: str) -> list[str]:
    """The words of a command line, those without a key (or that name a file) as one override of ``key``, quoted."""
    deletes = re.compile(r"~[^/]")  # ~key, but not ~/file
    bare = [w for w in words if Path(w).is_file() or not ("=" in w or deletes.match(w))]
    return [w for w in words if w not in bare] + ([f"{key}={','.join(map(quoted, bare))}"] if bare else [])


def keys(config_name: str) -> set[str]:
    """The first parts of the keys that a command has, its own and those of its config groups; none is Hydra's."""
    return {name.partition(".")[0] for name in help.names(CONFIGS, config_name)} | set(IN_GLOBAL)


def nearest(word: object, known: Collection[str]) -> str:
    """'; the nearest is …' for an error message.

    Of dotted keys, those with the same last part come first (episodes: agent.episodes), then the siblings.
    """
    text = str(word)
    parent, _, leaf = text.rpartition(".")
    same = sorted(k for k in known if k.rpartition(".")[2] == leaf)
    siblings = sorted(k for k in known if k.rpartition(".")[0] == parent) or sorted(known)
    close = same or difflib.get_close_matches(text, siblings, n=1, cutoff=0.0)
    return f"; the nearest is {close[0]!r} (of {', '.join(siblings)})" if close else ""


# ---------------------------------------------------------------------------------------- the values


def integer(cfg: DictConfig, key: str, least: int = 0) -> int:
    """The integer at a dotted key; raises UsageError where it is not one of at least ``least``."""
    value = OmegaConf.select(cfg, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{key}: expected an integer of at least {least}, got {value!r}")
    return value


def size(cfg: DictConfig, key: str) -> int:
    """The bytes at a key: 0, a number, or a size such as 1MiB; raises FormatError where it is none."""
    return 0 if cfg[key] == 0 else size_bytes(cfg[key], key, least=1)


def number(cfg: DictConfig, key: str) -> float:
    """The number at a key; raises UsageError where it is none above 0, or not finite."""
    value = cfg[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise UsageError(f"{key}: expected a number above 0, got {value!r}")
    return float(value)


def choice(cfg: DictConfig, key: str, known: tuple[str | bool | None, ...]) -> Any:
    """The value at a key, one of ``known``.

    Raises:
        UsageError: it is another.
    """
    if cfg[key] not in known:
        names = [json.dumps(k).strip('"') for k in known]
        raise UsageError(f"{key}: expected {', '.join(names[:-1])} or {names[-1]}, got {cfg[key]!r}")
    return cfg[key]


def jobs(cfg: DictConfig) -> int:
    """``cfg.jobs`` worker processes, by default one per core; raises UsageError as ``integer`` does."""
    return integer(cfg, "jobs", least=1) if cfg.jobs is not None else os.cpu_count() or 1


def launcher(cfg: DictConfig) -> tuple[str, int | None]:
    """Where the tasks of a command run, and how many at once, as ``workers.results`` takes them.

    Raises:
        UsageError: there is no such launcher, or it is not installed.
    """
    name = choice(cfg, "launcher", tuple(workers.LAUNCHERS))
    if extra := workers.missing(name):
        raise UsageError(f"launcher: {name} is not installed; the extra is {extra}")
    return name, None if name == "ray" and cfg.jobs is None else jobs(cfg)


def path(cfg: DictConfig, key: str) -> Path | None:
    """The path at a key, None where it is null.

    Raises:
        UsageError: it is not a path.
    """
    value = cfg[key]
    if value is None:
        return None
    if not isinstance(value, (str, int, float)) or isinstance(value, bool) or not str(value):
        raise UsageError(f"{key}: expected a path, got {value!r}")
    return Path(str(value)).expanduser()


def values(cfg: DictConfig, key: str) -> list[Any]:
    """The list at a key; one value stands for a list of one.

    Raises:
        UsageError: it is empty.
    """
    value = plain(cfg)[key]
    out = value if isinstance(value, list) else [value]
    if not out or out == [None]:
        raise UsageError(f"{key}: expected at least one value")
    return out


def machine(cfg: DictConfig) -> Machine:
    """The machine of ``cfg.machine``; raises FormatError naming the entry."""
    return Machine.from_dict(plain(cfg.machine))


def workload(name: str) -> dict[str, Any]:
    """The configuration of a workload in a list: a shipped one's name, or a YAML file.

    Raises:
        UsageError: there is no such workload, or the file is malformed.
    """
    file = Path(name).expanduser()
    if file.suffix not in SUFFIXES:
        file = CONFIGS / "workload" / f"{name}.yaml"
        if not file.is_file():
            known = {path.stem for path in file.parent.glob("*.yaml")}
            raise UsageError(f"workloads: there is no workload {name!r}{nearest(name, known)}")
    config = plain(read_workload(file)[1])
    return config.get("workload", config)  # a file for the package _global_ has it one level down


def program(cfg: DictConfig, on: Machine) -> Program:
    """The program to plan: the file ``program=``, or else the ``workload=``, captured for a machine."""
    file = path(cfg, "program")
    if file is not None:
        return Program.load(file)
    from experiments import workloads  # PyTorch is only needed to capture

    return workloads.load(plain(cfg.workload), on).program


def plain(cfg: DictConfig) -> dict[str, Any]:
    """A config node as a dictionary, interpolations resolved; raises an OmegaConf error where a value is missing."""
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


def dataclass_of(kind: type[T], cfg: DictConfig, where: str) -> T:
    """A dataclass from a config node of the same keys; each value has the type of the field's default.

    Raises:
        UsageError: naming the entry.
    """
    defaults = {field.name: field.default for field in fields(kind)}
    checked: dict[str, Any] = {}
    for key, value in plain(cfg).items():
        if why := moved(key):
            raise UsageError(f"{where}.{key}: {why}")
        if key not in defaults:
            raise UsageError(f"{where}.{key}: unknown key{nearest(key, defaults)}")
        wanted = type(defaults[key])
        checked[key] = float(value) if wanted is float and type(value) is int else value
        if type(checked[key]) is not wanted:
            raise UsageError(f"{where}.{key}: expected {wanted.__name__}, got {value!r}")
    try:
        return kind(**checked)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
