"""What a model's files say of its vectors: size, names, and whether prompts share prefixes.

As vLLM decides it (`ModelConfig.is_prefix_caching_supported`), as far as files tell: a model whose
tokens see only those before them, pooled at the last token, may take a prefix from its cache.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from batchllm_operator.engine.fake import FAKE_SIZE
from batchllm_operator.errors import ModelError
from batchllm_operator.model import ModelFiles
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.pooling import PlannedPooling

_log = logging.getLogger(__name__)
_CONFIG: Final = "config.json"
_SIZES: Final = ("embedding_size", "hidden_size", "n_embd", "d_model")
_POOLED_TOKENS: Final = {"mean": "the mean of all tokens", "cls": "the first token"}


def find_pooling(spec: JobSpec, files: ModelFiles | None) -> PlannedPooling | None:
    """What the plan of an `embed` or `pool` job says of its vectors; None for other tasks.

    Args:
        files: the model's; None for the fake engine without a model.

    Raises:
        ModelError: a file can't be read, or `config.json` doesn't say the size of embeddings.
    """
    if not spec.is_pooled:
        return None
    config = files.read_json(_CONFIG) if files is not None else None
    modules = _modules(files) if files is not None else {}
    reason = None if config is None else _reason_against_sharing(spec, config, modules)
    if reason is not None:
        _log.info("planned without shared prefixes: %s", reason)
    size = None
    if spec.task == "embed":
        size = _embedding_size(spec, config or {}, modules)
    return PlannedPooling(
        embedding_size=size,
        score_labels=_labels(config or {}) if spec.task == "pool" else (),
        reason_against_sharing=reason,
    )


def _embedding_size(
    spec: JobSpec, config: Mapping[str, Any], modules: Mapping[str, Mapping[str, Any]]
) -> int:
    if spec.embedding.dimensions is not None:
        return spec.embedding.dimensions
    if spec.engine.backend == "fake":
        return FAKE_SIZE
    dense = modules.get("Dense", {}).get("out_features")
    text = config.get("text_config") or {}
    found = (config.get("embedding_size"), dense, *map(text.get, _SIZES), *map(config.get, _SIZES))
    size = next((each for each in found if isinstance(each, int) and each > 0), None)
    if size is None:
        raise ModelError(f"model {spec.model.path}: its {_CONFIG} has no size of embeddings")
    return size


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the scores, in their order; none where the config numbers them at most."""
    names = config.get("id2label")
    if not isinstance(names, Mapping) or {str(idx) for idx in range(len(names))} != set(names):
        return ()
    return tuple(str(names[str(idx)]) for idx in range(len(names)))


def _reason_against_sharing(
    spec: JobSpec, config: Mapping[str, Any], modules: Mapping[str, Mapping[str, Any]]
) -> str | None:
    from transformers.models.auto.modeling_auto import (  # seconds to import
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = str((config.get("text_config") or config).get("model_type"))
    is_causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not is_causal or kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return f"tokens of a model of type {kind} may see those after them"
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        return "the model's config says that tokens see those after them"
    pooled = _pooled_tokens(spec, modules)
    return f"the model pools {_POOLED_TOKENS[pooled]}" if pooled in _POOLED_TOKENS else None


def _pooled_tokens(spec: JobSpec, modules: Mapping[str, Mapping[str, Any]]) -> str | None:
    """`mean`, `cls`, another word, or None for the last token."""
    given = spec.engine.extra_args.get("pooler_config")
    if isinstance(given, Mapping):
        for name in ("seq_pooling_type", "pooling_type"):
            if isinstance(given.get(name), str):
                return str(given[name]).lower()
    pooling = modules.get("Pooling", {})
    if isinstance(mode := pooling.get("pooling_mode"), str):
        return mode.lower()
    modes = [name for name, value in pooling.items() if value is True]
    return next((name for name in _POOLED_TOKENS if f"_{name}_" in " ".join(modes)), None)


def _modules(files: ModelFiles) -> dict[str, Mapping[str, Any]]:
    """The configs of a sentence-transformers model's modules by kind, of equal ones the last."""
    found = files.read_json("modules.json")
    if not isinstance(found, list):
        return {}
    modules: dict[str, Mapping[str, Any]] = {}
    for module in found:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind in ("Pooling", "Dense"):
            modules[kind] = files.read_json(f"{module.get('path')}/{_CONFIG}") or {}
    return modules
