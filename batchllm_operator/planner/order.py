"""The order in which groups are scheduled (paper, Sec. 4.3.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.planner.reuse import PrefixGroups, group_prefill_tokens


def order_groups(
    groups: PrefixGroups,
    lengths: NDArray[np.int64],
    output_tokens: NDArray[np.integer[Any]],
) -> NDArray[np.int64]:
    """Puts groups that decode long after little prefill first, as Eq. 3 and 4 do.

    R = (mean of the members' estimated output tokens) / (prefix + sum of distinct tokens);
    larger R goes first, so that the long prefills later in the job meet decodes of earlier
    requests to share a token batch with. Eq. 4 takes the output length as constant and
    writes 1 for it: with equal estimates this is the order of Eq. 4 exactly. A group
    without any token to prefill has R = infinity.

    Groups of equal R keep the order in which they are given. From `maximize_reuse` that is
    the lexicographic rank of their first member, so the result doesn't depend on the order
    of the prompts.

    Args:
        groups: groups over prompts [0, num_prompts).
        lengths: [num_prompts] int64, tokens per prompt.
        output_tokens: [num_prompts] integers >= 0, estimated output tokens per prompt.

    Returns:
        [num_groups] int64, group indexes in scheduling order, for `PrefixGroups.take`.

    Raises:
        PlanError: the arrays don't fit each other, or an estimate is negative.
    """
    if output_tokens.shape != lengths.shape:
        raise PlanError(
            f"{len(lengths)} prompts need as many output estimates, not {len(output_tokens)}"
        )
    if output_tokens.dtype.kind not in "iu":
        raise PlanError(f"output estimates are token counts, not {output_tokens.dtype}")
    if len(output_tokens) and output_tokens.min() < 0:
        raise PlanError(f"prompt {int(np.argmax(output_tokens < 0))} has a negative estimate")
    prefill = group_prefill_tokens(groups, lengths)
    if len(prefill) == 0:
        return np.zeros(0, dtype=np.int64)
    outputs = output_tokens[groups.member_idxs].astype(np.int64)
    decode = np.add.reduceat(outputs, groups.offsets[:-1])
    ratio = np.full(len(prefill), np.inf)
    # One division: groups whose R is equal as a fraction get equal floats.
    np.divide(decode, prefill * groups.sizes, out=ratio, where=prefill > 0)
    return np.argsort(-ratio, kind="stable").astype(np.int64, copy=False)
