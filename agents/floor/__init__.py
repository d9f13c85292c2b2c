"""The floor: what no plan can beat (README.md of agents; begin with bound.py)."""

from agents.floor.bound import FAMILIES, UNPROVEN, Floor, floor

__all__ = ["FAMILIES", "UNPROVEN", "Floor", "floor"]
