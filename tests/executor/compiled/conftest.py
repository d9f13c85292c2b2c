"""Resets Dynamo before and after each test of compiled models."""

from collections.abc import Iterator

import pytest
import torch

from executor.compiled.copies import PENDING


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not PENDING
