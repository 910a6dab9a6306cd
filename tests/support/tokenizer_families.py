"""Small tokenizers of the families that published models use, each trained on a few lines."""

import json
from collections.abc import Callable
from functools import partial
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
    "llama3": [
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{WHITESPACE}"
    ],
    "qwen2": [
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{WHITESPACE}"
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


SPECIALS: Final = ["<unk>", START, END]


def _trained(tokenizer: Tokenizer, trainer: Any, **parts: Any) -> Tokenizer:
    """The tokenizer with these parts, trained on the corpus."""
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _bytes_bpe(splits: list[Any], *, ignore_merges: bool = False, **parts: Any) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    pre_tokenizer = pre_tokenizers.Sequence(splits) if len(splits) > 1 else splits[0]
    return _trained(tokenizer, trainer, pre_tokenizer=pre_tokenizer, **parts)


def _byte_level(name: str, **parts: Any) -> Tokenizer:
    """By the expressions of a family."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[name]]
    return _bytes_bpe([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)], **parts)


def _gpt2(add_prefix_space: bool) -> Tokenizer:
    ends = processors.ByteLevel(trim_offsets=True)
    return _bytes_bpe([pre_tokenizers.ByteLevel(add_prefix_space)], post_processor=ends)


def _llama3() -> Tokenizer:
    tokenizer = _byte_level("llama3", ignore_merges=True)
    ends = processors.TemplateProcessing(
        single=f"{START} $A {END}",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (START, END)],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), ends])
    return tokenizer


def _sentencepiece(byte_fallback: bool = True, **parts: Any) -> Tokenizer:
    """Trained word by word, so that no merge joins two words, as SentencePiece does."""
    specials = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = _trained(
        Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)),
        trainers.BpeTrainer(vocab_size=800, special_tokens=specials, show_progress=False),
        pre_tokenizer=pre_tokenizers.Metaspace(),
    )
    content = json.loads(trained.to_str())  # runs of spaces, which words alone don't teach it
    content["model"]["vocab"]["\u2581\u2581"] = trained.get_vocab_size()
    content["model"]["merges"].append(["\u2581", "\u2581"])
    tokenizer = Tokenizer.from_str(json.dumps(content))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def _unigram(scheme: str, **parts: Any) -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    pieces = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return _trained(Tokenizer(models.Unigram()), trainer, pre_tokenizer=pieces, **parts)


def _bert() -> Tokenizer:
    tokenizer = _trained(
        Tokenizer(models.WordPiece(unk_token="<unk>")),
        trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIALS, show_progress=False),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )
    ends = [(name, tokenizer.token_to_id(name)) for name in (END, START)]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return tokenizer


def _qwen2_spaces() -> Tokenizer:
    """Tokens for runs of spaces and line breaks, and none that takes whitespace around it."""
    tokenizer = _byte_level("qwen2", normalizer=normalizers.NFC())
    tokenizer.add_tokens([AddedToken(" " * length) for length in (2, 3, 8)])
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("\n\n", "\t\t", "<tool>", "the", "\n<")]
    )
    return tokenizer


_PLAIN: Final[dict[str, Callable[[], Tokenizer]]] = {
    "gpt2": lambda: _gpt2(add_prefix_space=False),
    "gpt2_prefix_space": lambda: _gpt2(add_prefix_space=True),
    "starcoder": lambda: _bytes_bpe(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    ),
    "qwen2": lambda: _byte_level("qwen2", normalizer=normalizers.NFC()),
    "qwen2_spaces": _qwen2_spaces,
    "llama3": _llama3,
    "llama3_nfd": lambda: _byte_level("llama3", normalizer=normalizers.NFD()),
    "o200k": lambda: _byte_level("o200k", normalizer=normalizers.NFKC()),
    "tekken": lambda: _byte_level(
        "tekken", normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
    ),
    "deepseek": lambda: _byte_level("deepseek"),
    "llama2": lambda: _sentencepiece(
        normalizer=normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        ),
        pre_tokenizer=None,
    ),
    # Without byte tokens: neighbouring unknown characters become one.
    "llama2_unknown": lambda: _sentencepiece(
        byte_fallback=False,
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    ),
    "gemma": lambda: _sentencepiece(
        normalizer=normalizers.Replace(" ", "\u2581"),
        pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
    ),
    "unigram": lambda: _unigram("always", normalizer=normalizers.NFKC()),
    "unigram_first": lambda: _unigram("first"),
    "bert": _bert,
}


def _with_added_tokens(name: str) -> Tokenizer:
    """With tokens that take whitespace, hold it, or consist of it."""
    tokenizer = _PLAIN[name]()
    tokenizer.add_special_tokens(
        [
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
            *(AddedToken(text, normalized=False) for text in ("fox jumps", " vi", "<tool>")),
        ]
    )
    whitespace = [] if name == "bert" else [AddedToken("   "), AddedToken("\n\n")]
    tokenizer.add_tokens([*whitespace, AddedToken("Plain")])
    return tokenizer


FAMILIES: Final[dict[str, Callable[[], Tokenizer]]] = {
    **_PLAIN,
    **{f"{name}_added": partial(_with_added_tokens, name) for name in _PLAIN},
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
