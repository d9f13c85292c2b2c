"""The configurations of workloads."""

from pathlib import Path

import yaml

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "workload"


def config(name: str, **changes: object) -> dict:
    """A configuration as it is written, with some keys of one's own."""
    return {**yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), **changes}
