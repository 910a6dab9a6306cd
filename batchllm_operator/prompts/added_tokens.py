"""Where the added tokens of a tokenizer are in a text, as far as it matters for cutting it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence


class AddedTokens:
    """The tokens that are taken out of a text before anything else sees it.

    Args:
        contents: their texts.
        pattern: finds cuts, and so do words.
        words_pattern: see `CutRule`.
    """

    def __init__(
        self, contents: Sequence[str], pattern: re.Pattern[str], words_pattern: re.Pattern[str]
    ) -> None:
        self._contents = tuple(contents)
        self._with_cuts = tuple(c for c in contents if pattern.search(c))
        # Between two letters, so that a cut at an end of the token shows.
        self._with_words = tuple(c for c in contents if len(words_pattern.findall(f"x{c}x")) > 2)
        self._by_last: dict[str, tuple[str, ...]] = _grouped(contents, -1)
        self._by_first: dict[str, tuple[str, ...]] = _grouped(contents, 0)

    def forbid(self, text: str, position: int) -> bool:
        """Whether a token ends at `position` or reaches over it."""
        ending = self._by_last.get(text[position - 1])
        if ending and text.endswith(ending, 0, position):
            return True
        return any(
            text.find(c, max(0, position - len(c) + 1), position + len(c) - 1) >= 0
            for c in self._with_cuts
        )

    def start_near(self, text: str, position: int) -> bool:
        """Whether a token starts at `position` or one character later."""
        return any(
            text.startswith(self._by_first.get(text[start], ()), start)
            for start in (position, position + 1)
        )

    def span_words(self, text: str) -> bool:
        """Whether a token that may begin in one word and end in another is in `text`."""
        return any(content in text for content in self._with_words)

    def are_in(self, text: str) -> bool:
        """Whether there is any in `text`."""
        if self._by_first.keys().isdisjoint(text):
            return False
        return any(content in text for content in self._contents)


def _grouped(contents: Iterable[str], position: int) -> dict[str, tuple[str, ...]]:
    groups = defaultdict(list)
    for content in contents:
        groups[content[position]].append(content)
    return {char: tuple(group) for char, group in groups.items()}
