"""What keeps a page from being shown, said to whoever asked for it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from batchllm_operator.spec import environment_secrets, mask, mask_uris


class PageError(Exception):
    """A page can't be shown; the message may be, for secrets are masked in it."""

    def __init__(self, status_code: int, text: str, *, secrets: Iterable[str] = ()) -> None:
        super().__init__(masked(text, secrets))
        self.status_code = status_code


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without `secrets`, those of the environment, and what URIs in it hold of them."""
    return mask_uris(mask(mask(text, secrets), environment_secrets(os.environ)))
