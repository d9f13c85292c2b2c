"""What every entry point shares: Hydra with checked keys, and one sentence for every expected error.

An unknown key, a group option that does not exist and any error that bad input can cause end in one
sentence on stderr and exit status 2. Anything else is a bug in this project and keeps its traceback.

``machine=`` and ``workload=`` take a YAML file of one's own (its name ends in .yaml, .yml or .json; relative to the
working directory) wherever they take a preset, in sweeps too.
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
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Sweep
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agents.learned.dqn_config import RENAMED, moved
from experiments import begun
from experiments.common import help, ray_launcher, sweep, workers
from experiments.common.endings import NO_ROOM, last_words, refuse, sentence, stopped, unwritten
from simulator.compiled import warm
from simulator.files import FormatError, read_yaml
from simulator.limits import size_bytes
from simulator.machine import Machine
from simulator.plan import PlanError
from simulator.program import Program

T = TypeVar("T")

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
MOVED = {f"agent.{old}": moved(old) for old in RENAMED}  # keys of older versions


class UsageError(ValueError):
    """The command line asks for something that cannot be done; the message is one sentence."""


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
        files: dict[str, str] = {}  # of with_own_files

        @functools.wraps(task)
        def guarded(cfg: DictConfig) -> Path | None:
            sys.argv[:] = [f"experiments.{config_name}", *typed]  # which a launcher's process does not know
            OWN_NAMES.update(files)
            try:
                return task(cfg)
            except Exception as error:
                if not isinstance(error, expected_errors()):
                    raise
                if HydraConfig.get().mode == RunMode.MULTIRUN:  # let the other jobs of the sweep finish
                    raise UsageError(sentence(error)) from None
                refuse(error)

        def command() -> None:
            if task.__module__ == "__main__":  # under its own name: other processes find nothing in __main__
                # Not that of sys.modules["__main__"], which may be a profiler's.
                spec = inspect.unwrap(task).__globals__["__spec__"]
                assert spec is not None, "run as python -m experiments.NAME"
                getattr(import_module(spec.name), task.__name__)()
                return
            try:
                begun()
                atexit.register(last_words)
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
                overrides, own = with_own_files(overrides)
                files.update(own)
                # Of a single run Hydra checks the keys, when it composes the config, which takes long; not those added.
                early = args.multirun or any(word.startswith("+") for word in overrides)
                check_overrides(config_name, overrides, args.multirun, args.config_dir, early)
                sys.argv[1:] = options + overrides
                if args.multirun:
                    sys.argv.append(sweep.OVERRIDE)
                try:
                    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(guarded)()
                except ConfigCompositionException:
                    check_overrides(config_name, overrides, args.multirun, args.config_dir)  # names the nearest key
                    raise
                finally:
                    if args.multirun:
                        sweep.shown()
            except (HydraException, OmegaConfBaseException, UsageError, FormatError) as error:
                refuse(as_typed(str(error), files))
            except KeyboardInterrupt as stop:
                stopped(stop)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                refuse(unwritten(error))

        return command

    return decorate


def help_text(name: str, doc: str, words: list[str]) -> str:
    """The help of a command (help.py), with what its YAML adds at the end."""
    footer = OmegaConf.select(OmegaConf.load(CONFIGS / f"{name}.yaml"), "hydra.help.footer")
    return f"{help.text(CONFIGS, name, doc, words)}\n\n{footer}" if footer else help.text(CONFIGS, name, doc, words)


def expected_errors() -> tuple[type[Exception], ...]:
    """The errors that input from outside can cause. Only the modules that were loaded can have raised."""
    kinds: list[type[Exception]] = [UsageError, FormatError, PlanError, OmegaConfBaseException]
    for module, name in (
        ("agents.planner", "Infeasible"),
        ("agents.learned.checkpoint", "TrainingStateError"),
        ("executor.capture.capture", "CaptureError"),
        ("experiments.workloads", "WorkloadError"),
    ):
        if module in sys.modules:
            kinds.append(getattr(sys.modules[module], name))
    return tuple(kinds)


# ------------------------------------------------------------------------------------------ the keys


def keyed(words: list[str], key: str) -> list[str]:
    """The words of a command line, those without a key (or that name a file) as one override of ``key``, quoted."""
    deletes = re.compile(r"~[^/]")  # ~key, but not ~/file
    bare = [w for w in words if Path(w).is_file() or not ("=" in w or deletes.match(w))]
    quoted = ["'" + w.replace("'", "\\'") + "'" for w in bare]
    return [w for w in words if w not in bare] + ([f"{key}={','.join(quoted)}"] if bare else [])


def with_own_files(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words of a command line, each file of ``machine=`` and ``workload=`` as an option of that config group.

    The content is put into Hydra's config store, which launchers hand on to the processes of a sweep. A file
    replaces the preset as a whole, so that keys of both are not mixed; later words change it as they change a preset.

    Returns:
        The words, and each option's file as it was typed.

    Raises:
        UsageError, FormatError: a file is missing or malformed.
    """
    files: dict[str, str] = {}
    out = []
    for word in words:
        group, _, text = word.partition("=")
        if group not in OWN_FILES:
            out.append(word)
            continue
        values = _written(word, text)
        for i, value in enumerate(values):
            if Path(value).suffix in SUFFIXES:
                values[i] = f"{OWN}{len(files)}"
                files[values[i]] = value
                package, node = OWN_FILES[group](Path(value).expanduser())
                ConfigStore.instance().store(values[i], node, group, package)
        out.append(f"{group}={','.join(values)}" if files.keys() & values else word)
    return out, files


