"""How long a prompt with its output may be, by the rules of vLLM's `_get_and_verify_max_len`.

vLLM applies them as the engine starts. They are repeated here because a plan is made without vLLM;
a test compares the two.
"""

import os
from collections.abc import Mapping
from copy import copy
from math import inf
from operator import itemgetter
from typing import Any, Final, NamedTuple

from batchllm_operator.errors import ModelError, SpecError, one_line
from batchllm_operator.model.files import ModelFiles
from batchllm_operator.spec import EngineSpec

_CONFIG: Final = "config.json"
_TOKENIZER: Final = "tokenizer_config.json"
_KEYS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
_ENCODERS: Final = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_SCALED: Final = frozenset(
    {"longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)
"""Kinds of RoPE whose positions in the config are scaled already."""
_IS_OFFSET: Final = {
    "bert": False,
    **dict.fromkeys(("camembert", "roberta", "xlm-roberta", "xlm-roberta-xl"), True),
}
"""Encoders with a learned vector for each position; whether the first one's number is that of the
padding token plus 1. vLLM reads beyond the last without noticing."""


class ModelLength(NamedTuple):
    """Tokens of a prompt with its output."""

    usual: int
    """What vLLM takes if it isn't told."""
    most: int
    """It refuses more."""
    source: str
    """The file and the setting that limit it."""


def choose_length(length: ModelLength | None, wanted: int | None, path: str) -> int:
    """The length of a job whose spec wants this many tokens, or doesn't say.

    Raises SpecError if the engine would refuse it, and ModelError if nothing says a length.
    """
    if wanted is None:
        if length is None:
            raise ModelError(
                f"model {path}: its config.json doesn't say how long a prompt may be; set"
                " engine.max_model_len"
            )
        return length.usual
    # vLLM's own switch lets it read beyond the positions that a model knows.
    is_any = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip().lower() in ("1", "true")
    if length is not None and wanted > length.most and not is_any:
        raise SpecError(
            f"engine.max_model_len: {wanted} is more than model {path} allows: {length.most}"
            f" ({length.source}); leave it out, or write at most that"
        )
    return wanted


def find_length(
    config: Any, files: ModelFiles, engine: EngineSpec, *, is_pooled: bool
) -> ModelLength | None:
    """The length that vLLM allows a model with this config of transformers; None if it says none.

    Raises ModelError if a length in the model's files isn't a number of at least 2, and SpecError
    if the config can't have what `hf_overrides` says.
    """
    text = _text_config(config, engine.extra_args.get("hf_overrides"))
    names = text.attribute_map  # as the file has them
    lengths = [(getattr(text, key, None), f"{names.get(key, key)} of {_CONFIG}") for key in _KEYS]
    if own := getattr(text, "model_max_length", None):
        lengths = [(own, f"model_max_length of {_CONFIG}")]
    if engine.extra_args.get("disable_sliding_window"):
        window = getattr(text, "sliding_window", None)
        lengths.append((window or None, f"sliding_window of {_CONFIG}"))
    if is_pooled and getattr(text, "position_embedding_type", None) == "absolute":
        of_tokenizer = files.read_mapping(_TOKENIZER).get("model_max_length")
        lengths.append((of_tokenizer, f"model_max_length of {_TOKENIZER}"))
    known = [(length, source) for length, source in lengths if isinstance(length, int | float)]
    limit, source = min(known, key=itemgetter(0), default=(inf, ""))
    if limit == inf:
        return None
    rope = _rope_parameters(text)
    if "gemma3" not in text.model_type:
        limit *= _rope_factor(rope, files)
    for name in _ENCODERS:
        if encoder := files.read_json(name):
            if "max_seq_length" in encoder:
                limit, source = encoder["max_seq_length"], f"max_seq_length of {name}"
            break
    if not isinstance(limit, int | float) or limit < 2:
        raise ModelError(
            f"{files.where}: {source} is {limit}, which is no length of a prompt; correct the file"
        )
    most, source = _by_positions(text, int(limit), source)
    usual = most
    if any(_kind(parameters) == "longrope" for parameters in rope):
        usual = int(getattr(text, "original_max_position_embeddings", None) or most)
    return ModelLength(usual, max(most, own) if isinstance(own, int) else most, source)


def _text_config(config: Any, overrides: object) -> Any:
    """The config for texts, with the engine's `hf_overrides`."""
    text = copy(config.get_text_config())
    given = dict(overrides) if isinstance(overrides, Mapping) else {}
    of_text = given.pop("text_config", None)
    given |= of_text if isinstance(of_text, Mapping) else {}
    try:
        text.update(given)
    # A config's own checks and setters raise what they like.
    except Exception as error:
        fault = f"engine.extra_args: hf_overrides: {one_line(error)}"
        raise SpecError(f"{fault}; leave out what the model can't have") from error
    return text


def _by_positions(text: Any, limit: int, source: str) -> tuple[int, str]:
    """At most as many tokens as there are learned positions."""
    kind, positions = text.model_type, getattr(text, "max_position_embeddings", None)
    is_learned = getattr(text, "position_embedding_type", None) in (None, "absolute")
    if kind not in _IS_OFFSET or not is_learned or not isinstance(positions, int):
        return limit, source
    first = int(text.pad_token_id or 0) + 1 if _IS_OFFSET[kind] else 0
    if positions - first >= limit:
        return limit, source
    less = f", less {first}" if first else ""
    return positions - first, f"max_position_embeddings of {_CONFIG}{less}"


def _rope_parameters(text: Any) -> list[Mapping[str, Any]]:
    """Those of all layers, or of each kind of layers."""
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(given, Mapping) or not given:
        return []
    nested = [value for value in given.values() if isinstance(value, Mapping)]
    return nested if len(nested) == len(given) else [given]


def _rope_factor(rope: list[Mapping[str, Any]], files: ModelFiles) -> float:
    """By how much RoPE stretches the positions of the config."""
    factors = [p["factor"] for p in rope if _kind(p) not in _SCALED and "factor" in p]
    factor = factors[-1] if factors else 1.0
    if not isinstance(factor, int | float | None):
        raise ModelError(
            f"{files.where}: factor in rope_scaling of {_CONFIG} is {str(factor)[:40]!r},"
            " which is no number; correct the file"
        )
    return factor or 1.0


def _kind(parameters: Mapping[str, Any]) -> object:
    return parameters.get("rope_type") or parameters.get("type") or "default"
