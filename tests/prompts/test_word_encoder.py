"""Ids of texts made of words are those of the texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.levels import examples, some
from support.prompt_texts import family, texts, whole
from support.tokenizer_families import FAMILIES
from tokenizers import AddedToken, Tokenizer

from batchllm_operator.prompts.safe_cuts import find_cut_rule
from batchllm_operator.prompts.word_encoder import WordEncoder


def test_words_are_forgotten_while_new_ones_are_learnt() -> None:
    tokenizer = family("qwen2")
    words = WordEncoder(tokenizer, find_cut_rule(tokenizer), cache_bytes=5000)
    for start in range(0, 1000, 100):
        texts = [f"word{idx} and word{idx + 50}" for idx in range(start, start + 100)]
        found = [np.frombuffer(ids, np.int32).tolist() for ids in words.encode(texts)]
        assert found == whole(tokenizer, texts, special=False)
        assert words.num_bytes <= 5000


def encode(words: WordEncoder, texts: list[str]) -> list[list[int]]:
    return [np.frombuffer(ids, np.int32).tolist() for ids in words.encode(texts)]


def test_a_tokenizer_without_special_tokens_gets_each_word_alone() -> None:
    tokenizer = family("qwen2")
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.encode_special_tokens = True  # which are text then
    batch = ["the fox<|im_end|> jumps over", "over the fox"]
    words = WordEncoder(tokenizer, find_cut_rule(tokenizer))
    assert encode(words, batch) == whole(tokenizer, batch, special=False)


def test_a_token_that_begins_in_a_word_and_ends_in_the_separator() -> None:
    tokenizer = Tokenizer.from_str(family("qwen2").to_str())
    tokenizer.add_tokens([AddedToken("fox<", normalized=False)])
    batch = ["the fox", "quick fox over", "fox the"]
    words = WordEncoder(tokenizer, find_cut_rule(tokenizer))
    assert encode(words, batch) == whole(tokenizer, batch, special=False)


@pytest.mark.parametrize("name", some(FAMILIES, one_in=3))
@settings(max_examples=examples(60))
@given(batch=st.lists(texts, max_size=5))
def test_texts_one_after_the_other_and_together(name: str, batch: list[str]) -> None:
    tokenizer = family(name)
    expected = whole(tokenizer, batch, special=False)
    rule = find_cut_rule(tokenizer)
    assert encode(WordEncoder(tokenizer, rule), batch) == expected
    words = WordEncoder(tokenizer, rule, cache_bytes=600)
    assert [encode(words, [text])[0] for text in batch] == expected
