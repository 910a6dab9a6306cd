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


def summarize_answers(
    spec: JobSpec, planned: PlannedAnswers, sources: Sequence[Outputs]
) -> AnswerSummary:
    """Count and average the answers of `sources`, each for the rows that its request stands for.

    Memory is one part. Empty if the job asks for nothing that can be counted or averaged.
    """
    answers = Answers.of(spec, planned).over(partial(read_all, sources))
    counts = {name: Counter[str]() for kind in answers.kinds for name in kind.counted}
    # Sum of finite numbers, and the rows that have one.
    sums = {name: np.zeros(2) for kind in answers.kinds for name in kind.averaged}
    texts = Counter[str]()
    names = ["row_idxs", "generated_text", "error", *(field.name for field in answers.raw_fields)]
    for part in read_all(sources, names) if counts or sums else ():
        answered = part.filter(pc.is_null(part["error"]))
        if not answered.num_rows:
            continue
        num_rows = pc.list_value_length(answered["row_idxs"]).to_numpy().astype(np.int64)
        if spec.task == "classify":  # texts are single tokens, so there are few
            texts.update(_rows_by_value(answered["generated_text"], num_rows))
        columns = {"generated_text": answered["generated_text"], **answers.columns(answered)}
        for name, counter in counts.items():
            counter.update(_rows_by_value(columns[name], num_rows))
        for name, total in sums.items():
            values = columns[name].to_numpy(zero_copy_only=False)  # null becomes NaN
            finite = np.isfinite(values)
            total += values[finite] @ num_rows[finite], num_rows[finite].sum()
    means = {name: round(float(s / n), _DIGITS) for name, (s, n) in sums.items() if n}
    remarks = {k: v for kind in answers.kinds for k, v in kind.remarks(means, texts).items()}
    most_frequent = {name: _most_frequent(counter) for name, counter in counts.items()}
    return AnswerSummary(counts=most_frequent, means=means, **remarks)


def _rows_by_value(
    column: pa.Array | pa.ChunkedArray, num_rows: npt.NDArray[np.int64]
) -> dict[str, int]:
    rows = pa.table({"value": column, "rows": num_rows}).group_by("value")
    sums = rows.aggregate([("rows", "sum")])
    return dict(zip(sums["value"].to_pylist(), sums["rows_sum"].to_pylist(), strict=True))


def _most_frequent(counter: Counter[str]) -> dict[str, int]:
    chosen = sorted(counter, key=lambda value: (-counter[value], value))[:_MOST_VALUES]
    return {value: counter[value] for value in chosen}
