"""Counts of rows, requests and tokens that parts, shards and reports share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from batchllm_operator.prefixes.algorithm1 import saving_ratio

if TYPE_CHECKING:
    from batchllm_operator.engine import EngineOutput

# Bounded so that sums and products stay finite.
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]


class Frozen(BaseModel):
    """A model stored as JSON: immutable, without unknown fields, infinity or NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Counts(Frozen):
    """Counts of finished work; immutable, so that no reader sees half an update."""

    num_requests: Count
    num_rows: Count
    """Rows with a text or an error."""
    num_failed_rows: Count
    num_logical_tokens: Count
    """Prompt tokens of the rows that were served, duplicates included."""
    num_prompt_tokens: Count
    """Prompt tokens of the requests that the engine has served, whatever it said."""
    num_cached_tokens: Count
    """Those of them that were found in the cache."""
    num_output_tokens: Count
    engine_s: Seconds
    """Seconds from the part before (or the start of the stream) to this one, summed over parts."""

    @classmethod
    def of(cls, outputs: Iterable[tuple[EngineOutput, int]], engine_s: float = 0.0) -> Counts:
        """Count outputs, each with the number of rows that its request stands for."""
        outputs = list(outputs)
        num_rows = sum(count for _, count in outputs)
        answered = [(output, count) for output, count in outputs if output.is_served]
        return cls(
            num_requests=len(outputs),
            num_rows=num_rows,
            num_failed_rows=sum(count for output, count in outputs if output.error is not None),
            num_logical_tokens=sum(count * output.num_prompt_tokens for output, count in answered),
            num_prompt_tokens=sum(output.num_prompt_tokens for output, _ in answered),
            num_cached_tokens=sum(output.num_cached_tokens for output, _ in answered),
            num_output_tokens=sum(output.num_output_tokens for output, _ in answered),
            engine_s=round(engine_s, 3),
        )

    @classmethod
    def total(cls, counts: Iterable[Counts]) -> Counts:
        counts = list(counts)
        sums = {name: sum(getattr(count, name) for count in counts) for name in _NAMES}
        return Counts(**sums | {"engine_s": round(sums["engine_s"], 3)})

    def __add__(self, other: Counts) -> Counts:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _NAMES}
        return Counts(**sums | {"engine_s": round(sums["engine_s"], 3)})

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens whose KV was computed."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def num_duplicate_tokens(self) -> int:
        """Prompt tokens of rows that an equal prompt's request served."""
        return self.num_logical_tokens - self.num_prompt_tokens

    @property
    def saving_ratio(self) -> float | None:
        """Eq. 2 as measured, in whole KV blocks, over the rows that were served; None before."""
        if not self.num_logical_tokens:
            return None
        return saving_ratio(self.num_computed_tokens, self.num_logical_tokens)

    @property
    def computed_tokens_per_s(self) -> float | None:
        """Computed prompt tokens per second of `engine_s`; None if nothing was generated."""
        return self.num_computed_tokens / self.engine_s if self.engine_s else None

    @property
    def output_tokens_per_s(self) -> float | None:
        """Output tokens per second of `engine_s`; None if nothing was generated."""
        return self.num_output_tokens / self.engine_s if self.engine_s else None

    @property
    def rows_per_s(self) -> float | None:
        """Rows per second of `engine_s`; None if nothing was generated."""
        return self.num_rows / self.engine_s if self.engine_s else None


_NAMES: Final = tuple(Counts.model_fields)
NOTHING: Final = Counts.total(())


class PromptCounts(Frozen):
    """What a plan has of one of several prompts."""

    num_requests: Count
    num_logical_tokens: Count
    num_alone_tokens: Count
    """Prefill tokens of a job of this prompt alone, with one shard; in whole KV blocks."""

    @classmethod
    def total(cls, counts: Sequence[PromptCounts]) -> PromptCounts:
        return cls(**{name: sum(getattr(c, name) for c in counts) for name in cls.model_fields})


class PlanCounts(Frozen):
    """The plan's counts of rows, requests and tokens; each row counts for each prompt."""

    num_rows: Count
    num_rejected_rows: Count
    """Rows that can't be prompted; their errors are in rows.parquet."""
    num_duplicate_rows: Count
    """Rows whose prompt another row's request stands for."""
    num_requests: Count
    num_groups: Count
    num_shared_groups: Count
    """Groups of two requests or more."""
    num_logical_tokens: Count
    """Prompt tokens of all rows that can be prompted and reuse nothing (Eq. 2, N_logical)."""
    num_planned_tokens: Count
    """Prefill tokens of the shards' engines, if each keeps in its cache what it will need again
    (Eq. 2, N_processed); in whole KV blocks."""
    num_optimal_tokens: Count
    """The same with one shard."""
    num_algorithm_1_saved_tokens: Count
    """Tokens that the paper's Algorithm 1 saves in one shard."""
    num_exact_saved_tokens: Count
    """Tokens that the best single-level choice saves; the plan takes the better of the two."""
    num_unasked_rows: Count = Field(default=0, exclude_if=lambda num: not num)
    """Rows that aren't asked: their condition doesn't hold, a value is null (`input.on_null`), or
    theirs is another round."""
    num_reused_rows: Count = 0
    """Rows that take the output of an earlier commit; in no other count than `num_rows`."""
    num_control_rows: Count = 0
    """Rows whose values spell a control token of the model; see `prompt.special_tokens`."""
    num_truncated_rows: Count = 0
    """Rows of which a value was cut; see `prompt.truncate`."""
    num_field_orders: Count = 0
    """Orders in which the fields of rows stand; see `prompt.fields`."""
    num_field_bytes: Count = 0
    """Text of the fields of all rows."""
    num_shared_field_bytes: Count = 0
    """What of it an earlier row has with the same fields before it."""
    num_single_order_bytes: Count = 0
    """The same if all rows had the best single order."""

    @classmethod
    def of_rounds(cls, rounds: Sequence[PlanCounts]) -> PlanCounts:
        """Of the plans of all rounds, whose rows are the same."""
        sums = {name: sum(getattr(each, name) for each in rounds) for name in cls.model_fields}
        num_rows = rounds[0].num_rows
        sums["num_unasked_rows"] -= sums["num_rows"] - num_rows
        return cls(**sums | {"num_rows": num_rows})

    @property
    def num_asked_rows(self) -> int:
        return self.num_rows - self.num_unasked_rows

    @property
    def planned_saving_ratio(self) -> float:
        """Eq. 2 of the shards, 0 to 1."""
        return saving_ratio(self.num_planned_tokens, self.num_logical_tokens)

    @property
    def optimal_saving_ratio(self) -> float:
        """Eq. 2 of one engine with unbounded memory, 0 to 1."""
        return saving_ratio(self.num_optimal_tokens, self.num_logical_tokens)


def share(num_some: int, num_all: int) -> str:
    """`num_some` as a percentage of `num_all`; shows 0 % and 100 % only for none and all."""
    if num_some in (0, num_all):
        return "100 %" if num_some else "0 %"
    percent = f"{100 * num_some / num_all:.1f}"
    return {"0.0": "under 0.1 %", "100.0": "over 99.9 %"}.get(percent, f"{percent} %")
