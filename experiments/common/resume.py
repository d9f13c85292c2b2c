"""Restores the settings of a run directory as command-line arguments for ``train_dqn resume=RUN``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common import cli
from experiments.common.help import flat
from experiments.common.own_files import quote, register_option
from simulator.files import load_json
from simulator.machine import Machine


def resume_args(file: Path, overrides: list[str], config_name: str = "train_dqn") -> list[str]:
    """Returns the arguments that resume a run: its settings, overridden by ``overrides``.

    Args:
        file: settings of the run, as written by ``report.run_info``.
        overrides: arguments of the command line.
        config_name: name of the command.

    Raises:
        UsageError: the file does not hold the settings of this command, or names Python code to import.
    """
    data = load_json(file, lambda data: data if isinstance(data, dict) else {})
    if not isinstance(data.get("command"), list) or not isinstance(data.get("config"), dict):
        raise cli.UsageError(f"resume: {file}: not the settings of a run (expected `command` and `config`)")
    keys = [word.partition("=")[0] for word in overrides]
    recorded = [str(word).partition("=") for word in data["command"][3:]]
    words = [f"agent={option}" for group, _, option in recorded if group == "agent"]
    valid_keys = cli.keys(config_name)
    for key, value in data["config"].items():
        if key not in valid_keys:
            raise cli.UsageError(f"resume: {file}: config: experiments.{config_name} has no key {key!r}; remove it")
        if key == "network" and value is not None and key not in keys:
            raise cli.UsageError(f"resume: {file}: config: `network` names Python code; type network= yourself")
        if key not in ("program", "workload", "task", "target", "machine", "out", "resume"):  # the directory decides
            words += [f"{name}={_format_value(leaf)}" for name, leaf in flat({key: value})]
    program = file.with_name("program.json")
    machine = data["config"].get("machine")
    if program.is_file() and not {"program", "workload", "target"} & {*keys}:
        words.append(f"program={_format_value(str(program.absolute()))}")
    if isinstance(machine, dict):
        words.append(f"machine={register_option('machine', 'resumed', Machine.from_dict(machine).to_dict())}")
    return [w for w in words if not any(w.startswith((f"{key}=", f"{key}.")) for key in keys)] + overrides


def _format_value(value: Any) -> str:
    """Formats a value in Hydra's override grammar."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, list):
        return "[" + ",".join(map(_format_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {_format_value(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)
