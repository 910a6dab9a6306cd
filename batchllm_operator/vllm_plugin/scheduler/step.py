"""What the prefill of one step may take and took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
    num_used_blocks: int = 0

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
        """Count `num_tokens` of a prompt, from token `begin`."""
        num_prefix = max(0, min(begin + num_tokens, num_prefix_tokens) - begin)
        self.num_prefix_tokens += num_prefix
        self.num_distinct_tokens += num_tokens - num_prefix
