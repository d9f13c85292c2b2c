"""Ctrl-C raises KeyboardInterrupt in every test, also where the tests were started with SIGINT ignored (in the
background of a shell)."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
