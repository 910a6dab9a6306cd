"""Embeddings, and the scores of pooling heads: a vector for each row."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from batchllm_operator.amounts import counted
from batchllm_operator.answers import fakes
from batchllm_operator.answers.kind import AnswerKind, FakePrompt, PlannedAnswers
from batchllm_operator.errors import ModelError
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import JobSpec

if TYPE_CHECKING:
    from batchllm_operator.model import ModelFiles
    from batchllm_operator.prompts import Tokenizer

VECTOR_FIELD: Final = pa.field("vector", pa.list_(pa.float32()))
"""As the engine gives it."""
LABELS_KEY: Final = b"batchllm.labels"
"""Of the metadata of the field `scores`: a JSON list of the names of its numbers."""
FAKE_SIZE: Final = 8
"""Numbers of the fake engine's vectors, unless the spec says otherwise."""
_CONFIG: Final = "config.json"
_SIZES: Final = ("embedding_size", "hidden_size", "n_embd", "d_model")
_POOLED_TOKENS: Final = {"mean": "the mean of all tokens", "cls": "the first token"}
_log = logging.getLogger(__name__)


class VectorAnswers(AnswerKind):
    """A vector: `embedding`, a list of fixed size (once it is planned), or `scores`, a list."""

    raw_fields = (VECTOR_FIELD,)

    def __init__(self, spec: JobSpec, planned: PlannedAnswers) -> None:
        super().__init__(spec, planned)
        size, labels = planned.embedding_size, list(planned.score_labels)
        if spec.task == "embed":
            kind = pa.list_(pa.float32()) if size is None else pa.list_(pa.float32(), size)
            self.fields = (pa.field("embedding", kind),)
        else:
            names = {LABELS_KEY: json.dumps(labels, ensure_ascii=False)} if labels else None
            self.fields = (pa.field("scores", pa.list_(pa.float32()), metadata=names),)

    @classmethod
    def is_asked(cls, spec: JobSpec) -> bool:
        return spec.is_pooled

    @classmethod
    def plan(cls, spec: JobSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """What the model's files say of its vectors: size, names, whether prompts share prefixes.

        They do as vLLM decides it (`ModelConfig.is_prefix_caching_supported`): where tokens see
        only those before them, and the last one is pooled.

        Raises:
            ModelError: a file can't be read, or `config.json` doesn't say the size of embeddings.
        """
        files = tokenizer.files  # None for the fake engine without a model
        config = files.read_mapping(_CONFIG) if files is not None else {}
        modules = _modules(files) if files is not None else {}
        reason = _reason_against_sharing(spec, config, modules) if config else None
        if reason is not None:
            _log.info("planned without shared prefixes: %s", reason)
        planned: dict[str, Any] = {"reason_against_sharing": reason}
        if spec.task == "embed":
            return planned | {"embedding_size": _embedding_size(spec, config, modules)}
        return planned | {"score_labels": _score_labels(config)}

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        (field,) = self.fields
        return {field.name: outputs[VECTOR_FIELD.name].combine_chunks().cast(field.type)}

    def fault(self, text: str, raw: Mapping[str, Any]) -> RowError | None:
        vector = np.asarray(raw[VECTOR_FIELD.name])
        wrong = vector[~np.isfinite(vector)]
        if not len(wrong):
            return None
        numbers = counted(len(wrong), "number")
        return RowError("not_finite", f"the model's vector has {numbers} such as {wrong[0]}")

    def read(self, output: Any) -> dict[str, Any]:
        vector = output.outputs.data.float().flatten()
        # As a list, Arrow takes hundreds of times as long to store it.
        return {VECTOR_FIELD.name: np.array(vector, dtype=np.float32)}

    def fake(self, prompt: FakePrompt) -> dict[str, Any]:
        size = self._spec.embedding.dimensions or FAKE_SIZE
        return {VECTOR_FIELD.name: fakes.fake_vector(prompt.token_ids, size)}

    def fake_text(self, prompt: FakePrompt) -> str:
        return ""

    def remarks(self, means: Mapping[str, float], texts: Mapping[str, int]) -> dict[str, Any]:
        size = self._planned.embedding_size
        return {} if size is None else {"embedding_size": size}


def _embedding_size(
    spec: JobSpec, config: Mapping[str, Any], modules: Mapping[str, Mapping[str, Any]]
) -> int:
    if spec.embedding.dimensions is not None:
        return spec.embedding.dimensions
    if spec.engine.backend == "fake":
        return FAKE_SIZE
    dense = modules.get("Dense", {}).get("out_features")
    text = config.get("text_config") or {}
    sizes = (config.get("embedding_size"), dense, *map(text.get, _SIZES), *map(config.get, _SIZES))
    size = next((size for size in sizes if isinstance(size, int) and size > 0), None)
    if size is None:
        raise ModelError(f"model {spec.model.path}: its {_CONFIG} has no size of embeddings")
    return size


def _score_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
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
    listed = files.read_json("modules.json")
    modules: dict[str, Mapping[str, Any]] = {}
    for module in listed if isinstance(listed, list) else ():
        kind = str(module.get("type")).rpartition(".")[2]
        if kind in ("Pooling", "Dense"):
            modules[kind] = files.read_mapping(f"{module.get('path')}/{_CONFIG}")
    return modules
