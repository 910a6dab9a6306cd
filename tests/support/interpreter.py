"""Triton's interpreter without half of its work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.runtime import interpreter


@contextmanager
def patched_once_per_launch() -> Iterator[None]:
    """It puts its own functions into `triton.language` at each call of a device function.

    Looking for what is to be replaced takes longer than most calls; once in each launch is enough.
    """
    launch, patch_lang = interpreter.GridExecutor.__call__, interpreter._patch_lang
    done: set[int] = set()

    def launch_once(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        of_module = id(function.__globals__)
        if of_module in done:
            return None
        done.add(of_module)
        return patch_lang(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch_once)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield
