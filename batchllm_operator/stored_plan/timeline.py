"""What engines and workers did over time."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from batchllm_operator.stored_plan.bill import Number
from batchllm_operator.stored_plan.counts import Count, Frozen, Seconds

_MOST_BINS: Final = 1000
Share = Annotated[float, Field(ge=0, le=1)]
_Bins = Annotated[tuple[Number, ...], Field(min_length=1, max_length=_MOST_BINS)]
_Shares = Annotated[tuple[Share, ...], Field(min_length=1, max_length=_MOST_BINS)]


class Timeline(Frozen):
    """The token batches of one engine over time (paper, Fig. 2 and 6), in bins of equal length.

    A worker's engine goes on to other shards, and the timeline has the steps of all of them. Tuples
    hold a value for each bin; token counts are means over its time.
    """

    shard_idx: Count
    """The shard that the engine began with."""
    worker: Count
    """Number of the worker whose engine it is."""
    num_steps: Count
    duration_s: Seconds
    chunk_size: Count
    bin_s: Annotated[float, Field(gt=0, le=1e12)]
    num_decode_tokens: _Bins
    num_distinct_tokens: _Bins
    num_prefix_tokens: _Bins
    kv_used: _Shares
    """Share of the KV cache's blocks in use, 0 to 1; the largest of the bin."""
    kv_held: _Shares
    """Share held for members of groups that have yet to come; the largest of the bin."""
    valley: _Shares
    """Share of the bin's time in valleys, 0 to 1."""
    num_valley_steps: Count
    valley_share: Share
    """Share of the time in valleys, 0 to 1."""
    num_preempted: Count

    @property
    def name(self) -> str:
        return f"worker {self.worker}, from shard {self.shard_idx}"

    @model_validator(mode="after")
    def _check_bins(self) -> Timeline:
        lengths = {len(value) for _, value in self if isinstance(value, tuple)}
        if len(lengths) != 1:
            raise ValueError("a timeline has a value of each kind for each bin")
        return self


Ending = Literal["finished", "stopped", "failed", "silent"]
"""`silent`: it was killed, or lost its shard while it worked."""


class WorkBar(Frozen):
    """An attempt at a shard, or several one after another, by one worker.

    Seconds count from the first attempt's start by each host's own clock. A worker's bars don't
    overlap: one begins when its GPUs are no longer held for the shard before.
    """

    worker: Count
    host: str
    shard_idx: Count
    num_shards: Count = 1
    """More than 1 for short bars that are drawn as one."""
    attempt: Count
    """Above 1 if it took over from another attempt."""
    start_s: Number
    end_s: Number
    ending: Ending

    @property
    def took_over(self) -> bool:
        return self.attempt > 1
