"""How probable each label is on average over a table, by which its rows are calibrated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.answers.labels import (
    LOGPROBS_FIELD,
    has_labels,
    label_logprobs,
    label_probabilities,
)
from batchllm_operator.shards.buckets import Outputs
from batchllm_operator.spec import JobSpec

_BITS: Final = 52


def find_label_prior(spec: JobSpec, sources: Sequence[Outputs]) -> tuple[float, ...] | None:
    """The mean probability of each label among the labels, over all rows that have one.

    Reads the log-probabilities of all parts; memory is one part. How rows are cut into parts and
    shards doesn't change the numbers.

    Returns:
        In the order of `spec.labels`; None if the job doesn't calibrate, or no row has a label.
    """
    if spec.calibrate is None:
        return None
    sums, num_all = [0] * len(spec.labels), 0
    for source in sources:
        for part in source.parts(["row_idxs", "error", LOGPROBS_FIELD.name]):
            probabilities = label_probabilities(label_logprobs(part, len(spec.labels)))
            row_idxs = part["row_idxs"].combine_chunks().filter(pa.array(has_labels(part)))
            num_rows = pc.list_value_length(row_idxs).to_numpy().astype(np.int64)
            sums = [a + b for a, b in zip(sums, _exact_sums(probabilities, num_rows), strict=True)]
            num_all += int(num_rows.sum())
    return tuple(each / (num_all << _BITS) for each in sums) if num_all else None


def _exact_sums(
    probabilities: npt.NDArray[np.float64], num_rows: npt.NDArray[np.int64]
) -> Iterator[int]:
    """Sums of columns in units of 2**-52, weighted by rows. Whole numbers add up to the same in any
    order, and in two halves they don't overflow."""
    units = (probabilities * 2.0**_BITS).astype(np.int64)
    high, low = (
        (half * num_rows[:, np.newaxis]).sum(axis=0) for half in np.divmod(units, 1 << _BITS // 2)
    )
    for upper, lower in zip(high.tolist(), low.tolist(), strict=True):
        yield (upper << _BITS // 2) + lower
