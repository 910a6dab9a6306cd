"""Labels with probabilities, and a score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

LOGPROBS_FIELD: Final = pa.field("label_logprobs", pa.list_(pa.float64()))
"""Log-probabilities of the labels' first tokens in the model's whole vocabulary, in the order of
`JobSpec.labels`."""


class LabelColumns:
    """The likeliest label, which is also the text, and the probabilities of all.

    Args:
        labels: see `JobSpec.labels`.
        values: see `JobSpec.label_values`.
    """

    raw_fields = (LOGPROBS_FIELD,)
    counted = ("label",)

    def __init__(self, labels: Mapping[str, str], values: Mapping[str, float]) -> None:
        self._labels, self._values = list(labels), values
        score = [pa.field("score", pa.float64())] if values else []
        self.averaged = ("probability", *(field.name for field in score))
        self.fields = (
            pa.field("label", pa.string()),
            pa.field("probability", pa.float64()),
            pa.field("probabilities", pa.struct([(label, pa.float64()) for label in labels])),
            pa.field("logit_margin", pa.float64()),
            *score,
        )

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        raw = outputs[LOGPROBS_FIELD.name].combine_chunks()
        is_wrong = pc.or_(raw.is_null(), outputs["error"].combine_chunks().is_valid())
        is_missing = is_wrong.to_numpy(zero_copy_only=False)
        logprobs = np.zeros((len(raw), len(self._labels)))
        given = raw.filter(pc.invert(is_wrong)).flatten().to_numpy()
        logprobs[~is_missing] = given.reshape(-1, len(self._labels))
        probabilities = label_probabilities(logprobs)
        best = probabilities.argmax(axis=1)
        ascending = np.sort(logprobs, axis=1)[:, -2:]

        def column(values: npt.NDArray[np.float64]) -> pa.Array:
            return pa.array(values, pa.float64(), mask=is_missing)

        each = [pa.array(values) for values in probabilities.T]
        label = pa.array(np.array(self._labels, dtype=object)[best], mask=is_missing)
        columns = {
            "generated_text": label,
            "label": label,
            "probability": column(probabilities.max(axis=1)),
            "probabilities": pa.StructArray.from_arrays(
                each, names=self._labels, mask=pa.array(is_missing)
            ),
            "logit_margin": column(ascending[:, 1] - ascending[:, 0]),
        }
        if self._values:
            values = np.array([self._values[label] for label in self._labels])
            columns["score"] = column(probabilities @ values)
        return columns

    def fault(self, text: str, raw: Mapping[str, Any]) -> str | None:
        logprobs = raw[LOGPROBS_FIELD.name]
        if math.isfinite(max(logprobs)) and not any(map(math.isnan, logprobs)):
            return None
        return "not_finite: the model gives the labels no probabilities"


def label_probabilities(logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Probabilities among the labels, which add up to 1: float64 [num_rows, num_labels].

    Args:
        logprobs: float64 [num_rows, num_labels], of the labels in the whole vocabulary.
    """
    weights = np.exp(logprobs - logprobs.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
