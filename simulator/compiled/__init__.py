"""Numba implementation of the rules in rules.py: encoding, event loop, rematerialization, Engine."""
