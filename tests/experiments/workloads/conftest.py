"""Workload configurations."""

from pathlib import Path

import yaml

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "workload"
# Keys for a small decoder.
SMALL = {
    "batch_size": 1,
    "layers": 1,
    "width": 16,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 24,
    "vocabulary": 32,
    "length": 4,
}


def config(name: str, **changes: object) -> dict:
    """Returns a workload's configuration with changed keys."""
    return {**yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), **changes}
