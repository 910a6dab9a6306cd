"""No proof, no cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.prompt_texts import family
from support.tokenizer_families import FAMILIES, PATTERNS, llama2_unknown, qwen2, unigram
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from batchllm_operator.prompts.safe_cuts import NoProofError, find_cut_rule


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
    plain = {"gpt2", "starcoder", "qwen2", "qwen2_spaces", "llama3", "deepseek"}
    at_stops = {name for name, rule in rules.items() if rule.pattern.search("a\n")}
    assert at_stops == plain | {f"{name}_added" for name in plain}
    at_lines = {name for name, rule in rules.items() if rule.words("a\nb") == ["a\n", "b"]}
    assert at_lines == {"qwen2", "qwen2_spaces", "llama3", "deepseek"}
