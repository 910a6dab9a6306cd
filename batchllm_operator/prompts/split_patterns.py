r"""Which regular expressions leave a safe cut alone, told by their alternatives.

Byte-level tokenizers split text by an expression that is a list of alternatives. Those of the
published families (GPT-2, cl100k and Llama 3, Qwen, o200k, Tekken, DeepSeek) come from one small
set, and each of that set was read for the following. Let `ab` be neighbouring characters of one
of these kinds:

- SPACE: `a` isn't whitespace, `b` is U+0020;
- STOP:  `a` is in `_WORD`, `b` is in `_STOP`;
- LINE:  `a` is U+000A, `b` begins a run of U+0020, possibly empty, and a printable ASCII character
  but `/` follows it.

For SPACE and STOP:

1. No alternative has a match in which `b` follows `a`. Spaces stand only at the start of a match
   or in a match of nothing but whitespace; behind letters and digits come neither line breaks nor
   ideographic punctuation.
2. Nothing looks behind (`^`, `\b`, `\G`, `(?<=`), so what is found from `b` on is what is
   found in a text that starts with `b`.
3. Only `\s+(?!\S)` looks ahead, directly behind whitespace, so never at `b`, as `a` isn't
   whitespace. What is found up to `a` is therefore what is found in a text that ends with `a`:
   each step that reads `b` fails, as it does at the end of the text, and for no other reason.
4. `\s+` finds every space and line break, and the alternatives of `_PUNCTUATION` find all
   punctuation. So `b` is part of a match, which by 1 starts with it: there is a boundary.

1 to 3 hold for any expression made of these alternatives (`is_transparent`), 4 for those that
have the ones named there. In a sequence of expressions, later ones see pieces of earlier ones.
If those cut between `a` and `b`, nothing is left to show. If not, both are in one piece, and the
argument repeats inside it; it ends at an expression for which 4 holds.

For LINE (`ends_at_lines`), `\s*[\r\n]+` must stand in front of `\s+(?!\S)` and `\s+`. `a` is the
last line break of its run of whitespace. It is found either behind punctuation by `[\r\n]*`
(`[\r\n/]*`, hence no `/`), which ends with it, or by `\s*[\r\n]+`, which takes all up to it whether
spaces follow or the text ends; letters take no line break in front. So a match ends with `a`, and
the ones behind start as in a text that starts with `b`. An expression without alternatives for
whitespace has no match with `a` in it that goes on to `b`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_LETTERS: Final = frozenset(
    {
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTIONS),
    }
)
_NUMBERS: Final = frozenset({r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+"})
_PUNCTUATION: Final = frozenset(
    {
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
    }
)
_ANY_WHITESPACE: Final = r"\s+"
_RUNS: Final = frozenset({_ANY_WHITESPACE, r"\s+(?!\S)"})
_LINES: Final = frozenset({r"\s*[\r\n]+", r"\s*[\r\n]"})
_KNOWN: Final = _LETTERS | _NUMBERS | _PUNCTUATION | _RUNS | _LINES

GPT2_PATTERN: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel(use_regex=True)` splits by."""

# Ranges that every version of Unicode since 6.0 agrees on: letters, decimal digits, ideographs.
_WORD: Final = "A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_STOP: Final = "\r\n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"

# Not behind U+2581, which stands for a space in some vocabularies, nor behind U+180E, which
# was whitespace in old versions of Unicode.
SPACE_CUT: Final = "(?<=[^\\s\u2581\u180e])(?= )"
"""A `re` pattern that finds where a SPACE pair can be cut."""
STOP_CUT: Final = f"(?<=[{_WORD}])(?=[{_STOP}])"
"""A `re` pattern that finds where a STOP pair can be cut."""


SPACE_BEFORE_WORD_CUT: Final = f"{SPACE_CUT}(?= \\S)"
"""A `re` pattern that finds SPACE pairs with one space only."""

_JOINS: Final = "(?<![^\\s\u2581\u180e])"
WORDS: Final = f" *+[^ ]*+(?:{_JOINS} ++[^ ]*+)*+"
"""A `re` pattern that finds parts of a text between neighbouring SPACE pairs."""
WORDS_AND_LINES: Final = (
    f" *+[^ \\n]*+\\n*+(?:{_JOINS}(?!(?<=\\n) *[!-.0-~])(?: ++[^ \\n]*+\\n*+|[^ \\n]++\\n*+))*+"
)
"""A `re` pattern that finds parts of a text between neighbouring SPACE or LINE pairs."""
WORDS_WITHOUT_SPACE: Final = (
    f"(?:(?<=[^\\s\u2581\u180e]) )?([^ ]*+(?:(?:{_JOINS} | (?!\\S))[^ ]*+)*+)"
)
"""As `WORDS`, each part but the first without its space, and none begins with two of them."""


def is_transparent(pattern: str) -> bool:
    """Whether points 1 to 3 of the module's docstring are known to hold."""
    return set(_alternatives(pattern)) <= _KNOWN


def finds_spaces(pattern: str) -> bool:
    """Whether every space and line break is part of a match (point 4)."""
    return _ANY_WHITESPACE in _alternatives(pattern)


def finds_stops(pattern: str) -> bool:
    """Whether every line break and punctuation mark is part of a match (point 4)."""
    alternatives = _alternatives(pattern)
    return _ANY_WHITESPACE in alternatives and not _PUNCTUATION.isdisjoint(alternatives)


def ends_at_lines(patterns: Sequence[str]) -> bool:
    """Whether expressions that are used one after the other make boundaries at LINE pairs."""
    found = False
    for pattern in patterns:
        alternatives = _alternatives(pattern)
        spaces = [idx for idx, each in enumerate(alternatives) if each in _RUNS]
        lines = [idx for idx, each in enumerate(alternatives) if each in _LINES]
        if spaces and (not lines or lines[0] > spaces[0]):
            return False
        found = found or bool(lines)
    return found


def _alternatives(pattern: str) -> list[str]:
    """`pattern` split at each `|` that isn't escaped, in a class or in a group."""
    found, start, depth, in_class, escaped = [], 0, 0, False, False
    for position, char in enumerate(pattern):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            found.append(pattern[start:position])
            start = position + 1
    return [*found, pattern[start:]]
