"""Labels with probabilities, and a score; how much of the model's probability the labels hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.spec import JobSpec

LOW_MASS: Final = 0.1
"""Below this mean of `label_mass`, the model would mostly write something else than a label."""
_MOST_NAMED: Final = 5
LOGPROBS_FIELD: Final = pa.field("label_logprobs", pa.list_(pa.float64()))
"""Log-probabilities of the labels' tokens in the model's whole vocabulary, in the order of
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
        self.averaged = ("probability", "label_mass", *(field.name for field in score))
        self.fields = (
            pa.field("label", pa.string()),
            pa.field("probability", pa.float64()),
            pa.field("probabilities", pa.struct([(label, pa.float64()) for label in labels])),
            pa.field("logit_margin", pa.float64()),
            pa.field("label_mass", pa.float64()),
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
            "label_mass": column(label_mass(logprobs)),
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


def label_mass(logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The labels' share of the model's probability, 0 to 1: float64 [num_rows].

    Args:
        logprobs: see `label_probabilities`.
    """
    return np.asarray(np.minimum(np.exp(logprobs).sum(axis=1), 1.0))


def low_mass_warning(spec: JobSpec, mean_mass: float) -> str | None:
    """What a mean `label_mass` below `LOW_MASS` says of a job, and its cures; None above."""
    if mean_mass >= LOW_MASS:
        return None
    answers = [repr(answer) for answer in spec.labels.values()]
    more = f" and {len(answers) - _MOST_NAMED} more" if len(answers) > _MOST_NAMED else ""
    prompt = spec.prompt
    cures = [
        "ask for exactly these answers in the prompt",
        "give labels the answers that the model would write (capitals, or a space first)",
    ]
    if prompt.chat_template and prompt.answer_prefix is None:
        cures.append("begin the answer with prompt.answer_prefix, such as 'Category:'")
    elif not prompt.chat_template:
        cures.append("end the template where the answer begins, such as with 'Category:'")
        cures.append("set prompt.chat_template for a model that is made for chats")
    return (
        f"labels: all together hold {mean_mass:.2g} of the model's probability (mean label_mass;"
        f" below {LOW_MASS}), so it would mostly write something else, and label, probability and"
        f" score say little. Answers are {', '.join(answers[:_MOST_NAMED])}{more}. To cure it,"
        f" {'; or '.join(cures)}"
    )
