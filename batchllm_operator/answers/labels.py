"""Labels with probabilities, and a score; how much of the model's probability the labels hold."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.amounts import counted, first_of
from batchllm_operator.answers import fakes
from batchllm_operator.answers.kind import AnswerKind, FakePrompt, Parts, PlannedAnswers
from batchllm_operator.errors import SpecError
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import JobSpec

if TYPE_CHECKING:
    from batchllm_operator.prompts import Tokenizer

LOW_MASS: Final = 0.1
"""Below this mean of `label_mass`, the model would mostly write something else than a label."""
LOGPROBS_FIELD: Final = pa.field("label_logprobs", pa.list_(pa.float64()))
"""Log-probabilities of the labels' tokens in the model's whole vocabulary, in the order of
`JobSpec.labels`."""
_MOST_NAMED: Final = 5
_MOST_WRITTEN: Final = 3
_MOST_CHARS: Final = 40
_NUM_SHOWN_TOKENS: Final = 8
_NUM_FIRST: Final = 64
_BITS: Final = 52
_DIGITS: Final = 6
_Floats = npt.NDArray[np.float64]
_log = logging.getLogger(__name__)


class LabelAnswers(AnswerKind):
    """The likeliest label, which is also the text, and the probabilities of all."""

    raw_fields = (LOGPROBS_FIELD,)
    counted = ("label",)

    def __init__(self, spec: JobSpec, planned: PlannedAnswers) -> None:
        super().__init__(spec, planned)
        self._labels, self._values = list(spec.labels), spec.label_values
        self._prior: Sequence[float] | None = None
        number = pa.float64()
        shares = pa.struct([(label, number) for label in self._labels])
        kinds = {"label": pa.string(), "probability": number, "probabilities": shares}
        kinds |= {"logit_margin": number, "label_mass": number}
        kinds |= {"raw_probabilities": shares} if spec.calibrate else {}
        kinds |= {"score": number} if self._values else {}
        self.fields = tuple(pa.field(name, kind) for name, kind in kinds.items())
        self.averaged = ("probability", "label_mass", *(["score"] if self._values else []))

    @classmethod
    def is_asked(cls, spec: JobSpec) -> bool:
        return spec.task == "classify"

    @classmethod
    def plan(cls, spec: JobSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """The token of each label's answer, which depends on the end of the prompt.

        A SpecError refuses answers that aren't one token, or are the same one.
        """
        from batchllm_operator.prompts import sample_chat  # only plans need it

        sample = tokenizer.renderer(spec.prompt).render(sample_chat(spec.prompt))
        for error in sample.errors.values():
            raise SpecError(f"labels: can't be tried after a message of a user: {error}")
        (prompt,) = sample.present()
        answers = tokenizer.answer_tokens(prompt, list(spec.labels.values()))
        _check_whole(spec, answers, tokenizer)
        labels: dict[int, str] = {}
        for label, (token_id,) in zip(spec.labels, answers, strict=True):
            if (other := labels.setdefault(token_id, label)) != label:
                raise SpecError(
                    f"labels: {other!r} and {label!r} begin with the same token"
                    f" ({tokenizer.decode([token_id])!r}) under this model's tokenizer, so one step"
                    " can't tell them apart; give them answers that begin differently, such as"
                    " numbers"
                )
        end = tokenizer.decode(tokenizer.encode([prompt]).to_lists()[0][-_NUM_SHOWN_TOKENS:])
        named = [f"{answer!r} ({label})" for label, answer in spec.labels.items()]
        first = first_of(named, _MOST_NAMED)
        _log.info("labels: after %r, the model's next token is judged: %s", end, first)
        return {"label_token_ids": tuple(labels)}

    def over(self, parts: Parts) -> Self:
        """With the mean probability of each label over all rows that have one, to calibrate by.

        Memory is one part. How rows are cut into parts and shards doesn't change the numbers.
        """
        if self._spec.calibrate is None:
            return self
        sums, num_all = [0] * len(self._labels), 0
        for part in parts(["row_idxs", "error", LOGPROBS_FIELD.name]):
            is_answered, logprobs = self._logprobs(part)
            row_idxs = part["row_idxs"].combine_chunks().filter(pa.array(is_answered))
            num_rows = pc.list_value_length(row_idxs).to_numpy().astype(np.int64)
            added = _exact_sums(label_probabilities(logprobs), num_rows)
            sums = [a + b for a, b in zip(sums, added, strict=True)]
            num_all += int(num_rows.sum())
        calibrating = copy(self)
        if num_all:
            calibrating._prior = tuple(total / (num_all << _BITS) for total in sums)
        return calibrating

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        is_answered, own = self._logprobs(outputs)
        logprobs = own
        if self._spec.calibrate is not None and len(own):
            assert self._prior is not None, "the labels' prior isn't known yet"
            logprobs = calibrated(own, self._prior)

        def struct(probabilities: _Floats) -> pa.Array:
            return pa.StructArray.from_arrays(list(probabilities.T), names=self._labels)

        probabilities, ascending = label_probabilities(logprobs), np.sort(logprobs, axis=1)
        values = np.array([self._values.get(label, 0.0) for label in self._labels])
        columns = {
            "label": pa.array(self._labels).take(pa.array(probabilities.argmax(axis=1))),
            "probability": pa.array(probabilities.max(axis=1)),
            "probabilities": struct(probabilities),
            "logit_margin": pa.array(ascending[:, -1] - ascending[:, -2]),
            "label_mass": pa.array(label_mass(own)),
            "raw_probabilities": struct(label_probabilities(own)),
            "score": pa.array(probabilities @ values),
        }
        rows = pa.array(np.cumsum(is_answered) - 1, mask=~is_answered)
        chosen = {field.name: columns[field.name].take(rows) for field in self.fields}
        return {"generated_text": chosen["label"], **chosen}

    def fault(self, text: str, raw: Mapping[str, Any]) -> RowError | None:
        logprobs = raw[LOGPROBS_FIELD.name]
        if math.isfinite(max(logprobs)) and not any(map(math.isnan, logprobs)):
            return None
        return RowError("not_finite", "the model gives the labels no probabilities")

    def read(self, output: Any) -> dict[str, Any]:
        known, token_ids = output.outputs[0].logprobs[0], self._planned.label_token_ids
        return {LOGPROBS_FIELD.name: [known[token_id].logprob for token_id in token_ids]}

    def fake(self, prompt: FakePrompt) -> dict[str, Any]:
        return {LOGPROBS_FIELD.name: fakes.fake_logprobs(prompt.token_ids, len(self._labels))}

    def watch(self) -> LabelMass:
        """What watches the answers of a run."""
        return LabelMass(self._spec)

    def remarks(self, means: Mapping[str, float], texts: Counter[str]) -> dict[str, Any]:
        remarks: dict[str, Any] = {}
        if self._prior is not None:
            prior = zip(self._labels, self._prior, strict=True)
            remarks["prior"] = {label: round(mean, _DIGITS) for label, mean in prior}
        mass = means.get("label_mass")
        if mass is not None and (warning := low_mass_warning(self._spec, mass, texts)):
            remarks["warnings"] = (warning,)
        return remarks

    def _logprobs(self, outputs: pa.Table) -> tuple[npt.NDArray[np.bool_], _Floats]:
        """Which rows have a label ([num_rows]), and their log-probabilities:
        float64 [num_answered, num_labels]."""
        raw, errors = (outputs[name].combine_chunks() for name in (LOGPROBS_FIELD.name, "error"))
        is_answered = pc.and_(raw.is_valid(), errors.is_null())
        known = raw.filter(is_answered).flatten().to_numpy().reshape(-1, len(self._labels))
        return np.asarray(is_answered.to_numpy(zero_copy_only=False)), np.asarray(known)


class LabelMass:
    """The mean `label_mass` of the answers so far; warns early if it is low, once."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec, self._sum, self._num = spec, 0.0, 0
        self._written = Counter[str]()
        self._has_judged = False

    @property
    def note(self) -> str:
        """For a progress line."""
        return f", labels hold {self._sum / self._num:.2g} of the probability" if self._num else ""

    def count(self, text: str, raw: Mapping[str, Any]) -> None:
        """Count an answer without an error; judges once enough answers have come."""
        mass = float(label_mass(np.array([raw[LOGPROBS_FIELD.name]]))[0])
        if np.isfinite(mass):
            self._sum, self._num = self._sum + mass, self._num + 1
            self._written[text] += not self._has_judged
        if self._num == _NUM_FIRST:
            self.judge()

    def judge(self) -> None:
        """Warn, if the answers so far are doubtful; once."""
        if self._has_judged or not self._num:
            return
        self._has_judged = True
        mean = self._sum / self._num
        if warning := low_mass_warning(self._spec, mean, self._written):
            _log.warning("the first %s: %s", counted(self._num, "answer"), warning)


