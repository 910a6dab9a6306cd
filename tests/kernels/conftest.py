"""Kernels run in Triton's interpreter."""

from collections.abc import Iterator

import pytest
from support.interpreter import patched_once_per_launch


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    with patched_once_per_launch():
        yield
