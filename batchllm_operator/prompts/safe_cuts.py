"""Where a text can be cut so that the token ids of its parts are those of the whole.

A tokenizer works in steps: it takes out added tokens, normalises what is between them, splits
that into pre-tokens, and gives each pre-token to its model, which sees nothing else. A cut is safe
if every step does the same on both sides, whatever is before and behind. All cuts are between two
characters `a` and `b` of a kind for which that can be shown (the kinds are in `split_patterns`):

- added tokens: none may reach over the cut or end at it (`AddedTokens`). Searching goes from
  left to right and each match depends on what lies ahead of it only, so the others are found
  as before. A token that takes whitespace on its left stops at `a`, which is none; one that takes
  it on its right would have to end at the cut. At LINE pairs `a` is whitespace, so there are such
  cuts only if no token takes any.
- normaliser: `b` is a starter that never composes with what is before it (a boundary of
  normalisation, Unicode annex 15), and `a` stays non-white. The accepted others work on one
  character at a time, but for `Prepend`, which adds its mark where a text starts: there the
  part loses its leading space, which stands for the same mark.
- pre-tokenizer: there is a boundary between `a` and `b`, found without looking past it. For
  byte-level ones see `split_patterns`. Metaspace begins a pre-token at each space and adds
  nothing to a text that has one in front, and so does `ByteLevel(add_prefix_space=True)`.
  BERT's and the others of `_SPACE_SPLITTERS` drop whitespace and look at nothing around it.
- without a boundary (SentencePiece BPE, for which the whole text is one pre-token), the
  model's merges decide: if none makes a token in which a mark for a space follows another
  character, then no merge reaches over the cut, and the two sides merge independently.
- the model: anything random or unknown is turned down.

A word is what lies between two neighbouring cuts. Words that hold an added token aren't looked up
one by one (`CutRule.holds_token`), because the tokens beside them may matter.

docs/adr/0009-prefix-aware-tokenization.md says more, and what is turned down.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

from batchllm_operator.prompts.added_tokens import AddedTokens
from batchllm_operator.prompts.split_patterns import (
    GPT2_PATTERN,
    SPACE_BEFORE_WORD_CUT,
    SPACE_CUT,
    STOP_CUT,
    WORDS,
    WORDS_AND_LINES,
    WORDS_WITHOUT_SPACE,
    ends_at_lines,
    finds_spaces,
    finds_stops,
    is_transparent,
)

_MARK: Final = "\u2581"
_SPACE_SPLITTERS: Final = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
_NORMALIZERS: Final = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})
# What is known of each model. Whatever else there may be in a later version needs a look first.
_MODELS: Final[dict[str, str]] = {
    "BPE": "type vocab merges dropout unk_token continuing_subword_prefix end_of_word_suffix"
    " fuse_unk byte_fallback ignore_merges",
    "Unigram": "type vocab unk_id byte_fallback",
    "WordLevel": "type vocab unk_token",
    "WordPiece": "type vocab unk_token continuing_subword_prefix max_input_chars_per_word",
}
_MARK_INSIDE: Final = re.compile(f"[^{_MARK}]{_MARK}")


class NoProofError(Exception):
    """No cut is known to be safe for this tokenizer; says why."""


@dataclass(frozen=True, slots=True)
class CutRule:
    """Where texts can be cut for one tokenizer."""

    pattern: re.Pattern[str]
    """Finds the places (of width 0) at which `allows` may say yes."""
    drops_space: bool
    """Whether a part that begins at a cut is to be encoded without its first character, a space."""
    words_pattern: re.Pattern[str]
    """Finds the words of a text one after the other (its only group, if it has one)."""
    starts_alike: bool
    """Whether a word without a space in front is the same behind a special token as at the start
    of a text."""
    added_tokens: AddedTokens

    def allows(self, text: str, position: int) -> bool:
        """Whether `text` can be cut at `position`, which `pattern` has found."""
        if self.added_tokens.forbid(text, position):
            return False
        return not (self.drops_space and self.added_tokens.start_near(text, position))

    def words(self, text: str) -> list[str]:
        """`text` cut into its words; in one piece if an added token may reach over their ends."""
        if self.added_tokens.span_words(text):
            return [text]
        words: list[str] = self.words_pattern.findall(text)
        if words and not words[-1]:  # what is found at the end
            del words[-1]
        return words

    def holds_token(self, word: str) -> bool:
        """Whether `word` holds an added token, so that its ends may not be safe."""
        return self.added_tokens.are_in(word)

    def same_behind_token(self, word: str) -> bool:
        """Whether `word` behind a special token is what it is at the start of a text."""
        return self.starts_alike or word.startswith(" ")


def find_cut_rule(backend: Tokenizer) -> CutRule:
    """The rule for a tokenizer, from its own description of itself.

    Raises:
        NoProofError: it does something for which no cut is known to be safe.
    """
    parts: dict[str, Any] = json.loads(backend.to_str())
    model = parts["model"]
    unknown = model.keys() - _MODELS.get(model["type"], "").split()
    if unknown or model.get("dropout"):
        raise NoProofError(
            f"model {model['type']} (dropout {model.get('dropout')}, {', '.join(sorted(unknown))})"
        )
    normalizers = _flat(parts["normalizer"], "normalizers")
    normalizer_names = {normalizer["type"] for normalizer in normalizers}
    splitters = _flat(parts["pre_tokenizer"], "pretokenizers")
    names = [splitter["type"] for splitter in splitters]
    drops_whitespace = len(names) == 1 and names[0] in _SPACE_SPLITTERS
    drops_space = "Prepend" in normalizer_names
    _check_normalizers(normalizers, drops_whitespace=drops_whitespace)
    pattern, words_pattern = SPACE_CUT, WORDS
    starts_alike = drops_space or drops_whitespace
    if "Replace" in normalizer_names or names == ["Metaspace"]:
        _check_marks(splitters, model, marks_spaces="Replace" in normalizer_names)
        if drops_space:
            pattern, words_pattern = SPACE_BEFORE_WORD_CUT, WORDS_WITHOUT_SPACE
    elif not drops_whitespace:
        patterns, adds_space = _check_byte_level(splitters)
        starts_alike = True
        # Other forms than NFC may put a mark between a letter and what follows it.
        if normalizer_names <= {"NFC"} and not adds_space:
            if any(map(finds_stops, patterns)):
                pattern = f"{SPACE_CUT}|{STOP_CUT}"
            strips = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
            if ends_at_lines(patterns) and not strips:
                words_pattern = WORDS_AND_LINES
    removes = "BertNormalizer" in normalizer_names
    cuts, words = re.compile(pattern), re.compile(words_pattern)
    contents = _added_contents(backend, parts["added_tokens"], (cuts, words), removes=removes)
    return CutRule(cuts, drops_space, words, starts_alike, AddedTokens(contents, cuts, words))


def _check_normalizers(normalizers: list[dict[str, Any]], *, drops_whitespace: bool) -> None:
    names = sorted(normalizer["type"] for normalizer in normalizers)
    for normalizer in normalizers:
        match normalizer:
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                pass
            case {"type": "Prepend", "prepend": "\u2581"}:
                # Shown only for what Llama 2 does: nothing else may change the text's start.
                if names != ["Prepend", "Replace"]:
                    raise NoProofError("a mark is put in front of the text by Prepend")
            case {"type": "BertNormalizer"} if drops_whitespace:
                pass  # may remove `a`, which matters to no splitter that drops whitespace
            case {"type": name} if name in _NORMALIZERS:
                pass
            case _:
                raise NoProofError(f"normaliser {normalizer['type']}")


def _check_marks(
    splitters: list[dict[str, Any]], model: dict[str, Any], *, marks_spaces: bool
) -> None:
    """A mark must begin a pre-token, or else no merge may put one behind something."""
    match splitters:
        case [{"type": "Metaspace", "replacement": "\u2581", "split": True}]:
            return
        case [{"type": "Metaspace", "replacement": "\u2581", "split": False}]:
            pass
        case []:
            pass
        case [{"type": "Split", "pattern": {"String": " "}}] if marks_spaces:
            pass  # as Gemma's; there are no spaces left to split at
        case _:
            raise NoProofError("a pre-tokenizer that the proof for SentencePiece doesn't cover")
    plain = not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
    if model["type"] != "BPE" or not plain or model["ignore_merges"]:
        raise NoProofError("a text is one pre-token, and the model isn't plain BPE")
    if _MARK not in model["vocab"]:
        raise NoProofError(f"no token for {_MARK!r}, so that unknown characters may join over it")
    if any(_MARK_INSIDE.search(left + right) for left, right in model["merges"]):
        raise NoProofError("some merges join the end of a word with the start of the next")


def _check_byte_level(splitters: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """The expressions that text is split by, and whether each part gets a space in front.

    A boundary must be before each cut's space.
    """
    patterns = []
    adds_space = False
    for place, splitter in enumerate(splitters):
        match splitter:
            case {"type": "ByteLevel"} if place == len(splitters) - 1:
                patterns += [GPT2_PATTERN] if splitter["use_regex"] else []
                adds_space = splitter["add_prefix_space"]
            case {
                "type": "Split",
                "pattern": {"Regex": str(pattern)},
                "behavior": "Isolated",
                "invert": False,
            } if is_transparent(pattern):
                patterns.append(pattern)
            case {"type": "Digits"}:
                pass  # cuts between a digit and what isn't one, or between digits
            case _:
                raise NoProofError(f"pre-tokenizer {splitter['type']}, or how it splits")
    if not any(map(finds_spaces, patterns)):
        raise NoProofError("the pre-tokenizer doesn't split at spaces")
    return patterns, adds_space


def _added_contents(
    backend: Tokenizer,
    added: list[dict[str, Any]],
    patterns: tuple[re.Pattern[str], re.Pattern[str]],
    *,
    removes: bool,
) -> list[str]:
    """Texts of the added tokens; `removes`: the normaliser may remove what is before a cut."""
    cuts, words = patterns
    for token in added:
        content = token["content"]
        if token["single_word"]:
            raise NoProofError(f"added token {content!r} looks at its neighbours (single_word)")
        if not token["normalized"] or backend.normalizer is None:
            continue
        # Searched for in normalised text, where what is around a cut may look different.
        forms = [content, backend.normalizer.normalize_str(content).replace(_MARK, " ")]
        crosses = any(cuts.search(form) or len(words.findall(form)) > 2 for form in forms)
        if removes:
            crosses = any(map(str.isspace, "".join(forms)))
        if crosses or token["rstrip"]:
            raise NoProofError(f"added token {content!r} has or takes spaces after normalising")
    return [token["content"] for token in added if token["content"]]


def _flat(part: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for member in part[members] for inner in _flat(member, members)]
