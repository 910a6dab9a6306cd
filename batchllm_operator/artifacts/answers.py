"""Answers of a task: what a part keeps of them, and the columns that the output table gets.

A part keeps what the engine said, so that columns can be derived again; `commit` derives them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.spec import JobSpec

LOGPROBS_FIELD: Final = pa.field("label_logprobs", pa.list_(pa.float64()))
"""Log-probabilities of the labels' first tokens in the model's whole vocabulary, in the order of
`JobSpec.labels`."""


def raw_fields(spec: JobSpec) -> list[pa.Field]:
    """Fields of a part for this task, beside those of a text."""
    return [LOGPROBS_FIELD] if spec.task == "classify" else []


def answer_fields(spec: JobSpec) -> list[pa.Field]:
    """Columns of the output table for this task, beside those of a text."""
    if spec.task == "generate":
        return []
    fields = [
        pa.field("label", pa.string()),
        pa.field("probability", pa.float64()),
        pa.field("probabilities", pa.struct([(label, pa.float64()) for label in spec.labels])),
        pa.field("logit_margin", pa.float64()),
    ]
    return [*fields, pa.field("score", pa.float64())] if spec.label_values else fields


def answer_columns(spec: JobSpec, outputs: pa.Table) -> dict[str, pa.Array]:
    """Columns of `answer_fields`, by name, and the text: null for rows without an answer.

    Args:
        spec: the job's.
        outputs: rows with the columns `raw_fields`.
    """
    if spec.task == "generate":
        return {}
    raw = outputs[LOGPROBS_FIELD.name].combine_chunks()
    is_missing = raw.is_null().to_numpy(zero_copy_only=False)
    logprobs = np.zeros((len(raw), len(spec.labels)))
    given = raw.drop_null().flatten().to_numpy()
    logprobs[~is_missing] = given.reshape(-1, len(spec.labels))
    probabilities = label_probabilities(logprobs)
    best = probabilities.argmax(axis=1)
    ascending = np.sort(logprobs, axis=1)

    def column(values: npt.NDArray[np.float64]) -> pa.Array:
        return pa.array(values, pa.float64(), mask=is_missing)

    each = [pa.array(values) for values in probabilities.T]
    label = pa.array(np.array(list(spec.labels), dtype=object)[best], mask=is_missing)
    columns = {
        "generated_text": label,
        "label": label,
        "probability": column(probabilities.max(axis=1)),
        "probabilities": pa.StructArray.from_arrays(
            each, names=list(spec.labels), mask=pa.array(is_missing)
        ),
        "logit_margin": column(ascending[:, -1] - ascending[:, -2]),
    }
    if spec.label_values:
        values = np.array([spec.label_values[label] for label in spec.labels])
        columns["score"] = column(probabilities @ values)
    return columns


def label_probabilities(logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Probabilities among the labels, which add up to 1: float64 [num_rows, num_labels].

    Args:
        logprobs: float64 [num_rows, num_labels], of the labels in the whole vocabulary.
    """
    weights = np.exp(logprobs - logprobs.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
