"""Ids of prompts in pieces are those of whole prompts, for every family and any text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.levels import examples, some
from support.prompt_texts import FRAGMENTS, family, long_text, texts, whole
from support.tokenizer_families import CORPUS, FAMILIES
from tokenizers import Tokenizer

from batchllm_operator.prompts import shared_text
from batchllm_operator.prompts.safe_cuts import find_cut_rule
from batchllm_operator.prompts.shared_text import SharedTextEncoder


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


@pytest.mark.parametrize("name", some(FAMILIES, one_in=3, first=0))
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_any_text_cut_at_all_safe_places(name: str, cut_everywhere: None, text: str) -> None:
    tokenizer = family(name)
    assert Encoder(tokenizer).encode([text]) == whole(tokenizer, [text])
    bare = Encoder(tokenizer, special=False).encode([text])
    assert bare == whole(tokenizer, [text], special=False)


@pytest.mark.parametrize("name", some(FAMILIES, one_in=3, first=1))
@settings(max_examples=examples(100))
@given(batch=st.lists(texts, min_size=1, max_size=4))
def test_any_texts_made_of_words(name: str, batch: list[str]) -> None:
    """Texts of less than a piece: unknown words in one call, known ones from what is kept."""
    tokenizer = family(name)
    shared = Encoder(tokenizer)
    assert shared.encode(batch) == whole(tokenizer, batch)
    again = [*batch, "".join(batch), " ".join(batch)]
    assert shared.encode(again) == whole(tokenizer, again)


@pytest.mark.parametrize("name", some(FAMILIES, one_in=3, first=2))
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
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
