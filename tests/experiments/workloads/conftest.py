"""Workload configurations."""

from pathlib import Path

import yaml

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "workload"


def config(name: str, **changes: object) -> dict:
    """Returns a workload's configuration with changed keys."""
    return {**yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), **changes}
