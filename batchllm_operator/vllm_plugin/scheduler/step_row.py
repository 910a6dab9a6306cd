"""A step of the scheduler in numbers; what keeps them is in `trace.py`, which needs pyarrow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step. Counts are taken when it has been put together, before it runs."""

    step: int
    start_s: float
    """Since the first step, when scheduling began."""
    scheduling_s: float
    num_decode_tokens: int
    num_distinct_tokens: int
    """Prompt tokens behind their group's prefix, and whatever a preempted request had."""
    num_prefix_tokens: int
    """Prompt tokens of a group's prefix."""
    num_cached_tokens: int
    """Tokens that requests admitted in this step found computed."""
    num_scheduled: int
    """Requests with tokens in the step."""
    num_running: int
    num_waiting: int
    num_preempted: int
    num_used_blocks: int
    num_held_blocks: int
    """Of those, held for future members of groups without a running one."""
    num_blocks: int
    """Of the KV cache."""


def in_valley(
    num_tokens: NDArray[Any], num_waiting: NDArray[Any], chunk_size: int
) -> NDArray[np.bool_]:
    """Which steps are valleys: less than half of the chunk size while requests wait (Fig. 2).

    Args:
        num_tokens: of each step, [num_steps].
        num_waiting: requests left waiting when the step was put together, [num_steps].
        chunk_size: most tokens of a step.
    """
    is_valley: NDArray[np.bool_] = (2 * num_tokens < chunk_size) & (num_waiting > 0)
    return is_valley
