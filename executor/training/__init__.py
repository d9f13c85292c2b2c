"""Executes real training steps under a plan: issue order, tensor placement and copies."""
