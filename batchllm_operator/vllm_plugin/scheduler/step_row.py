"""A row of a trace. The scheduler makes it without pyarrow, which only a trace needs."""

from __future__ import annotations

from dataclasses import dataclass


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
