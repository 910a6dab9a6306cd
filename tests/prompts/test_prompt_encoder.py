"""Whatever library tokenizes, ids are those of `tokenizers`, for every family and any text."""

import logging
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.levels import examples
from support.prompt_texts import FRAGMENTS, family, long_text, texts, whole
from support.tokenizer_families import FAMILIES
from tokenizers import AddedToken

from batchllm_operator.errors import ModelError
from batchllm_operator.prompts import prompt_encoder
from batchllm_operator.prompts.prompt_encoder import PromptEncoder, TokenIdsDifferError

# With their added tokens, fastokens finds a normalized one ("   ") before one that isn't (" vi").
OVERLAPPING = {"gpt2", "gpt2_prefix_space", "starcoder", "llama3", "deepseek"}
AGREEING = {"qwen2", "qwen2_spaces", "llama2", "gemma"}
FAST = OVERLAPPING | AGREEING | {f"{name}_added" for name in AGREEING}


class Compared(list[str]):
    """A reference for `qwen2` that keeps the texts it was given."""

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        self.extend(texts)
        return whole(family("qwen2"), list(texts))


def encoder(name: str, *, special: bool = True) -> PromptEncoder:
    tokenizer = family(name)
    return PromptEncoder(
        lambda texts: whole(tokenizer, list(texts), special=special),
        tokenizer,
        name,
        add_special_tokens=special,
    )


class Wrong:
    """fastokens as it would be with a fault: prompts that hold `text` get one token more."""

    def __init__(self, fast: Any, text: str) -> None:
        self.fast, self.text = fast, text

    def encode_batch_flat(self, texts: list[str], **options: Any) -> tuple[bytes, bytes]:
        marked = [text + "x" if self.text in text else text for text in texts]
        ids, offsets = self.fast.encode_batch_flat(marked, **options)
        return ids, offsets


def spoil(encoder: PromptEncoder, text: str) -> None:
    encoder._fast = Wrong(encoder._fast, text)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_encoded_by_the_fastest_library_that_takes_it(name: str) -> None:
    assert encoder(name).library == ("fastokens" if name in FAST else "tokenizers")


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=examples(150))
@given(batch=st.lists(texts, min_size=1, max_size=20))
def test_any_texts(name: str, batch: list[str]) -> None:
    batch = [*batch, "".join(batch), " ".join(batch)]
    for special in (True, False):
        found = encoder(name, special=special)
        assert found.encode(batch).to_lists() == whole(family(name), batch, special=special)


@pytest.mark.parametrize("text", ["v" * 50_000, " " * 50_000, " v" * 25_000, "\n v" * 20_000, "\0"])
@pytest.mark.parametrize("name", ["qwen2", "llama2", "gemma_added"])
def test_degenerate_texts(name: str, text: str) -> None:
    found = encoder(name)
    assert found.encode([text, "", text]).to_lists() == whole(family(name), [text, "", text])
    assert found.library == "fastokens"


def test_half_a_surrogate_pair_is_refused_as_by_the_tokenizers_library() -> None:
    for name in ("qwen2", "unigram"):
        with pytest.raises(TypeError):
            encoder(name).encode(["\ud800"])


# A library that gets ids wrong


