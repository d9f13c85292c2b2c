"""What the jobs of a sweep on submitit print, which goes to files: it is printed here when all are done."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

OVERRIDE = f"+hydra.callbacks.submitit._target_={__name__}.SubmititLogs"


class SubmititLogs(Callback):
    """Of one sweep, jobs in the order in which they were submitted; of sweeps on other launchers nothing."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Says where the files are, since jobs may wait in a queue for long."""
        if folder := folder_of(config):
            print(f"what the jobs print is in {folder}", file=sys.stderr)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Prints it, without what submitit says of itself."""
        logs = folder.glob("*/*_log.out") if (folder := folder_of(config)) else ()
        for log in sorted(logs, key=lambda log: (len(log.parent.name), log.name)):
            for line in log.read_text().splitlines():
                if not line.startswith("submitit INFO ("):
                    print(line)


def folder_of(config: DictConfig) -> Path | None:
    """Where each job has a folder named by its number; None where the launcher is another."""
    folder = OmegaConf.select(config, "hydra.launcher.submitit_folder")
    return Path(str(folder)).parent if folder else None
