"""Token ids of texts seen before, within a bound of memory."""

from __future__ import annotations

import sys
from itertools import islice
from typing import Final

_ENTRY_BYTES: Final = 110
"""What a dictionary takes for an entry, at its emptiest."""


class TokenCache:
    """Token ids by text; when full, it forgets the half that was put first.

    Args:
        max_bytes: bound of the memory for texts, token ids and the table itself.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.known: dict[str, bytes] = {}
        """Token ids of each text that is kept, as the bytes of an int32 array."""
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory in use, never above the bound."""
        return self._num_bytes

    def put(self, text: str, token_ids: bytes) -> None:
        """Keep what isn't kept yet, unless it is larger than half of the bound."""
        num_bytes = _size(text, token_ids)
        if 2 * num_bytes > self._max_bytes or text in self.known:
            return
        if self._num_bytes + num_bytes > self._max_bytes:
            for old in list(islice(self.known, (len(self.known) + 1) // 2)):
                self._num_bytes -= _size(old, self.known.pop(old))
        # Halves differ in size.
        while self._num_bytes + num_bytes > self._max_bytes:
            old = next(iter(self.known))
            self._num_bytes -= _size(old, self.known.pop(old))
        self.known[text] = token_ids
        self._num_bytes += num_bytes


def _size(text: str, token_ids: bytes) -> int:
    return sys.getsizeof(text) + sys.getsizeof(token_ids) + _ENTRY_BYTES
