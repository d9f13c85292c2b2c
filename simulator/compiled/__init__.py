"""The rules of rules.py, compiled with Numba: encoding, event loop, rematerialisation, Engine."""
