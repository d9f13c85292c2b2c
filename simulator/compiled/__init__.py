"""The rules of reference.py, compiled with Numba: encoding, event loop, rematerialisation, Engine."""
