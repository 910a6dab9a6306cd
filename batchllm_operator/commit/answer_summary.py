"""What the answers of a run are as a whole: rows by label, mean probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.answers import Answers, PlannedAnswers
from batchllm_operator.shards.buckets import Outputs, read_all
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
    spec: JobSpec, planned: PlannedAnswers, sources: Sequence[Outputs]
) -> AnswerSummary:
    """Count and average the answers of `sources`, each for the rows that its request stands for.

    Memory is one part. Empty if the job asks for nothing that can be counted or averaged.
    """
    answers = Answers.of(spec, planned).over(partial(read_all, sources))
    counts = {name: Counter[str]() for kind in answers.kinds for name in kind.counted}
    means = {name: _Mean() for kind in answers.kinds for name in kind.averaged}
    texts = Counter[str]()
    names = ["row_idxs", "generated_text", "error", *(field.name for field in answers.raw_fields)]
    for part in read_all(sources, names) if counts or means else ():
        answered = part.filter(pc.is_null(part["error"]))
        if not answered.num_rows:
            continue
        num_rows = pc.list_value_length(answered["row_idxs"]).to_numpy().astype(np.int64)
        if spec.task == "classify":  # texts are single tokens, so there are few
            texts.update(_rows_by_value(answered["generated_text"], num_rows))
        columns = {"generated_text": answered["generated_text"], **answers.columns(answered)}
        for name, counter in counts.items():
            counter.update(_rows_by_value(columns[name], num_rows))
        for name, mean in means.items():
            mean.add(columns[name], num_rows)
    known = {name: mean.value for name, mean in means.items() if mean.value is not None}
    remarks = {k: v for kind in answers.kinds for k, v in kind.remarks(known, texts).items()}
    most_frequent = {name: _most_frequent(counter) for name, counter in counts.items()}
    return AnswerSummary(counts=most_frequent, means=known, **remarks)


def _rows_by_value(
    column: pa.Array | pa.ChunkedArray, num_rows: npt.NDArray[np.int64]
) -> dict[str, int]:
    rows = pa.table({"value": column, "rows": num_rows}).group_by("value")
    sums = rows.aggregate([("rows", "sum")])
    return dict(zip(sums["value"].to_pylist(), sums["rows_sum"].to_pylist(), strict=True))


def _most_frequent(counter: Counter[str]) -> dict[str, int]:
    chosen = sorted(counter, key=lambda value: (-counter[value], value))[:_MOST_VALUES]
    return {value: counter[value] for value in chosen}
