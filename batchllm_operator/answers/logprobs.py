"""Log-probabilities of the tokens that were generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

TOKENS_FIELD: Final = pa.field("token_logprobs", pa.list_(pa.float64()))
"""Of each token of the answer, in its order."""
_TOKEN: Final = pa.struct([("token", pa.string()), ("logprob", pa.float64())])
TOP_FIELD: Final = pa.field("top_logprobs", pa.list_(pa.list_(_TOKEN)))
"""Of the likeliest tokens in each place, the likeliest first."""
MEAN_FIELD: Final = pa.field("mean_logprob", pa.float64())


class LogprobColumns:
    """Log-probabilities of the answer's tokens, and their mean: null for an answer without any.

    Args:
        num_top: likeliest tokens for each place.
    """

    counted = ()
    averaged = (MEAN_FIELD.name,)

    def __init__(self, num_top: int) -> None:
        self.raw_fields = (TOKENS_FIELD, TOP_FIELD) if num_top else (TOKENS_FIELD,)
        self.fields = (MEAN_FIELD, *self.raw_fields)

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        tokens = outputs[TOKENS_FIELD.name].combine_chunks()
        values = pa.table({"row": pc.list_parent_indices(tokens), "each": pc.list_flatten(tokens)})
        means = values.group_by("row", use_threads=False).aggregate([("each", "mean")])
        rows = pa.array(range(len(tokens)), means["row"].type)
        mean = means["each_mean"].combine_chunks().take(pc.index_in(rows, means["row"]))
        kept = {field.name: outputs[field.name] for field in self.raw_fields}
        return {MEAN_FIELD.name: mean, **kept}

    def fault(self, text: str, raw: Mapping[str, Any]) -> str | None:
        return None
