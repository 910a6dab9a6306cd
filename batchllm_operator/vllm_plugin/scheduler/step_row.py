"""Numbers of a scheduler step; `trace.py`, which needs pyarrow, writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step, counted after it has been scheduled and before it runs."""

    step: int
    start_s: float
    """When scheduling began, since the first step."""
    scheduling_s: float
    num_decode_tokens: int
    num_distinct_tokens: int
    """Prompt tokens after their group's prefix, and recomputed tokens of preempted requests."""
    num_prefix_tokens: int
    """Prompt tokens of a group's prefix."""
    num_cached_tokens: int
    """Tokens of requests admitted in this step that were in the cache."""
    num_scheduled: int
    """Requests with tokens in the step."""
    num_running: int
    num_waiting: int
    num_preempted: int
    num_used_blocks: int
    num_held_blocks: int
    """Used blocks held for future members of groups without a running one."""
    num_blocks: int
    """Blocks of the KV cache."""


def in_valley(
    num_tokens: NDArray[Any], num_waiting: NDArray[Any], chunk_size: int
) -> NDArray[np.bool_]:
    """Whether each step is a valley: under half of the chunk size while requests wait (Fig. 2).

    Args:
        num_tokens: of each step, [num_steps].
        num_waiting: requests still waiting after the step was scheduled, [num_steps].
        chunk_size: most tokens of a step.
    """
    is_valley: NDArray[np.bool_] = (2 * num_tokens < chunk_size) & (num_waiting > 0)
    return is_valley
