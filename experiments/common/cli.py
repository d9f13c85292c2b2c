"""Command-line entry points: Hydra plus one-line messages for every expected error.

An unknown key, a missing group option and any other error that bad input can cause end in one sentence on stderr
and exit status 2. Any other exception is a bug in this project and keeps its traceback.

``machine=`` and ``workload=`` accept a preset or your own YAML file (suffix .yaml, .yml or .json; relative to the
working directory), also in sweeps (own_files.py).
"""

from __future__ import annotations

import argparse
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
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agents.learned.dqn_config import renamed_key_message
from experiments import install_handlers
from experiments.common import errors, help, sweep, workers
from experiments.common.errors import UsageError
from experiments.common.help import CONFIGS
from experiments.common.own_files import (
    GLOBAL_KEYS,
    READERS,
    SUFFIXES,
    quote,
    read_workload,
    replace_files,
    restore_file_names,
)
from simulator.compiled import warm
from simulator.files import FormatError
from simulator.limits import check_limit, size_bytes
from simulator.machine import Machine
from simulator.program import Program
from simulator.settings import read


def entry(
    config_name: str, positional: str | None = None, prepare: Callable[[list[str]], list[str]] = lambda words: words
) -> Callable[[Callable[[DictConfig], Path | None]], Callable[[], None]]:
    """Decorates ``task(cfg)`` as the command of ``configs/<config_name>.yaml``.

    Single runs, sweeps (``-m``) and Hydra's launchers all use it. The task returns its run directory if its results
    belong in the table of a sweep, else None.

    Args:
        positional: key that arguments without a key are assigned to; several such arguments form a sweep over it.
        prepare: maps the ``key=value`` arguments to those that Hydra receives.

    Returns:
        a decorator whose result takes no arguments and reads the command line.
    """

    def decorate(task: Callable[[DictConfig], Path | None]) -> Callable[[], None]:
        typed_args: list[str] = []  # command line as typed, recorded with the results

        @functools.wraps(task)
        def guarded(cfg: DictConfig) -> Path | None:
            sys.argv[:] = [f"experiments.{config_name}", *typed_args]  # a launcher's process has another argv
            try:
                valid_keys = keys(config_name)
                if unknown := [str(key) for key in cfg if key not in valid_keys]:  # by +KEY=VALUE
                    raise UsageError(f"{unknown[0]}: unknown key{nearest(unknown[0], valid_keys)}")
                return task(cfg)
            except Exception as error:
                if not isinstance(error, errors.expected_errors()):
                    raise
                if HydraConfig.get().mode == RunMode.MULTIRUN:  # let the other jobs of the sweep finish
                    raise UsageError(errors.one_line(error)) from None
                errors.exit_with_error(error)

        def command() -> None:
            if task.__module__ == "__main__":  # by name: worker processes cannot unpickle from __main__
                # sys.modules["__main__"] may be a profiler.
                spec = inspect.unwrap(task).__globals__["__spec__"]
                assert spec is not None, "run as python -m experiments.NAME"
                getattr(import_module(spec.name), task.__name__)()
                return
            try:
                install_handlers()
                atexit.register(errors.flush_stdout)
                os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let errors reach this function
                args = _parsed_args()
                if args.help:
                    help.show(help_text(config_name, str(sys.modules[task.__module__].__doc__), args.overrides))
                    return
                overrides = prepare(assign_key(args.overrides, positional) if positional else args.overrides)
                # Hydra's parser requires options before overrides; here any order works.
                options = [word for word in sys.argv[1:] if word not in args.overrides]
                typed_args[:] = options + overrides
                _launch(config_name, guarded, options + replace_files(overrides), args.multirun)
            except HydraException as error:
                errors.exit_with_error(explain(error, config_name, typed_args))
            except (OmegaConfBaseException, UsageError, FormatError) as error:
                errors.exit_with_error(restore_file_names(str(error)))
            except ValueError as error:
                if not str(error).startswith("Config group override"):  # for a group option that is a number
                    raise
                errors.exit_with_error(f"{' '.join(typed_args)}: {error}")
            except KeyboardInterrupt as stop:
                errors.exit_interrupted(stop)
            except OSError as error:
                if error.errno not in errors.NO_ROOM:
                    raise
                errors.exit_with_error(errors.write_error_message(error))

        return command

    return decorate


