"""Texts that are hard on a tokenizer, and the ids that it gives them itself."""

import random
from functools import cache

from hypothesis import strategies as st
from support.tokenizer_families import CORPUS, FAMILIES
from tokenizers import Tokenizer

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
    *(
        "\u039f\u0394\u039f\u03a3",
        "\u00ad",
        "\u200d",
        "\u2060",
        "\nthe",
        "\n    x",
        "#",
        "\n/",
        "word" * 40,
    ),
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


def long_text(seed: int, num_words: int = 1500) -> str:
    words = " ".join(CORPUS[:5]).split(" ")
    return " ".join(random.Random(seed).choices(words, k=num_words))
