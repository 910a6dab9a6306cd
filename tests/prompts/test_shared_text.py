"""Ids of prompts in pieces are those of whole prompts, for every family and any text."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tokenizer_families import (
    CORPUS,
    FAMILIES,
    PATTERNS,
    llama2_unknown,
    qwen2,
    splitter,
    unigram,
)
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from batchllm_operator.prompts import shared_text
from batchllm_operator.prompts.safe_cuts import NoProofError, find_cut_rule
from batchllm_operator.prompts.shared_text import SharedTextEncoder
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

FRAGMENTS = [
    *(" ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028"),
    *("\x1c", "\x85", "\u180e", "\u200b", "\x00", "\x01", "\u0600", "\ufeff", "\ufffd"),
    *("'s", "'LL", "don't", "'", "\u2019s", "\u017f", "/", "!!", "...", "-", "_", "(", "$"),
    *("1", "12", "345", "6789", "\u00bd", "\u0663", "\u2167", "3.50", "2026-01-31"),
    *("\u00e9", "e\u0301", "\u0301", "\u0308", "\u304c", "\u304b\u3099", "\u3099", "\u30fb"),
    *("\ud55c\uad6d", "\u1100\u1161", "\u11a8", "\u4e2d\u6587", "\u8868", "\u3002", "\uff0c"),
    *("\uff01", "\u3001", "\ufdfa", "\u00a8", "\ufb01", "\u0130", "\u05d0", "\u0939\u093f"),
    *("\U0001f642", "\U0001f469\u200d\U0001f467", "\u2581", "\u2581\u2581", "\u2581the"),
    *("<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<left>", "<right>", "<tool>", "<unk>"),
    *("fox jumps", "fox", "jumps", " vi", "view", "Plain", "plain", "the", "The", "over", "very"),
    *("<0x0A>", "values known", "indented", "ABC", "camelCase", "x"),
]
texts = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join),
    st.text(max_size=20),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.characters(codec="utf-8")), max_size=12).map(
        "".join
    ),
)


@cache
def family(name: str) -> Tokenizer:
    return FAMILIES[name]()


def whole(tokenizer: Tokenizer, texts: list[str], *, special: bool = True) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=special)]


class Encoder:
    """A `SharedTextEncoder` that gives lists, as the tokenizer does."""

    def __init__(self, tokenizer: Any, *, special: bool = True, **options: Any) -> None:
        rule = find_cut_rule(tokenizer)
        self.inner = SharedTextEncoder(tokenizer, rule, add_special_tokens=special, **options)

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self.inner.encode(texts).to_lists()


@pytest.fixture
def cut_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut at all places where it is allowed, instead of a few."""
    monkeypatch.setattr(shared_text, "_ANCHOR", "(?!)")
    monkeypatch.setattr(shared_text, "_MIN_PIECE_LEN", 1)
    monkeypatch.setattr(shared_text, "_MAX_PIECE_LEN", 1)


# Property: identical ids


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_any_text_cut_at_all_safe_places(name: str, cut_everywhere: None, text: str) -> None:
    tokenizer = family(name)
    assert Encoder(tokenizer).encode([text]) == whole(tokenizer, [text])
    bare = Encoder(tokenizer, special=False).encode([text])
    assert bare == whole(tokenizer, [text], special=False)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=100)
@given(batch=st.lists(texts, min_size=1, max_size=4))
def test_any_texts_made_of_words(name: str, batch: list[str]) -> None:
    """Texts of less than a piece: unknown words in one call, known ones from what is kept."""
    tokenizer = family(name)
    shared = Encoder(tokenizer)
    assert shared.encode(batch) == whole(tokenizer, batch)
    again = [*batch, "".join(batch), " ".join(batch)]
    assert shared.encode(again) == whole(tokenizer, again)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prefix=texts, at=st.integers(0, 60), rests=st.lists(texts, max_size=4), data=st.data())
def test_prompts_that_share_a_start_which_ends_anywhere(
    name: str, cut_everywhere: None, prefix: str, at: int, rests: list[str], data: st.DataObject
) -> None:
    tokenizer = family(name)
    prompts = [prefix[:at] + rest for rest in rests] + [prefix]
    shared = Encoder(tokenizer, cache_bytes=data.draw(st.sampled_from([1, 3000, 1 << 20])))
    for batch in (prompts, prompts[::-1], prompts[:2]):
        assert shared.encode(batch) == whole(tokenizer, batch)


@pytest.mark.parametrize("name", FAMILIES)
def test_long_prompts_with_pieces_of_the_usual_length(name: str) -> None:
    tokenizer = family(name)
    generator = random.Random(0)
    words = [*" ".join(CORPUS[:5]).split(" "), *FRAGMENTS]
    documents = [" ".join(generator.choices(words, k=400)) for _ in range(4)]
    prompts = [
        document[: generator.randrange(len(document))] + " ".join(generator.choices(words, k=50))
        for document in documents
        for _ in range(5)
    ]
    shared = Encoder(tokenizer)
    assert shared.encode(prompts) == whole(tokenizer, prompts)
    assert shared.encode(prompts[::-1]) == whole(tokenizer, prompts[::-1])


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


# Sharing


def count_encoded(tokenizer: Tokenizer) -> tuple[Any, list[str]]:
    """The tokenizer with a record of what it was asked to encode."""

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            asked.extend(texts)
            return tokenizer.encode_batch_fast(texts, **options)

    asked: list[str] = []
    return Recorder(), asked


