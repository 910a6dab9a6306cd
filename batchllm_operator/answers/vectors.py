"""Embeddings, and the scores of pooling heads: a vector for each row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from batchllm_operator.amounts import counted

VECTOR_FIELD: Final = pa.field("vector", pa.list_(pa.float32()))
"""As the engine gives it."""
LABELS_KEY: Final = b"batchllm.labels"
"""Of the metadata of the field `scores`: a JSON list of the names of its numbers."""


class VectorColumns:
    """A vector: `embedding`, a list of fixed size, or `scores`, a list.

    Args:
        task: which of them.
        size: numbers of an embedding; None if it isn't known, for a list of any size.
        labels: names of the scores.
    """

    raw_fields = (VECTOR_FIELD,)

    def __init__(
        self, task: Literal["embed", "pool"], size: int | None = None, labels: Sequence[str] = ()
    ) -> None:
        if task == "embed":
            kind = pa.list_(pa.float32()) if size is None else pa.list_(pa.float32(), size)
            self.fields = (pa.field("embedding", kind),)
        else:
            names = {LABELS_KEY: json.dumps(list(labels), ensure_ascii=False)} if labels else None
            self.fields = (pa.field("scores", pa.list_(pa.float32()), metadata=names),)

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        (field,) = self.fields
        return {field.name: outputs[VECTOR_FIELD.name].combine_chunks().cast(field.type)}

    def fault(self, text: str, raw: Mapping[str, Any]) -> str | None:
        wrong = np.flatnonzero(~np.isfinite(raw[VECTOR_FIELD.name]))
        if not len(wrong):
            return None
        value = raw[VECTOR_FIELD.name][wrong[0]]
        numbers = counted(len(wrong), "number")
        return f"not_finite: the model's vector has {numbers} such as {value}"