def _written(word: str, text: str) -> list[str]:
    """The values of an override, those of a sweep too; a path may have signs that Hydra would want to be quoted."""
    if Path(text).is_file():
        return [text]
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return text.split(",")
    return [str(value) for value in _values(override)]


def _machine_file(file: Path) -> tuple[str | None, dict[str, Any]]:
    return None, Machine.load(file).to_dict()


def _workload_file(file: Path) -> tuple[str | None, DictConfig]:
    """Its keys are checked where it is captured (experiments/workloads)."""
    try:
        text = read_yaml(file)
        node = OmegaConf.create(text)
    except FormatError as error:
        raise UsageError(str(error)) from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UsageError(f"{file}: cannot be read ({error})") from None
    if not isinstance(node, DictConfig) or not node:
        raise UsageError(f"{file}: not a workload (expected keys as in configs/workload/vgg16.yaml)")
    package = re.search(r"^# @package (\S+)", text, re.MULTILINE)
    if package is None or package[1] == "workload":
        return None, node
    if package[1] != "_global_":
        raise UsageError(f"{file}: a workload is for the package workload or _global_, not {package[1]!r}")
    # In the package _global_ it could set anything, and what Hydra calls.
    if unknown := [key for key in node if key not in IN_GLOBAL]:
        raise UsageError(f"{file}: unknown key {unknown[0]!r}; a workload for _global_ has {' and '.join(IN_GLOBAL)}")
    return package[1], node


OWN_FILES: dict[str, Callable[[Path], tuple[str | None, Any]]] = {"machine": _machine_file, "workload": _workload_file}
IN_GLOBAL = ("workload", "target")
SUFFIXES = (".yaml", ".yml", ".json")
OWN = "own-file-"  # and a number: the name of such an option
OWN_NAMES: dict[str, str] = {}  # of the run: each option's file as it was typed


def as_typed(text: str, files: Mapping[str, str]) -> str:
    """Returns a text with the files' names in the place of their options."""
    return re.sub(rf"{OWN}\d+", lambda option: files.get(option[0], option[0]), text)


def own_overrides() -> list[str]:
    """Returns the words of this run, one of a sweep too, as they were typed."""
    return [as_typed(word, OWN_NAMES) for word in HydraConfig.get().overrides.task]


