"""YAML files of the user in place of presets: ``machine=my_gpu.yaml``, ``workload=my_net.yaml``.

Each file becomes an option of its config group in Hydra's config store, so launchers pass it on to the processes of a
sweep. It replaces the preset as a whole; later overrides apply to it as to a preset.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Sweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.common.errors import UsageError
from simulator.files import FormatError, read_yaml
from simulator.machine import Machine

GLOBAL_KEYS = ("workload", "target")  # keys that a workload of the package _global_ may set
SUFFIXES = (".yaml", ".yml", ".json")
PREFIX = "own-file:"  # prefix of such an option's name; no preset has it


def replace_files(words: list[str]) -> list[str]:
    """Replaces each file of ``machine=`` and ``workload=`` by an option of that config group.

    Raises:
        UsageError, FormatError: a file is missing or malformed.
    """
    return [_replace_file(word) for word in words]


def _replace_file(word: str) -> str:
    group, _, text = word.partition("=")
    if group not in READERS:
        return word
    values = [text] if Path(text).is_file() else _values(word, text)
    for i, value in enumerate(values):
        if Path(value).suffix in SUFFIXES:
            package, node = READERS[group](Path(value).expanduser())
            values[i] = register_option(group, value, node, package)
    return f"{group}={','.join(values)}" if any(PREFIX in value for value in values) else word


def register_option(group: str, name: str, node: object, package: str | None = None) -> str:
    """Registers an option of a config group; returns the override value that selects it."""
    folder, _, leaf = f"{group}/{PREFIX}{name}".rpartition("/")
    ConfigStore.instance().store(leaf, node, folder, package or group)
    return quote(f"{PREFIX}{name}")


def _values(word: str, text: str) -> list[str]:
    """Returns the values of an override, sweeps included; paths may contain unquoted special characters."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return text.split(",")
    sweep = isinstance(override.value(), Sweep)
    return [value.strip("'\"") for value in override.sweep_string_iterator()] if sweep else [str(override.value())]


def quote(text: str) -> str:
    """Quotes a text by Hydra's override grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def restore_file_names(text: str) -> str:
    """Replaces option names in a text by the file names that the user typed."""
    return re.sub(rf"'{PREFIX}((?:[^'\\]|\\.)*)'|{PREFIX}", lambda m: re.sub(r"\\(.)", r"\1", m[1] or ""), text)


def typed_overrides() -> list[str]:
    """Returns the overrides of this run or sweep job as the user typed them."""
    return [restore_file_names(word) for word in HydraConfig.get().overrides.task]


def read_workload(file: Path) -> tuple[str | None, DictConfig]:
    """Reads a workload file; returns its package (None by default) and its config. Capturing it checks the keys.

    Raises:
        UsageError: the file is missing or malformed.
    """
    try:
        data = read_yaml(file)
        node = OmegaConf.create(data)
    except FormatError as error:
        raise UsageError(str(error)) from None
    except OmegaConfBaseException as error:
        raise UsageError(f"{file}: cannot be read ({error})") from None
    if not isinstance(data, dict) or not data:
        raise UsageError(f"{file}: not a workload (expected keys as in configs/workload/vgg16.yaml)")
    package = re.search(r"^# @package (\S+)", file.read_text(), re.MULTILINE)
    if package is None or package[1] == "workload":
        return None, node
    if package[1] != "_global_":
        raise UsageError(f"{file}: a workload is for the package workload or _global_, not {package[1]!r}")
    if unknown := [key for key in node if key not in GLOBAL_KEYS]:
        raise UsageError(f"{file}: unknown key {unknown[0]!r}; a workload for _global_ has {' and '.join(GLOBAL_KEYS)}")
    return package[1], node


READERS: dict[str, Callable[[Path], tuple[str | None, Any]]] = {
    "machine": lambda file: (None, Machine.load(file).to_dict()),
    "workload": read_workload,
}
