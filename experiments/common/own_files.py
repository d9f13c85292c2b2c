"""YAML files of the user's own in the place of presets: ``machine=my_gpu.yaml``, ``workload=my_net.yaml``.

Each becomes an option of its config group in Hydra's config store, which launchers hand on to the processes of a sweep.
A file replaces the preset as a whole; later words change it as they change a preset.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Sweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.common.endings import UsageError
from simulator.files import FormatError, read_yaml
from simulator.machine import Machine

IN_GLOBAL = ("workload", "target")  # keys of a workload for the package _global_
SUFFIXES = (".yaml", ".yml", ".json")
OWN = "own-file:"  # before the file: the name of such an option, which is none of a preset


def with_own_files(words: list[str]) -> list[str]:
    """Returns the words of a command line, each file of ``machine=`` and ``workload=`` as an option of that group.

    Raises:
        UsageError, FormatError: a file is missing or malformed.
    """
    return [_with_own_file(word, *word.split("=", 1)) if word.startswith(GROUPS) else word for word in words]


def _with_own_file(word: str, group: str, text: str) -> str:
    values = [text] if Path(text).is_file() else _values(word, text)
    for i, value in enumerate(values):
        if Path(value).suffix in SUFFIXES:
            package, node = READERS[group](Path(value).expanduser())
            values[i] = own_option(group, value, node, package)
    return f"{group}={','.join(values)}" if any(OWN in value for value in values) else word


def own_option(group: str, name: str, node: object, package: str | None = None) -> str:
    """Makes an option of a config group; returns the value that chooses it."""
    folder, _, last = f"{group}/{OWN}{name}".rpartition("/")
    ConfigStore.instance().store(last, node, folder, package or group)
    return quoted(f"{OWN}{name}")


def _values(word: str, text: str) -> list[str]:
    """The values of an override, those of a sweep too; a path may have signs that Hydra would want to be quoted."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return text.split(",")
    sweep = isinstance(override.value(), Sweep)
    return [value.strip("'\"") for value in override.sweep_string_iterator()] if sweep else [str(override.value())]


def quoted(text: str) -> str:
    """Returns a text as the grammar of overrides quotes it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def as_typed(text: str) -> str:
    """Returns a text with files as they were typed in the place of their options."""
    return re.sub(rf"'{OWN}((?:[^'\\]|\\.)*)'|{OWN}", lambda own: re.sub(r"\\(.)", r"\1", own[1] or ""), text)


def own_overrides() -> list[str]:
    """Returns the words of this run, one of a sweep too, as they were typed."""
    return [as_typed(word) for word in HydraConfig.get().overrides.task]


def read_workload(file: Path) -> tuple[str | None, DictConfig]:
    """Reads a workload and its package, None by default. Its keys are checked where it is captured.

    Raises:
        UsageError: the file is missing or malformed.
    """
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


READERS: dict[str, Callable[[Path], tuple[str | None, Any]]] = {
    "machine": lambda file: (None, Machine.load(file).to_dict()), "workload": read_workload,
}  # fmt: skip
GROUPS = tuple(f"{group}=" for group in READERS)