def check_overrides(
    config_name: str, overrides: list[str], sweep: bool, config_dir: str | None = None, known_keys: bool = True
) -> None:
    """Checks every ``key=value`` of a command line before anything runs; ``known_keys``: also that the config has
    the key.

    Raises:
        UsageError: an unknown key or group option, with the nearest right one, or what is no override.
    """
    places = [CONFIGS, Path(config_dir).resolve()] if config_dir else [CONFIGS]
    options: dict[str, set[str]] = {}  # of every config group
    for place in places:
        for file in place.glob("*/*.yaml"):
            options.setdefault(file.parent.name, set()).add(file.stem)
    defaults = OmegaConf.load(CONFIGS / f"{config_name}.yaml").defaults
    groups = {group for default in defaults if default != "_self_" for group in default}  # that this command has
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        launchers = GlobalHydra.instance().config_loader().get_group_options("hydra/launcher")
        chosen = [f"hydra.searchpath=[file://{place}]" for place in places[1:]]
        keyed = []
        for line in overrides:
            try:
                override = OverridesParser.create().parse_override(line)
            except HydraException as error:
                raise UsageError(f"{line}: cannot be read as KEY=VALUE ({sentence(error)})") from None
            key = override.key_or_group
            if override.is_delete():
                raise UsageError(f"{line}: keys cannot be deleted")
            if override.is_sweep_override() and not sweep:
                raise UsageError(f"{line}: several values are a sweep, which needs -m; a list is written [a,b]")
            if key == "hydra/launcher" and override.value() not in launchers:
                raise UsageError(f"{line}: this launcher is not installed; the extras are joblib, ray and submitit")
            if key.startswith(("hydra.", "hydra/")):
                continue  # Hydra checks its own
            if key in MOVED:
                raise UsageError(f"{line}: {MOVED[key]}")
            if key in groups and not isinstance(override.value(), dict):
                values = list(_values(override))
                for value in values:
                    if str(value) not in options[key] and not str(value).startswith(OWN):
                        hint = "; a file of your own ends in .yaml" if key in OWN_FILES else ""
                        raise UsageError(f"{key}={value}: there is no such {key}{nearest(value, options[key])}{hint}")
                chosen.append(f"{key}={values[0]}")
            else:
                keyed.append(override)
        if not known_keys:
            return
        known = set(_keys(hydra.compose(config_name, overrides=chosen)))
        for override in keyed:
            key = override.key_or_group
            parent = key.rpartition(".")[0]
            if key in known or (override.is_add() and parent in known):
                continue  # what is added below a known key is checked by whoever reads that key
            raise UsageError(f"{override.input_line}: unknown key {key!r}{nearest(key, known)}")


def keys(config_name: str) -> set[str]:
    """The first parts of the keys that a command has, its own and those of its config groups; none is Hydra's."""
    config = OmegaConf.load(CONFIGS / f"{config_name}.yaml")
    groups = {str(group) for default in config.defaults if default != "_self_" for group in default}
    own = {str(key) for key in config} - {"defaults", "hydra"}
    return own | {group for group in groups if not group.startswith("override ")} | set(IN_GLOBAL)


def _values(override: Override) -> Iterator[Any]:
    """The values that an override takes: one, or those of its sweep."""
    if isinstance(override.value(), Sweep):
        yield from (text.strip("'\"") for text in override.sweep_string_iterator())
    else:
        yield override.value()


def _keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a config, those of inner nodes too."""
    for key in cfg:
        name = f"{prefix}{key}"
        yield name
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from _keys(node, f"{name}.")


def nearest(word: object, known: set[str]) -> str:
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
    config = plain(_workload_file(file)[1])
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
    """A dataclass from a config node of the same keys, types checked.

    Raises:
        UsageError: naming the entry.
    """
    hints = get_type_hints(kind)
    checked: dict[str, Any] = {}
    for key, value in plain(cfg).items():
        if f"{where}.{key}" in MOVED:
            raise UsageError(f"{where}.{key}: {MOVED[f'{where}.{key}']}")
        if key not in hints:
            raise UsageError(f"{where}.{key}: unknown key {key!r}{nearest(key, set(hints))}")
        want = hints[key]
        if isinstance(value, list):
            value = tuple(value)
        if want is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        allowed = tuple(get_origin(t) or t for t in (get_args(want) if get_origin(want) is UnionType else (want,)))
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join(t.__name__ for t in allowed)
            raise UsageError(f"{where}.{key}: expected {names}, got {value!r}")
        checked[str(key)] = value
    try:
        return kind(**checked)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
