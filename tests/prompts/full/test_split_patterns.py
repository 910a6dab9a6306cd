"""Expressions split alike on both sides of a cut, and words lie between cuts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support.tokenizer_families import PATTERNS, splitter
from tokenizers import Regex, normalizers, pre_tokenizers

from batchllm_operator.prompts.split_patterns import (
    SPACE_BEFORE_WORD_CUT,
    SPACE_CUT,
    STOP_CUT,
    WORDS,
    WORDS_AND_LINES,
    WORDS_WITHOUT_SPACE,
    ends_at_lines,
    is_transparent,
)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_split_alike_on_both_sides_of_every_cut(name: str) -> None:
    """Exhaustive over short texts of one character for each class that a pattern names."""
    alphabet = " \n\t'/!sS1\u00bd\u4e2d\u0301\u3002\u01c5"
    pre_tokenizer = splitter(name)
    cuts = re.compile(f"{SPACE_CUT}|{STOP_CUT}")
    lines = re.compile(WORDS_AND_LINES if ends_at_lines(PATTERNS[name]) else WORDS)
    assert all(map(is_transparent, PATTERNS[name]))

    @cache
    def pieces(text: str) -> list[str]:
        return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]

    num_cuts = 0
    for length in range(2, 5):
        for chars in itertools.product(alphabet, repeat=length):
            text = "".join(chars)
            for cut in cuts.finditer(text):
                num_cuts += 1
                before, behind = text[: cut.start()], text[cut.start() :]
                assert pieces(text) == pieces(before) + pieces(behind), repr(text)
            words = lines.findall(text)
            num_cuts += len(words) - 1
            assert pieces(text) == [each for word in words for each in pieces(word)], repr(text)
    assert num_cuts > 1000


@pytest.mark.parametrize(
    ("pattern", "cut", "dropped"),
    [
        (WORDS, SPACE_CUT, 0),
        (WORDS_AND_LINES, rf"{SPACE_CUT}|(?<=\n)(?= *[!-.0-~])", 0),
        (WORDS_WITHOUT_SPACE, SPACE_BEFORE_WORD_CUT, 1),
    ],
)
def test_words_are_what_is_between_all_cuts(pattern: str, cut: str, dropped: int) -> None:
    words, cuts = re.compile(pattern), re.compile(cut)
    for length in range(1, 7):
        for chars in itertools.product(" \na/\t\u2581", repeat=length):
            text = "".join(chars)
            starts = [0, *(found.start() + dropped for found in cuts.finditer(text))]
            ends = [*(found.start() for found in cuts.finditer(text)), len(text)]
            expected = [text[start:end] for start, end in zip(starts, ends, strict=True)]
            assert [word for word in words.findall(text) if word] == expected, repr(text)


def test_whitespace_is_the_same_for_python_and_the_tokenizers() -> None:
    """Of all characters behind which a text may be cut, none is whitespace to a pre-tokenizer."""
    split = pre_tokenizers.Split(Regex(r"\s"), "removed")
    cut = re.compile(SPACE_CUT)
    for code in range(0x110000):
        if not 0xD800 <= code < 0xE000 and cut.search(f"{chr(code)} "):
            assert split.pre_tokenize_str(chr(code)), hex(code)


@pytest.mark.parametrize(
    "form", [normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD]
)
def test_normal_forms_keep_what_is_around_a_cut(form: Callable[[], Any]) -> None:
    normalizer, space, stop = form(), re.compile(SPACE_CUT), re.compile(STOP_CUT)
    for code in range(0x110000):
        if 0xD800 <= code < 0xE000:
            continue
        char = chr(code)
        if space.search(f"{char} "):
            assert space.search(f"{normalizer.normalize_str(char)} "), hex(code)
        if form is normalizers.NFC and stop.search(f"{char}\n"):
            assert normalizer.normalize_str(char) == char
    for char in " \r\n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f":
        if form is normalizers.NFC:
            assert normalizer.normalize_str(f"a{char}") == f"a{char}"
