"""Resets Dynamo before and after each test of compiled models."""

from collections.abc import Iterator

import pytest
import torch

from executor.compiled.host_copies import POOL


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not POOL.pending
