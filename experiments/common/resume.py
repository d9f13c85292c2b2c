"""Keeps interrupted trainings and resumes them: ``train_dqn resume=RUN`` restores the settings of a run directory."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig

from experiments import Terminated
from experiments.common import cli, report
from experiments.common.help import flat
from experiments.common.own_files import quote, register_option
from simulator.files import load_json
from simulator.machine import Machine

SETTINGS = "settings.json"  # settings of an unfinished run


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


def checkpoint_of(path: Path | None) -> Path | None:
    """Returns the checkpoint file of ``path``, a file or a run directory; raises UsageError if it does not exist."""
    if path is None:
        return None
    file = path / "checkpoint.pt" if path.is_dir() else path
    if not file.is_file():
        raise cli.UsageError(f"resume: checkpoint {file} does not exist; give a run folder or its checkpoint.pt")
    return file


@contextmanager
def resumable(directory: report.RunDirectory) -> Iterator[Path]:
    """Opens the run directory; if a run with a checkpoint is interrupted, the message tells how to resume it."""
    with directory as out:
        try:
            yield out
        except KeyboardInterrupt as stop:
            if not (out / "checkpoint.pt").exists():
                raise
            raise type(stop)(f"resume={out} continues this run") from None


def run_path(cfg: DictConfig, resume: Path | None, finished: str = "summary.json") -> Path | None:
    """Returns ``out``, else the directory of a resumed run without the file ``finished``, else None for a new one."""
    out = cli.path(cfg, "out")
    if out is None and resume is not None and not (resume.parent / finished).exists():
        return resume.parent
    return out


class DelayedStop:
    """Context in which Ctrl-C and SIGTERM wait for ``raise_if_stopped``, where a checkpoint can be written.

    A second signal acts immediately.

    Attributes:
        stopping: exception of the signal that came, or None.
    """

    stopping: type[KeyboardInterrupt] | None = None

    def __enter__(self) -> Self:
        self.stopping = None
        self.old_handlers: dict[int, Any] = {
            number: signal.signal(number, self.stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def stop(self, number: int, _: object) -> None:
        """Handles a signal, and restores the previous handler for the next one."""
        self.stopping = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        signal.signal(number, self.old_handlers[number])

    def __exit__(self, *error: object) -> None:
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)

    def raise_if_stopped(self) -> None:
        """Raises the exception of the signal, if one came."""
        if self.stopping:
            raise self.stopping
