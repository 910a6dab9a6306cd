"""Reads a model's tokenizer without transformers, if its files make the result certain.

transformers 5 chooses a class by `model_type` and `tokenizer_class`. Some classes use
`tokenizer.json` unchanged; that of Qwen2 and 3 uses its vocabulary, and the rest from its own code.
Then it adds the special tokens of all files again. A file is used here only if none of that changes
it; tests compare the result with that of transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

_AS_STORED: Final = ("llama", "gpt_oss")
_STORED_CLASSES: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")
_QWEN: Final = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_QWEN_CLASSES: Final = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_QWEN_DEFAULTS: Final = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_QWEN_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_UNSET: Final = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)
_NAMED: Final = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_KNOWN_KEYS: Final = frozenset(
    [
        *_NAMED,
        *("tokenizer_class", "added_tokens_decoder", "additional_special_tokens", "backend"),
        *("extra_special_tokens", "add_bos_token", "add_eos_token", "add_prefix_space", "is_local"),
        *("chat_template", "clean_up_tokenization_spaces", "model_max_length", "errors"),
        *("model_input_names", "padding_side", "truncation_side", "split_special_tokens", "legacy"),
    ]
)
_LEGACY_FILES: Final = ("special_tokens_map.json", "added_tokens.json")
"""Read if `added_tokens_decoder` is incomplete."""


@dataclass(frozen=True, slots=True)
class StoredTokenizer:
    """The tokenizer that transformers would load."""

    backend: Backend
    """Doesn't cut or pad."""
    special_tokens: dict[str, str]
    """Texts by name, such as `eos_token`."""
    config: SimpleNamespace
    """Fields of `config.json`."""

    @property
    def commit(self) -> None:
        """None: a folder has no hub commit."""

    @property
    def fingerprint(self) -> str:
        """Changes when the tokenizer does; the same as `TransformersTokenizer.fingerprint`."""
        return fingerprint(
            self.backend.to_str(), json.dumps(self.special_tokens, sort_keys=True), ""
        )

    def vocabulary(self) -> dict[str, int]:
        return self.backend.get_vocab()

    def added_tokens(self) -> dict[str, bool]:
        """Tokens beside the model's own vocabulary, and whether they are special."""
        decoder = self.backend.get_added_tokens_decoder()
        return {token.content: token.special for token in decoder.values()}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, special tokens included."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts))]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=False)


def fingerprint(backend: str | None, *more: str) -> str:
    """A digest of a backend's JSON, and of all else that a tokenizer's ids depend on."""
    parts = list(more)
    if backend is not None:
        content = json.loads(backend)
        # Each call that encodes sets these; prompts are never cut or padded here.
        content.pop("truncation", None)
        content.pop("padding", None)
        parts.insert(0, json.dumps(content, sort_keys=True))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_stored(folder: Path) -> StoredTokenizer | None:
    """The tokenizer in a model's folder; None if transformers must load or refuse it."""
    try:
        names = ("config.json", "tokenizer_config.json", "tokenizer.json")
        texts = [(folder / name).read_text(encoding="utf-8") for name in names]
        model, config, stored = map(json.loads, texts)
        if "added_tokens_decoder" not in config and any(
            (folder / name).exists() for name in _LEGACY_FILES
        ):
            return None
        limit = model.get("max_position_embeddings")
        is_plain = not config.keys() - _KNOWN_KEYS and not config.get("split_special_tokens")
        is_plain = is_plain and not config.get("add_prefix_space") and type(limit) is int
        if not is_plain or any(key in model for key in ("auto_map", "text_config")):
            return None
        named = {name: config[name] for name in _NAMED if config.get(name) is not None}
        if model.get("model_type") in _QWEN and config.get("tokenizer_class") in _QWEN_CLASSES:
            named = {**_QWEN_DEFAULTS, **named}
        elif not (
            model.get("model_type") in _AS_STORED
            and config.get("tokenizer_class") in _STORED_CLASSES
        ):
            return None
        if not _adds_nothing(config, named, stored):
            return None
        backend = Backend.from_str(texts[-1])
    # Damaged files: transformers describes the fault. `tokenizers` raises plain exceptions.
    except Exception:  # noqa: BLE001
        return None
    if backend.post_processor is None or (
        model["model_type"] in _QWEN and not _is_qwens(backend, stored)
    ):
        return None
    backend.no_truncation()
    backend.no_padding()
    return StoredTokenizer(
        backend, {name: str(text) for name, text in named.items()}, SimpleNamespace(**model)
    )


def _adds_nothing(config: dict[str, Any], named: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Whether `tokenizer.json` has all tokens that transformers would add."""
    added = {token["id"]: token for token in stored["added_tokens"]}
    listed = config.get("added_tokens_decoder")
    if listed is not None and {int(idx): token for idx, token in listed.items()} != {
        idx: {name: value for name, value in token.items() if name != "id"}
        for idx, token in added.items()
    }:
        return False
    plain = {
        token["content"]
        for token in added.values()
        if token["special"]
        and not any(token[flag] for flag in ("normalized", "lstrip", "rstrip", "single_word"))
    }
    return all(
        isinstance(text, str) and text in plain for text in [*named.values(), *_more(config)]
    )


def _more(config: dict[str, Any]) -> Iterator[Any]:
    """Special tokens without a name."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        found = config.get(key) or []
        yield from found if isinstance(found, list) else [None]


def _is_qwens(backend: Backend, stored: dict[str, Any]) -> bool:
    """Whether the class of Qwen2 would build the same from the vocabulary and the merges."""
    split = pre_tokenizers.Split(Regex(_QWEN_PATTERN), behavior="isolated", invert=False)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parts = {
        "normalizer": normalizers.NFC(),
        "pre_tokenizer": pre_tokenizers.Sequence([split, bytes_only]),
        "decoder": decoders.ByteLevel(),
    }
    model = stored["model"]
    new_ids = [
        each["id"] for each in stored["added_tokens"] if each["content"] not in model["vocab"]
    ]
    return (
        model["type"] == "BPE"
        and not any(model.get(name) for name in _QWEN_UNSET)
        and all(
            (own := getattr(backend, name)) is not None
            and own.__getstate__() == part.__getstate__()  # as bytes
            for name, part in parts.items()
        )
        and new_ids == list(range(len(model["vocab"]), len(model["vocab"]) + len(new_ids)))
    )
