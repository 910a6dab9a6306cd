"""The numbers of one committed run, as they are stored beside its plan."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from batchllm_operator.errors import PlanError


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SampleRow(_Frozen):
    """A row of the output table, for a look."""

    key: dict[str, str]
    generated_text: str


class RunReport(_Frozen):
    """Version 1 of report.json. Ratios are fractions (0 to 1) of the logical prompt tokens."""

    report_version: Literal[1] = 1
    job: str
    ds: str
    run_id: str
    plan_uri: str
    table_uri: str
    report_uri: str
    model: str
    num_rows_in: int
    num_rows_out: int
    """Rows with a text."""
    num_rows_failed: int
    """Rows with an error in place of a text."""
    num_rows_duplicate: int
    """Rows that took their text from an equal prompt's request."""
    num_rows_reused: int = 0
    """Rows that took their text from an earlier commit. Nothing was generated for them, and tokens
    and ratios are without them."""
    errors_by_kind: dict[str, int]
    num_requests: int
    num_groups: int
    num_shared_groups: int
    num_shards: int
    num_logical_tokens: int
    """Prompt tokens of all rows that could be prompted and reused nothing."""
    num_computed_tokens: int
    """Prompt tokens of the answered requests whose KV was computed rather than found in the
    cache. Recomputation after a preemption isn't in it."""
    num_output_tokens: int
    optimal_saving_ratio: float
    """Eq. 2 if every shared prefix at every level were computed once."""
    planned_saving_ratio: float
    """Eq. 2 of the single-level plan, by exact tokens."""
    achieved_saving_ratio: float
    """Eq. 2 as it came out, by whole KV blocks, over the rows that got a text."""
    engine_s: float
    """Seconds of generating the parts, summed over the shards. Not in it: engine start, and
    what was spent on parts that an interruption dropped."""
    tokens_per_s: float
    """Prompt and output tokens of the requests per second of `engine_s`."""
    sample_rows: tuple[SampleRow, ...]

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> RunReport:
        """Read a stored report.

        Raises:
            PlanError: it isn't a report of this version.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise PlanError(f"report {source}: can't be read by this release") from error
