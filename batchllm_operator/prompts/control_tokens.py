"""What becomes of text in rows that spells a control token of the model, such as `<|im_end|>`.

As a control token it could end a chat's turn and begin another. To make it ordinary text, two
noncharacters are put into its spelling before the prompt is rendered. So the tokenizer's search for
control tokens passes it over; then `PromptEncoder` has the noncharacters dropped, before the rest
of the tokenizer sees the text. It is the same text wherever a chat template puts it.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.prompts.values import NoTextError, TextColumn

CONTROL_TOKEN: Final = "control_token"
MARK: Final = "\ufdd0\ufdd1"
_WITHIN_DATA: Final = MARK[0] + MARK + MARK[1]  # dropping one leaves what the row holds

Mode = Literal["keep", "text", "reject"]


class Spellings:
    """The spellings of some tokens, none shorter than two characters."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = tuple(sorted(tokens))
        self.longest = max(map(len, self.tokens), default=0)
        longest_first = sorted(self.tokens, key=lambda token: (-len(token), token))
        self.whole = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        """Finds a token, of several in one place the longest."""
        by_first = groupby((*self.tokens, MARK), itemgetter(0))
        # Arrow finds those that begin alike twenty times as fast as any of all.
        self._expressions = ["|".join(map(re.escape, tokens)) for _, tokens in by_first]
        self._edges = [
            "|".join(sorted({re.escape(t[end]) for t in self.tokens})) for end in (-1, 0)
        ]
        self._beginnings = {token[:size] for token in self.tokens for size in range(1, len(token))}
        self._ends = {token[-size:] for token in self.tokens for size in range(1, len(token))}

    def may_change(self, texts: pa.LargeStringArray) -> pa.BooleanArray:
        """Which texts `marked` may change, of those that aren't within; null for null."""
        data, most = texts.cast(pa.large_binary()), max(len(t.encode()) for t in self.tokens)
        edges = (pc.binary_slice(data, 0, most), pc.binary_slice(data, -most))
        searches = [*((texts, e) for e in self._expressions), *zip(edges, self._edges, strict=True)]
        return reduce(pc.or_, (pc.match_substring_regex(*search) for search in searches))

    def begin_in(self, text: str) -> bool:
        """Whether a token may begin in `text` and go on after it."""
        sizes = range(1, min(len(text), self.longest) + 1)
        return any(text[-size:] in self._beginnings for size in sizes)

    def go_through(self, text: str) -> bool:
        """Whether a token may begin before `text` and go on after it."""
        return any(text in token for token in self.tokens)

    def marked(self, text: str, *, within: bool = False) -> str:
        """The text with marks in all spellings, and in what the text around it could make one.

        It is `within` where a token may begin before it and end after it.
        """
        text = text.replace(MARK, _WITHIN_DATA)
        while self.whole.search(text):  # one may overlap the next
            text = self.whole.sub(lambda match: match[0][0] + MARK + match[0][1:], text)
        sizes = range(1, min(len(text), self.longest) + 1)
        places = {len(text) - size + 1 for size in sizes if text[-size:] in self._beginnings}
        places |= {size - 1 for size in sizes if text[:size] in self._ends}
        if within and text and self.go_through(text):
            places.add(1)
        for place in sorted(places, reverse=True):
            text = text[:place] + MARK + text[place:]
        return text


class ControlTokens:
    """Finds control tokens in values, and keeps, marks or refuses them.

    Args:
        special: tokens that the tokenizer calls special.
        written: others that the prompt's template writes, such as `<tool_call>`.
        can_be_text: whether the tokenizer makes ordinary text of a marked spelling, else the row is
            refused; None: of none, and it doesn't drop marks.
    """

    def __init__(
        self,
        special: Iterable[str] = (),
        written: Iterable[str] = (),
        *,
        mode: Mode = "keep",
        can_be_text: Callable[[str], bool] | None = None,
    ) -> None:
        special = {token for token in special if len(token.strip()) > 1}
        self._special = Spellings(special)
        self._all = Spellings(special.union(t for t in written if len(t.strip()) > 1))
        self._mode, self._can_be_text = mode, can_be_text

    @property
    def special(self) -> tuple[str, ...]:
        """Tokens that the tokenizer calls special."""
        return self._special.tokens

    def columns_within(self, pieces: Iterable[tuple[str, str | None]]) -> frozenset[str]:
        """Columns of a template that are placed where the text before may have begun a token.

        Its pieces are a text each, and the column after it or None.
        """
        within, may_go_on = set[str](), False
        for literal, name in pieces:
            may_go_on = may_go_on and self._all.go_through(literal)
            may_go_on |= self._all.begin_in(literal)
            if may_go_on and name is not None:
                within.add(name)
        return frozenset(within)

    def in_column(self, column: TextColumn, *, within: bool = False) -> tuple[TextColumn, set[int]]:
        """A column's texts as they may be placed, and the rows that spell a token."""
        spellings = self._all
        if not spellings.tokens:
            return column, set()
        is_candidate = spellings.may_change(column.texts)
        if within:
            is_short = pc.less(pc.utf8_length(column.texts), spellings.longest)
            is_candidate = pc.or_(is_candidate, is_short)
        chosen = np.flatnonzero(is_candidate.fill_null(False).to_numpy(zero_copy_only=False))
        if not len(chosen):
            return column, set()
        texts, faults, rows = column.texts, dict(column.faults), set[int]()
        changed: dict[int, str | None] = {}
        for row in chosen.tolist():
            text = texts[row].as_py()
            try:
                changed[row], spells_token = self._placed(text, spellings, within=within)
                rows |= {row} if spells_token else set()
            except NoTextError as fault:
                rows.add(row)
                changed[row], faults[row] = None, fault
            if changed[row] == text:
                del changed[row]
        if changed:
            is_changed = np.isin(np.arange(len(texts)), list(changed))
            placed = pa.array(changed.values(), pa.large_string())
            texts = pc.replace_with_mask(texts, pa.array(is_changed), placed)
        return TextColumn(texts, faults), rows

    def in_messages(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
        """Messages as they may be rendered, and whether they spell a token; or a NoTextError.

        What an assistant has said may hold tokens of the second kind: models write them.
        """
        spell_tokens = False

        def placed(value: Any, spellings: Spellings) -> Any:
            nonlocal spell_tokens
            if isinstance(value, str):
                text, spells_token = self._placed(value, spellings)
                spell_tokens |= spells_token
                return text
            if isinstance(value, list):
                return [placed(item, spellings) for item in value]
            if isinstance(value, dict):
                return {placed(k, spellings): placed(v, spellings) for k, v in value.items()}
            return value

        result: list[dict[str, Any]] = []
        for message in messages:
            spellings = self._special if message["role"] == "assistant" else self._all
            result.append(placed(message, spellings) if spellings.tokens else message)
        return result, spell_tokens

    def _placed(self, text: str, spellings: Spellings, *, within: bool = False) -> tuple[str, bool]:
        """A text as it may be placed, and whether it spells a token."""
        tokens = spellings.whole.findall(text)
        if self._mode == "keep":
            return text, bool(tokens)
        for token in tokens:
            if self._mode == "reject" or self._can_be_text is None or not self._can_be_text(token):
                is_token = "a control token of the model"
                if self._mode == "text":
                    is_token += ", of which its tokenizer can't make ordinary text"
                reason = f"spells {token!r}, {is_token} (prompt.special_tokens: {self._mode})"
                raise NoTextError(CONTROL_TOKEN, reason)
        if self._can_be_text is not None:
            text = spellings.marked(text, within=within)
        return text, bool(tokens)