def calibrated(logprobs: _Floats, prior: Sequence[float]) -> _Floats:
    """Log-probabilities of labels divided by their prior, which adds up to 1; shapes as `logprobs`.

    With the prior of a table this is batch calibration (Zhou et al. 2023, arXiv 2309.17249). A
    label whose prior is 0 stays impossible.
    """
    known = np.array(prior) > 0
    shift = np.log(np.where(known, prior, 1.0))
    return np.where(known, logprobs - shift, -np.inf)


def label_probabilities(logprobs: _Floats) -> _Floats:
    """Probabilities among the labels, which add up to 1: float64 [num_rows, num_labels].

    `logprobs` are those of the labels in the whole vocabulary: float64 [num_rows, num_labels].
    """
    weights = np.exp(logprobs - logprobs.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def label_mass(logprobs: _Floats) -> _Floats:
    """The labels' share of the model's probability, 0 to 1: float64 [num_rows]."""
    return np.asarray(np.minimum(np.exp(logprobs).sum(axis=1), 1.0))


def low_mass_warning(spec: JobSpec, mean_mass: float, written: Counter[str]) -> str | None:
    """What a mean `label_mass` below `LOW_MASS` says of a job, and its cures; None above.

    `written` says how often each token would have been the model's own answer.
    """
    if mean_mass >= LOW_MASS:
        return None
    answers = [repr(answer) for answer in spec.labels.values()]
    often = sorted(written, key=lambda text: (-written[text], text))[:_MOST_WRITTEN]
    likeliest = " or ".join(repr(text[:_MOST_CHARS]) for text in often)
    cures = [
        "ask for exactly these answers in the prompt",
        "give labels the answers that the model would write (capitals, or a space first)",
    ]
    if spec.prompt.chat_template and spec.prompt.answer_prefix is None:
        cures.append("begin the answer with prompt.answer_prefix, such as 'Category:'")
    elif not spec.prompt.chat_template:
        cures.append("end the template where the answer begins, such as with 'Category:'")
        cures.append("set prompt.chat_template for a model that is made for chats")
    return (
        f"labels: all together hold {mean_mass:.2g} of the model's probability (mean label_mass;"
        f" below {LOW_MASS}), so it would mostly write something else (most often {likeliest}),"
        " and label, probability and score say little. Answers are"
        f" {first_of(answers, _MOST_NAMED)}. To cure it, {'; or '.join(cures)}"
    )


def _exact_sums(probabilities: _Floats, num_rows: npt.NDArray[np.int64]) -> Iterator[int]:
    """Sums of columns in units of 2**-52, weighted by rows.

    Whole numbers add up to the same in any order, and in two halves they don't overflow.
    """
    units = (probabilities * 2.0**_BITS).astype(np.int64)
    high, low = (
        (half * num_rows[:, np.newaxis]).sum(axis=0) for half in np.divmod(units, 1 << _BITS // 2)
    )
    for upper, lower in zip(high.tolist(), low.tolist(), strict=True):
        yield (upper << _BITS // 2) + lower


def _check_whole(spec: JobSpec, tokens: list[list[int]], tokenizer: Tokenizer) -> None:
    """Refuse answers of several tokens: the first alone, such as `ir`, isn't the answer."""
    wrong = []
    for (label, answer), token_ids in zip(spec.labels.items(), tokens, strict=True):
        if not token_ids:
            raise SpecError(f"labels: the tokenizer makes no tokens of {label!r} ({answer!r})")
        if len(token_ids) > 1:
            pieces = " + ".join(repr(tokenizer.decode([token_id])) for token_id in token_ids)
            wrong.append(f"{label!r} is answered by {answer!r}, which is {pieces}")
    if wrong:
        raise SpecError(
            f"labels: {first_of(wrong, _MOST_NAMED, '; ')}. One step gives the probability of one"
            " token under this model's tokenizer, so give each label an answer of one token:"
            " labels: {LABEL: ANSWER}, such as letters or numbers that the prompt asks for, or the"
            " word with a space first; or the first piece itself, if that is what should count"
        )
