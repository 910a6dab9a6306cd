"""Errors whose messages may be shown on a page."""

from __future__ import annotations

import os
from collections.abc import Iterable

from batchllm_operator.secrets import Masker


class PageError(Exception):
    """A page can't be shown; its message can, as secrets are masked in it."""

    def __init__(self, status_code: int, text: str, *, secrets: Iterable[str] = ()) -> None:
        super().__init__(Masker.of(os.environ, secrets=secrets)(text))
        self.status_code = status_code
