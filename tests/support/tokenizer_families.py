"""Small tokenizers of the families that published models use, each trained on a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

START, END = "<|im_start|>", "<|im_end|>"
CORPUS: Final = [
    "The quick brown fox jumps over the lazy dog, doesn't it? We'll see what they've got.",
    "Numbers such as 12, 345 and 6789 or 1/2; dates like 2026-01-31, and $3.50 each!!",
    "def f(x):\n    return x + 1\n\n\n# a comment\r\n\tindented   with   spaces",
    "naïve café e\u0301 über 表語が한국어 中文\u3002句子\uff0c很好\uff01 🙂 ÀÉ ФЫ",
    "vocabulary voice very kind keys view 42 values known as kinds of vivid views",
] * 4

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS: Final = {
    "gpt2": [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    ],
    "llama3": [
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{WHITESPACE}"
    ],
    "qwen2": [
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{WHITESPACE}"
    ],
    "qwen3_5": [
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{WHITESPACE}"
    ],
    "o200k": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{WHITESPACE}"
    ],
    "tekken": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{WHITESPACE}"
    ],
    "deepseek": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{WHITESPACE}",
    ],
}


def splitter(name: str) -> Any:
    """The pre-tokenizer of a byte-level family, without the mapping of bytes."""
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in PATTERNS[name]]
    return pre_tokenizers.Sequence(splits)


def _byte_level(name: str, normalizer: Any = None, *, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splitter(name), last])
    return _trained_bpe(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def _trained_bpe(tokenizer: Tokenizer, **options: Any) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", START, END], show_progress=False, **options
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def gpt2(add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return _trained_bpe(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def gpt2_prefix_space() -> Tokenizer:
    return gpt2(add_prefix_space=True)


def starcoder() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    return _trained_bpe(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def qwen2() -> Tokenizer:
    return _byte_level("qwen2", normalizers.NFC())


def llama3() -> Tokenizer:
    tokenizer = _byte_level("llama3", ignore_merges=True)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{START} $A {END}",
                special_tokens=[(name, tokenizer.token_to_id(name)) for name in (START, END)],
            ),
        ]
    )
    return tokenizer


def llama3_nfd() -> Tokenizer:
    return _byte_level("llama3", normalizers.NFD())


def o200k() -> Tokenizer:
    return _byte_level("o200k", normalizers.NFKC())


def tekken() -> Tokenizer:
    return _byte_level("tekken", normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]))


def deepseek() -> Tokenizer:
    return _byte_level("deepseek")


def _sentencepiece_bpe(byte_fallback: bool = True) -> Tokenizer:
    """Trained word by word, so that no merge joins two words, as SentencePiece does."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<unk>", START, END, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    parts = json.loads(tokenizer.to_str())  # runs of spaces, which words alone don't teach it
    parts["model"]["vocab"]["\u2581\u2581"] = tokenizer.get_vocab_size()
    parts["model"]["merges"].append(["\u2581", "\u2581"])
    return Tokenizer.from_str(json.dumps(parts))


def llama2() -> Tokenizer:
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.pre_tokenizer = None
    return tokenizer


def llama2_unknown() -> Tokenizer:
    """Without byte tokens: neighbouring unknown characters become one."""
    tokenizer = _sentencepiece_bpe(byte_fallback=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def gemma() -> Tokenizer:
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def _unigram(scheme: str, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", START, END], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    return _unigram("always", normalizers.NFKC())


def unigram_first() -> Tokenizer:
    return _unigram("first")


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["<unk>", START, END], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in (END, START)]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return tokenizer


def _with_added_tokens(build: Callable[[], Tokenizer]) -> Callable[[], Tokenizer]:
    """Tokens that take whitespace, hold it, or consist of it."""

    def built() -> Tokenizer:
        tokenizer = build()
        tokenizer.add_special_tokens(
            [
                AddedToken("<left>", lstrip=True, normalized=False),
                AddedToken("<right>", rstrip=True, normalized=False),
                AddedToken("fox jumps", normalized=False),
                AddedToken(" vi", normalized=False),
                AddedToken("<tool>", normalized=False),
            ]
        )
        whitespace = [] if build is bert else [AddedToken("   "), AddedToken("\n\n")]
        tokenizer.add_tokens([*whitespace, AddedToken("Plain")])
        return tokenizer

    return built


def qwen2_spaces() -> Tokenizer:
    """Tokens for runs of spaces and line breaks, and none that takes whitespace around it."""
    tokenizer = qwen2()
    tokenizer.add_tokens([AddedToken(" " * length) for length in (2, 3, 8)])
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("\n\n", "\t\t", "<tool>", "the", "\n<")]
    )
    return tokenizer


_BUILDERS: Final = [
    gpt2,
    gpt2_prefix_space,
    starcoder,
    qwen2,
    qwen2_spaces,
    llama3,
    llama3_nfd,
    o200k,
    tekken,
    deepseek,
    llama2,
    llama2_unknown,
    gemma,
    unigram,
    unigram_first,
    bert,
]
FAMILIES: Final[dict[str, Callable[[], Tokenizer]]] = {
    **{build.__name__: build for build in _BUILDERS},
    **{f"{build.__name__}_added": _with_added_tokens(build) for build in _BUILDERS},
}


def make_qwen(folder: Path) -> None:
    """A model's tokenizer with tokens behind its vocabulary, as transformers saves it."""
    from transformers import Qwen2Tokenizer

    model = json.loads(FAMILIES["qwen2"]().to_str())["model"]
    merges: Any = [tuple(merge) for merge in model["merges"]]
    Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=merges,
        unk_token=START,
        eos_token=END,
        pad_token=END,
        extra_special_tokens=["<|tool|>", "<|think|>"],  # behind the vocabulary
    ).save_pretrained(folder)