def test_a_difference_in_the_first_batch_changes_the_library(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = encoder("qwen2")
    spoil(found, "fox")
    batch = [long_text(seed, 50) for seed in range(80)]
    assert found.encode(batch).to_lists() == whole(family("qwen2"), batch)
    assert found.library == "tokenizers"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "qwen2: " in caplog.text


def test_a_difference_later_on_asks_for_all_prompts_again() -> None:
    found = encoder("qwen2")
    batch = ["a text without the word"] * 10
    assert found.encode(batch).to_lists() == whole(family("qwen2"), batch)
    spoil(found, "fox")
    found.encode(["fox"] * 3)  # too few for another sample
    with pytest.raises(TokenIdsDifferError):
        found.encode(["fox"] * 600)
    assert found.encode(["fox"]).to_lists() == whole(family("qwen2"), ["fox"])


def test_of_a_huge_text_only_the_beginning_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tokenizers` would take hundreds of bytes of memory for each of its bytes."""
    monkeypatch.setattr(prompt_encoder, "_HUGE_CHARS", 1000)
    monkeypatch.setattr(prompt_encoder, "_BEGINNING_CHARS", 100)
    compared, tokenizer = Compared(), family("qwen2")
    batch = ["fox " + long_text(1, 300) * 9, "fox", long_text(2, 300) * 9]
    for is_wrong in (False, True):
        found = PromptEncoder(compared, tokenizer, "t", add_special_tokens=True)
        if is_wrong:
            spoil(found, "fox ")
        compared.clear()
        assert found.encode(batch).to_lists() == whole(tokenizer, batch)
        assert compared == [batch[0][:100]]
        assert found.library == ("tokenizers" if is_wrong else "fastokens")


@pytest.mark.parametrize("size", [1, 7, 100, 513])
def test_one_prompt_in_512_is_compared_whatever_the_batches(size: int) -> None:
    compared = Compared()
    found = PromptEncoder(compared, family("qwen2"), "t", add_special_tokens=True)
    compared.clear()  # of the test texts
    for start in range(0, 3000, size):
        found.encode([str(idx) for idx in range(start, min(start + size, 3000))])
    first = range(0, size, 64)
    later = range(first[-1] + 512, 3000, 512)
    assert compared == [str(idx) for idx in (*first, *later)]


def test_a_tokenizer_whose_test_texts_differ_never_uses_fastokens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = PromptEncoder._make_fast
    monkeypatch.setattr(
        PromptEncoder, "_make_fast", lambda self, backend: Wrong(make(self, backend), "<tool>")
    )
    assert encoder("qwen2").library == "fastokens"
    found = encoder("qwen2_added")  # which has this token
    assert found.library == "tokenizers"
    assert "test texts differ" in caplog.text
    assert found.encode(["<tool>"]).to_lists() == whole(family("qwen2_added"), ["<tool>"])


def test_a_prompt_that_fastokens_fails_at_is_encoded_by_the_other_library(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        def encode_batch_flat(self, texts: list[str], **options: Any) -> None:
            raise ValueError("match limit exceeded")

    found = encoder("qwen2")
    found._fast = Failing()
    assert found.encode(["fox"]).to_lists() == whole(family("qwen2"), ["fox"])
    assert "match limit exceeded" in caplog.text


def test_a_prompt_that_the_tokenizers_library_gives_up_on_isnt_compared() -> None:
    class PanicException(BaseException):
        pass

    def reference(texts: Sequence[str]) -> list[list[int]]:
        if " " * 1000 in texts:
            raise PanicException("retry-limit-in-match over")
        return whole(tokenizer, list(texts))

    tokenizer = family("qwen2")
    found = PromptEncoder(reference, tokenizer, "t", add_special_tokens=True)
    batch = [" " * 1000, "fox"]
    assert found.encode(batch).to_lists() == whole(tokenizer, batch)
    assert found.library == "fastokens"

    class Backend:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> None:
            raise PanicException("retry-limit-in-match over")

    found._fast, found._backend = None, Backend()  # type: ignore[assignment]
    with pytest.raises(
        ModelError, match=r"one of 2 prompts, .* longest has 1000 characters: retry"
    ):
        found.encode(batch)


def test_without_fastokens_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="batchllm_operator")
    monkeypatch.setitem(sys.modules, "fastokens", None)
    found = encoder("qwen2")
    assert found.library == "tokenizers"
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "not fastokens" in caplog.text
    batch = [long_text(0), *FRAGMENTS]
    assert found.encode(batch).to_lists() == whole(family("qwen2"), batch)


def test_added_tokens_that_overlap_are_test_texts_too() -> None:
    """Close together, the tokens of this one don't meet: only an overlap shows the difference."""
    tokenizer = FAMILIES["gpt2"]()
    tokenizer.add_special_tokens([AddedToken(" ab", normalized=False)])
    tokenizer.add_tokens([AddedToken("c c "), AddedToken("d")])
    found = PromptEncoder(
        lambda texts: whole(tokenizer, list(texts)), tokenizer, "t", add_special_tokens=True
    )
    assert found.encode(["c c ab"]).to_lists() == whole(tokenizer, ["c c ab"])
    assert found.library == "tokenizers"


def test_a_tokenizer_without_a_backend_is_called_itself() -> None:
    found = PromptEncoder(
        lambda texts: [[len(text)] for text in texts], None, "t", add_special_tokens=True
    )
    assert found.library == "transformers"
    assert found.encode(["a", "", "abc"]).to_lists() == [[1], [0], [3]]
    assert found.encode([]).to_lists() == []
