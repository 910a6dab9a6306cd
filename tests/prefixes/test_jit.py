"""Compiled loops run where nothing can be cached, too."""

from typing import Any

import numba
import pytest

from batchllm_operator.prefixes import jit


def test_without_a_folder_for_the_cache_functions_still_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def njit(*args: Any, cache: bool = False, **options: Any) -> Any:
        if not cache:
            return numba.njit(*args, **options)

        def decorate(function: Any) -> Any:
            raise RuntimeError("cannot cache function: no locator available")

        return decorate

    monkeypatch.setattr(jit, "njit", njit)

    def add(left: int, right: int) -> int:
        return left + right

    assert jit.compiled(add)(2, 3) == 5
