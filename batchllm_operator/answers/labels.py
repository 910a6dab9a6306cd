"""Labels with probabilities, and a score; how much of the model's probability the labels hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.spec import JobSpec

LOW_MASS: Final = 0.1
"""Below this mean of `label_mass`, the model would mostly write something else than a label."""
_MOST_NAMED: Final = 5
_MOST_WRITTEN: Final = 3
_MOST_CHARS: Final = 40
LOGPROBS_FIELD: Final = pa.field("label_logprobs", pa.list_(pa.float64()))
"""Log-probabilities of the labels' tokens in the model's whole vocabulary, in the order of
`JobSpec.labels`."""


class LabelColumns:
    """The likeliest label, which is also the text, and the probabilities of all.

    Args:
        spec: a job's that classifies.
        prior: where it calibrates, the mean probability of each label over the table, for
            `columns`.
    """

    raw_fields = (LOGPROBS_FIELD,)
    counted = ("label",)

    def __init__(self, spec: JobSpec, prior: Sequence[float] | None = None) -> None:
        self._labels, self._values = list(spec.labels), spec.label_values
        self._is_calibrated, self._prior = spec.calibrate is not None, prior
        each = pa.struct([(label, pa.float64()) for label in self._labels])
        raw = [pa.field("raw_probabilities", each)] if self._is_calibrated else []
        score = [pa.field("score", pa.float64())] if self._values else []
        self.averaged = ("probability", "label_mass", *(field.name for field in score))
        self.fields = (
            pa.field("label", pa.string()),
            pa.field("probability", pa.float64()),
            pa.field("probabilities", each),
            pa.field("logit_margin", pa.float64()),
            pa.field("label_mass", pa.float64()),
            *raw,
            *score,
        )

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        is_answered = has_labels(outputs)
        logprobs = np.zeros((len(is_answered), len(self._labels)))
        logprobs[is_answered] = label_logprobs(outputs, len(self._labels))
        raw, mass = label_probabilities(logprobs), label_mass(logprobs)
        if self._is_calibrated and is_answered.any():
            assert self._prior is not None, "the labels' prior isn't known yet"
            logprobs = calibrated(logprobs, self._prior)
        probabilities = label_probabilities(logprobs)
        best = probabilities.argmax(axis=1)
        ascending = np.sort(logprobs, axis=1)[:, -2:]
        is_missing = ~is_answered

        def column(values: npt.NDArray[np.float64]) -> pa.Array:
            return pa.array(values, pa.float64(), mask=is_missing)

        def struct(values: npt.NDArray[np.float64]) -> pa.Array:
            each = [pa.array(column) for column in values.T]
            return pa.StructArray.from_arrays(each, names=self._labels, mask=pa.array(is_missing))

        label = pa.array(np.array(self._labels, dtype=object)[best], mask=is_missing)
        columns = {
            "generated_text": label,
            "label": label,
            "probability": column(probabilities.max(axis=1)),
            "probabilities": struct(probabilities),
            "logit_margin": column(ascending[:, 1] - ascending[:, 0]),
            "label_mass": column(mass),
        }
        if self._is_calibrated:
            columns["raw_probabilities"] = struct(raw)
        if self._values:
            values = np.array([self._values[label] for label in self._labels])
            columns["score"] = column(probabilities @ values)
        return columns

    def fault(self, text: str, raw: Mapping[str, Any]) -> str | None:
        logprobs = raw[LOGPROBS_FIELD.name]
        if math.isfinite(max(logprobs)) and not any(map(math.isnan, logprobs)):
            return None
        return "not_finite: the model gives the labels no probabilities"


def has_labels(outputs: pa.Table) -> npt.NDArray[np.bool_]:
    """Which rows of parts have log-probabilities of labels, and no error: [num_rows]."""
    raw, errors = (outputs[name].combine_chunks() for name in (LOGPROBS_FIELD.name, "error"))
    return np.asarray(pc.and_(raw.is_valid(), errors.is_null()).to_numpy(zero_copy_only=False))


def label_logprobs(outputs: pa.Table, num_labels: int) -> npt.NDArray[np.float64]:
    """Of the rows that `has_labels`: float64 [num_answered, num_labels]."""
    answered = outputs[LOGPROBS_FIELD.name].combine_chunks().filter(pa.array(has_labels(outputs)))
    return np.asarray(answered.flatten().to_numpy().reshape(-1, num_labels))


def calibrated(
    logprobs: npt.NDArray[np.float64], prior: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Log-probabilities of labels divided by their prior: float64 [num_rows, num_labels].

    With the prior of a table this is batch calibration (Zhou et al. 2023, arXiv 2309.17249),
    which takes the mean over the texts themselves where contextual calibration takes a text
    without content (Zhao et al. 2021, arXiv 2102.09690). A label whose prior is 0 stays impossible.

    Args:
        logprobs: see `label_probabilities`.
        prior: mean probabilities of the labels, which add up to 1.
    """
    known = np.array(prior) > 0
    shift = np.log(np.where(known, prior, 1.0))
    return np.where(known, logprobs - shift, -np.inf)


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


def low_mass_warning(spec: JobSpec, mean_mass: float, written: Counter[str]) -> str | None:
    """What a mean `label_mass` below `LOW_MASS` says of a job, and its cures; None above.

    Args:
        written: how often each token would have been the model's own answer.
    """
    if mean_mass >= LOW_MASS:
        return None
    answers = [repr(answer) for answer in spec.labels.values()]
    more = f" and {len(answers) - _MOST_NAMED} more" if len(answers) > _MOST_NAMED else ""
    often = sorted(written, key=lambda text: (-written[text], text))[:_MOST_WRITTEN]
    likeliest = " or ".join(repr(text[:_MOST_CHARS]) for text in often)
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
        f" below {LOW_MASS}), so it would mostly write something else (most often {likeliest}),"
        " and label, probability and score say little. Answers are"
        f" {', '.join(answers[:_MOST_NAMED])}{more}. To cure it, {'; or '.join(cures)}"
    )