def long_text(seed: int, num_words: int = 1500) -> str:
    words = " ".join(CORPUS[:5]).split(" ")
    return " ".join(random.Random(seed).choices(words, k=num_words))


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "llama3", "llama2", "gemma", "unigram", "bert"])
def test_shared_text_is_encoded_once_within_and_across_batches(name: str) -> None:
    recorder, asked = count_encoded(family(name))
    document = long_text(0)
    shared = Encoder(recorder)
    for batch in range(3):
        shared.encode([f"{document} question {batch} {idx}" for idx in range(10)])
    assert sum(map(len, asked)) < len(document)  # its words repeat


def test_shared_text_is_found_behind_different_starts() -> None:
    recorder, asked = count_encoded(family("qwen2"))
    document = long_text(0)
    shared = Encoder(recorder, special=False)
    prompts = [f"Query: {long_text(idx, idx)}\n{document}" for idx in range(1, 30)]
    assert shared.encode(prompts) == whole(family("qwen2"), prompts, special=False)
    assert sum(map(len, asked)) < 0.5 * sum(map(len, prompts))


def test_text_without_spaces_is_shared_too() -> None:
    recorder, asked = count_encoded(family("qwen2"))
    generator = random.Random(0)
    document = "".join(generator.choices("中文字表語很好\u3002\uff0c", k=8000))
    shared = Encoder(recorder, special=False)
    prompts = [f"{document}\n{idx}" for idx in range(10)]
    assert shared.encode(prompts) == whole(family("qwen2"), prompts, special=False)
    assert sum(map(len, asked)) < 0.4 * sum(map(len, prompts))


def test_what_is_kept_is_bounded() -> None:
    tokenizer = family("qwen2")
    shared = Encoder(tokenizer, cache_bytes=100_000)
    for seed in range(20):
        prompts = [long_text(seed)]
        assert shared.encode(prompts) == whole(tokenizer, prompts)
        assert shared.inner.num_bytes < 32 << 20


@pytest.mark.parametrize("text", ["v" * 50_000, " " * 50_000, " v" * 25_000, "\n v" * 20_000, ""])
def test_degenerate_texts(text: str) -> None:
    tokenizer = family("qwen2")
    assert Encoder(tokenizer).encode([text, text]) == whole(tokenizer, [text] * 2)


# Tokenizers without a proof


def changed(build: Callable[[], Tokenizer], **changes: Any) -> Tokenizer:
    parts = json.loads(build().to_str())
    for path, value in changes.items():
        *folders, last = path.split("__")
        target = parts
        for folder in folders:
            target = target[folder]
        target[last] = value
    return Tokenizer.from_str(json.dumps(parts))


def with_merge_over_words() -> Tokenizer:
    vocab = {piece: idx for idx, piece in enumerate(["<unk>", "\u2581", "a", "a\u2581"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "\u2581")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return tokenizer


def with_pattern(pattern: str, behavior: str = "isolated") -> Tokenizer:
    tokenizer = qwen2()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def with_normalizer(normalizer: Any) -> Tokenizer:
    tokenizer = qwen2()
    tokenizer.normalizer = normalizer
    return tokenizer


def with_token(**options: Any) -> Tokenizer:
    tokenizer = qwen2()
    tokenizer.add_tokens([AddedToken(**options)])
    return tokenizer


UNPROVEN: dict[str, Callable[[], Tokenizer]] = {
    "merges over words": with_merge_over_words,
    "dropout": lambda: changed(qwen2, model__dropout=0.1),
    "unigram over words": lambda: changed(unigram, pre_tokenizer__split=False),
    "ignored merges": lambda: changed(llama2_unknown, model__ignore_merges=True),
    "unknown alternative": lambda: with_pattern(r"\S+ |\s+(?!\S)|\s+"),
    "looks behind": lambda: with_pattern(r"(?<=a) | ?[^\s\p{L}\p{N}]+|\p{L}+|\s+"),
    "spaces not found": lambda: with_pattern(r"\p{N}{1,3}"),
    "removes": lambda: with_pattern(PATTERNS["qwen2"][0], "removed"),
    "strips": lambda: with_normalizer(normalizers.Strip()),
    "replaces": lambda: with_normalizer(normalizers.Replace(Regex(" {2,}"), " ")),
    "removes characters": lambda: with_normalizer(normalizers.BertNormalizer()),
    "puts something in front": lambda: with_normalizer(normalizers.Prepend("\u2581")),
    "single word": lambda: with_token(content="word", single_word=True),
    "normalised token with a space": lambda: with_token(content="a b", normalized=True),
    "normalised token that takes spaces": lambda: with_token(content="<r>", rstrip=True),
    "no pre-tokenizer": lambda: changed(qwen2, pre_tokenizer=None),
}


@pytest.mark.parametrize("why", UNPROVEN)
def test_no_proof_no_cut(why: str) -> None:
    with pytest.raises(NoProofError) as caught:
        find_cut_rule(UNPROVEN[why]())
    assert str(caught.value)


def test_stops_and_lines_are_cuts_only_where_that_is_shown() -> None:
    rules = {name: find_cut_rule(family(name)) for name in FAMILIES}
    plain = {"gpt2", "starcoder", "qwen2", "llama3", "deepseek"}
    at_stops = {name for name, rule in rules.items() if rule.pattern.search("a\n")}
    assert at_stops == plain | {f"{name}_added" for name in plain}
    at_lines = {name for name, rule in rules.items() if rule.words("a\nb") == ["a\n", "b"]}
    assert at_lines == {"qwen2", "llama3", "deepseek"}