def _parsed_args() -> argparse.Namespace:
    """Returns the options that commands act on themselves, and the overrides; Hydra parses all options again."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c")  # its value is not an override
    return parser.parse_known_intermixed_args()[0]


def _launch(config_name: str, task: Callable[[DictConfig], Path | None], words: list[str], is_sweep: bool) -> None:
    """Runs a command through Hydra; prints the table of a sweep."""
    warm.start()
    sweep.register_ray()
    sys.argv[1:] = [*words, sweep.OVERRIDE] if is_sweep else words
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(task)()
    except HydraException:  # before any job
        sweep.discard_folder()
        raise
    finally:
        if is_sweep:
            sweep.show_table()


def help_text(name: str, doc: str, words: list[str]) -> str:
    """Returns the help of a command (help.py), with the footer of its YAML file."""
    footer = OmegaConf.select(OmegaConf.load(CONFIGS / f"{name}.yaml"), "hydra.help.footer")
    return "\n\n".join([help.text(name, doc, words), *([footer] if footer else [])])


def explain(error: HydraException, config_name: str, words: list[str]) -> str:
    """Returns Hydra's message about a command line; for an unknown key adds its replacement or the nearest key."""
    text = restore_file_names(errors.one_line(error))
    if override := getattr(error, "override", None):  # a syntax error
        groups = [group for group in help.groups(config_name) if (CONFIGS / group / f"{override}.yaml").is_file()]
        return f"{override}: expected {groups[0]}={override}" if groups else f"{override}: {text}"
    if found := re.match(r"Could not override '(\S+)'", text):
        key = found[1]
        why = renamed_key_message(key.removeprefix("agent."))
        return f"{key}: {why or f'unknown key{nearest(key, help.names(config_name, words))}'}"
    if found := re.search(r"Could not find '(\w+)/(\S+)'", text):
        group, option = found.groups()
        own = "; a file of your own ends in .yaml" if group in READERS else ""
        presets = {path.stem for path in (CONFIGS / group).glob("*.yaml")}
        return f"{group}/{option}: no such option{nearest(option, presets)}{own}" if presets else text
    return text


# ------------------------------------------------------------------------------------------ keys


def assign_key(words: list[str], key: str) -> list[str]:
    """Combines the arguments without a key (or that name a file) into one quoted override of ``key``."""
    deletes = re.compile(r"~[^/]")  # ~key, but not ~/file
    bare = [word for word in words if Path(word).is_file() or not ("=" in word or deletes.match(word))]
    return [word for word in words if word not in bare] + ([f"{key}={','.join(map(quote, bare))}"] if bare else [])


def keys(config_name: str) -> set[str]:
    """Returns the top-level keys of a command and of its config groups, without Hydra's."""
    return {name.partition(".")[0] for name in help.names(config_name)} | set(GLOBAL_KEYS)


def nearest(word: object, candidates: Collection[str]) -> str:
    """Returns '; the nearest is …' for an error message.

    For dotted keys, a key with the same last part is preferred (episodes: agent.episodes), then a sibling.
    """
    text = str(word)
    parent, _, leaf = text.rpartition(".")
    same_leaf = sorted(k for k in candidates if k.rpartition(".")[2] == leaf)
    siblings = sorted(k for k in candidates if k.rpartition(".")[0] == parent) or sorted(candidates)
    matches = same_leaf or difflib.get_close_matches(text, siblings, n=1, cutoff=0.0)
    return f"; the nearest is {matches[0]!r} (of {', '.join(siblings)})" if matches else ""


# ---------------------------------------------------------------------------------------- values


