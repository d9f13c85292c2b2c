"""The floor: what no plan can beat (README.md of agents; begin with bound.py)."""

from agents.floor.bound import Floor, floor

__all__ = ["Floor", "floor"]
