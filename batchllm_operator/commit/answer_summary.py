"""What the answers of a run are as a whole: rows by label, mean probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.answers import Answers
from batchllm_operator.answers.labels import low_mass_warning
from batchllm_operator.commit.label_prior import find_label_prior
from batchllm_operator.shards.buckets import Outputs
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.run_report import AnswerSummary

_MOST_VALUES: Final = 128
_DIGITS: Final = 6


class _Mean:
    """A mean of finite numbers, weighted by rows."""

    def __init__(self) -> None:
        self._sum, self._num_rows = 0.0, 0

    def add(self, column: pa.Array | pa.ChunkedArray, num_rows: npt.NDArray[np.int64]) -> None:
        values = column.to_numpy(zero_copy_only=False)  # null becomes NaN
        known = np.isfinite(values)
        self._sum += float(values[known] @ num_rows[known])
        self._num_rows += int(num_rows[known].sum())

    @property
    def value(self) -> float | None:
        return round(self._sum / self._num_rows, _DIGITS) if self._num_rows else None


def summarize_answers(
    spec: JobSpec, sources: Sequence[Outputs], embedding_size: int | None = None
) -> AnswerSummary | None:
    """Count and average the answers of `sources`, each for the rows that its request stands for.

    Memory is one part. None if the job asks for nothing that can be counted or averaged.

    Args:
        embedding_size: the plan's, if the answers are embeddings.
    """
    if embedding_size is not None:
        return AnswerSummary(embedding_size=embedding_size)
    prior = find_label_prior(spec, sources)
    answers = Answers.of(spec, label_prior=prior)
    counts = {name: Counter[str]() for kind in answers.summarized for name in kind.counted}
    means = {name: _Mean() for kind in answers.summarized for name in kind.averaged}
    if not counts and not means:
        return None
    written = Counter[str]()
    names = ["row_idxs", "generated_text", "error", *(field.name for field in answers.raw_fields)]
    for source in sources:
        for part in source.parts(names):
            answered = part.filter(pc.is_null(part["error"]))
            if not answered.num_rows:
                continue
            num_rows = pc.list_value_length(answered["row_idxs"]).to_numpy().astype(np.int64)
            if "label_mass" in means:
                written.update(_rows_by_value(answered["generated_text"], num_rows))
            columns = {"generated_text": answered["generated_text"], **answers.columns(answered)}
            for name, found in counts.items():
                found.update(_rows_by_value(columns[name], num_rows))
            for name, mean in means.items():
                mean.add(columns[name], num_rows)
    known = {name: mean.value for name, mean in means.items() if mean.value is not None}
    mass = known.get("label_mass")
    warning = None if mass is None else low_mass_warning(spec, mass, written)
    return AnswerSummary(
        counts={name: _most_frequent(found) for name, found in counts.items()},
        means=known,
        prior=dict(zip(spec.labels, (round(each, _DIGITS) for each in prior), strict=True))
        if prior is not None
        else {},
        warnings=() if warning is None else (warning,),
    )


def _rows_by_value(
    column: pa.Array | pa.ChunkedArray, num_rows: npt.NDArray[np.int64]
) -> dict[str, int]:
    rows = pa.table({"value": column, "rows": num_rows}).group_by("value")
    found = rows.aggregate([("rows", "sum")])
    return dict(zip(found["value"].to_pylist(), found["rows_sum"].to_pylist(), strict=True))


def _most_frequent(found: Counter[str]) -> dict[str, int]:
    chosen = sorted(found, key=lambda value: (-found[value], value))[:_MOST_VALUES]
    return {value: found[value] for value in chosen}