def integer(cfg: DictConfig, key: str, least: int = 0) -> int:
    """Returns the integer at a dotted key; raises UsageError if it is not an integer of at least ``least``."""
    value = OmegaConf.select(cfg, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{key}: expected an integer of at least {least}, got {value!r}")
    return value


def size(cfg: DictConfig, key: str) -> int:
    """Returns the bytes at a key: 0, a number, or a size such as 1MiB; raises FormatError otherwise."""
    return 0 if cfg[key] == 0 else size_bytes(cfg[key], key, least=1)


def number(cfg: DictConfig, key: str) -> float:
    """Returns the number at a key; raises UsageError if it is not positive and finite."""
    value = cfg[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise UsageError(f"{key}: expected a number above 0, got {value!r}")
    return float(value)


def choice(cfg: DictConfig, key: str, options: tuple[str | bool | None, ...]) -> Any:
    """Returns the value at a key, which must be one of ``options``.

    Raises:
        UsageError: the value is not in ``options``.
    """
    if cfg[key] not in options:
        names = [json.dumps(k).strip('"') for k in options]
        raise UsageError(f"{key}: expected {', '.join(names[:-1])} or {names[-1]}, got {cfg[key]!r}")
    return cfg[key]


def jobs(cfg: DictConfig) -> int:
    """Returns ``cfg.jobs``, the number of worker processes (default: one per core); raises as in ``integer``."""
    return integer(cfg, "jobs", least=1) if cfg.jobs is not None else os.cpu_count() or 1


def launcher(cfg: DictConfig) -> tuple[str, int | None]:
    """Returns the launcher of the tasks and the number of concurrent tasks, as ``workers.results`` accepts them.

    Raises:
        UsageError: the launcher is unknown or not installed.
    """
    name = choice(cfg, "launcher", tuple(workers.LAUNCHERS))
    if extra := workers.missing_extra(name):
        raise UsageError(f"launcher: {name} is not installed; the extra is {extra}")
    return name, None if name == "ray" and cfg.jobs is None else jobs(cfg)


def named_task(key: str, name: object) -> tuple[str, float]:
    """Returns the program and the limit, as a fraction of its peak, of a task's name such as vgg16-45.

    Raises:
        UsageError: the name, given at ``key``, is not PROGRAM-PERCENT.
    """
    from envs.tasks import FINGERPRINTS  # Gymnasium takes seconds to import

    program, _, percent = str(name).rpartition("-")
    if program not in FINGERPRINTS or not percent.isdigit() or not 0 < int(percent) <= 100:
        raise UsageError(
            f"{key}: {name!r} is not PROGRAM-PERCENT, such as vgg16-45; programs are {', '.join(FINGERPRINTS)}"
        )
    return program, int(percent) / 100


def path(cfg: DictConfig, key: str) -> Path | None:
    """Returns the path at a key, or None if it is null.

    Raises:
        UsageError: the value is not a path.
    """
    value = cfg[key]
    if value is None:
        return None
    if not isinstance(value, (str, int, float)) or isinstance(value, bool) or not str(value):
        raise UsageError(f"{key}: expected a path, got {value!r}")
    return Path(str(value)).expanduser()


def values(cfg: DictConfig, key: str) -> list[Any]:
    """Returns the list at a key; a single value becomes a list of one.

    Raises:
        UsageError: the list is empty.
    """
    value = to_dict(cfg).get(key, cfg[key])  # a deleted key raises OmegaConf's error
    out = value if isinstance(value, list) else [value]
    if not out or out == [None]:
        raise UsageError(f"{key}: expected at least one value")
    return out


def machine(cfg: DictConfig) -> Machine:
    """Returns the machine of ``cfg.machine``; raises FormatError naming the entry."""
    return Machine.from_dict(to_dict(cfg.machine))


def workload(name: str) -> dict[str, Any]:
    """Returns the configuration of a workload, named by its preset or its YAML file.

    Raises:
        UsageError: the workload is unknown, or the file is malformed.
    """
    file = Path(name).expanduser()
    if file.suffix not in SUFFIXES:
        file = CONFIGS / "workload" / f"{name}.yaml"
        if not file.is_file():
            presets = {path.stem for path in file.parent.glob("*.yaml")}
            raise UsageError(f"workloads: unknown workload {name!r}{nearest(name, presets)}")
    config = to_dict(read_workload(file)[1])
    return config.get("workload", config)  # files for the package _global_ nest it one level deeper


def program(cfg: DictConfig, target: Machine, limits: str | None = None) -> Program:
    """Returns the program to plan: the file of ``program=``, else a capture of ``workload=`` for the machine.

    Args:
        cfg: settings of the command.
        target: machine that the durations are for.
        limits: key of memory limits, which are checked before the capture; None: no limits.

    Raises:
        UsageError, FormatError, WorkloadError, CaptureError: a limit, the file or the workload is malformed.
    """
    file = path(cfg, "program")
    if file is not None:
        return Program.load(file)
    if limits is not None:
        for value in values(cfg, limits):
            check_limit(value, limits)
    from experiments import workloads  # PyTorch is only needed to capture

    return workloads.load(to_dict(cfg.workload), target).program


def to_dict(cfg: Any) -> dict[str, Any]:
    """Converts a config node to a dictionary, interpolations resolved; raises an OmegaConf error for missing values."""
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))


def dataclass_from_config(kind: type[Any], cfg: DictConfig, prefix: str) -> Any:
    """Builds a dataclass from a config node with the same keys (``simulator.settings.read``).

    Raises:
        UsageError: an entry is unknown, of the wrong type or out of range; the message names it.
    """
    data = to_dict(cfg)
    names = [field.name for field in fields(kind)]
    for key in data:
        if why := renamed_key_message(key):
            raise UsageError(f"{prefix}.{key}: {why}")
        if key not in names:
            raise UsageError(f"{prefix}.{key}: unknown key{nearest(key, names)}")
    try:
        return read(kind, data, prefix)
    except FormatError as error:
        raise UsageError(str(error)) from None
