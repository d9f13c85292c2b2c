"""Certified lower bound ("floor") on the iteration time of every plan; start with bound.py (page: README.md)."""

from agents.floor.bound import FAMILIES, UNPROVEN, Floor, floor, refined_floor

__all__ = ["FAMILIES", "UNPROVEN", "Floor", "floor", "refined_floor"]
