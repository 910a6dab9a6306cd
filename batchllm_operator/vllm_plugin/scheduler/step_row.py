"""The state and the numbers of a scheduler step; `trace.py`, which needs pyarrow, writes these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class StepState:
    """The prefill, admissions and preemptions of one step."""

    prefill_budget: int
    """Prompt tokens that the step may compute."""
    later_prefill_budget: int
    """Prompt tokens that each later step may compute."""
    budget: int = 0
    """What of `prefill_budget` no request has yet."""
    prefilled: dict[str, int] = field(default_factory=dict)
    """Tokens that each prefilling request will have computed after the step, by id."""
    num_prefill_ahead: int = 0
    """Tokens that running requests, and those admitted so far, have yet to prefill."""
    admitted: list[Request] = field(default_factory=list)
    num_preempted: int = 0
    num_distinct_tokens: int = 0
    """Prompt tokens computed after their group's prefix."""
    num_prefix_tokens: int = 0
    """Prompt tokens computed of prefixes."""
    num_cached_tokens: int = 0
    """Tokens of admitted requests that were in the cache."""

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that the step computes."""
        return self.num_distinct_tokens + self.num_prefix_tokens

    def prefill(self, request: Request, num_tokens: int, most: int) -> None:
        """Give a request what is left of the budget for `num_tokens` of its prompt.

        Args:
            most: most tokens of a prompt in a step; 0 for no limit.
        """
        given = min(num_tokens, most or num_tokens, self.budget)
        self.budget -= given
        self.prefilled[request.request_id] = request.num_tokens - num_tokens + given

    def count_prefill(self, begin: int, num_tokens: int, num_prefix_tokens: int) -> None:
        """Count `num_tokens` of a prompt, from token `begin`, by what they share."""
        num_prefix = max(0, min(begin + num_tokens, num_prefix_tokens) - begin)
        self.num_prefix_tokens += num_prefix
        self.num_distinct_tokens += num_tokens - num_prefix


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
