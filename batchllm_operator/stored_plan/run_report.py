"""The figures of one committed run, stored beside its plan."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, Field, ValidationError, model_validator

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes.sharing import PlanSharing
from batchllm_operator.spec.tasks import INVALID_OUTPUT
from batchllm_operator.stored_plan.counts import Count, Frozen, Seconds

REPORT_FILE: Final = "report.json"
PAGE_FILE: Final = "report.html"
_NOT_FIGURES: Final = {"sample_rows", "bill", "errors", "shards", "timelines", "sharing"}
_MOST_BINS: Final = 1000

# Bounded so that every readable report can be drawn.
_Number = Annotated[float, Field(ge=0, le=1e24)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Saving = Annotated[float, Field(ge=-1e6, le=1)]
_Bins = Annotated[tuple[_Number, ...], Field(min_length=1, max_length=_MOST_BINS)]
_Shares = Annotated[tuple[_Share, ...], Field(min_length=1, max_length=_MOST_BINS)]


class SampleRow(Frozen):
    """A row of the output table, for a look."""

    key: dict[str, str]
    generated_text: str


class ErrorKind(Frozen):
    """Rows that failed in the same way."""

    kind: str
    """The part of their errors before the colon."""
    num_rows: Count
    example_keys: tuple[dict[str, str], ...]
    """Keys of the first few rows of this kind, in input order."""
    example_error: str
    """Error of the first of these rows, clipped."""


class TokenKinds(Frozen):
    """Where the tokens of the rows that got a text went. Prompt tokens, but for the last."""

    num_duplicate: Count
    """Tokens of rows that took their text from an equal prompt's request."""
    num_cached: Count
    """Tokens found in the KV cache: shared prefixes that were computed once."""
    num_computed: Count
    num_output: Count

    @property
    def num_logical(self) -> int:
        return self.num_duplicate + self.num_cached + self.num_computed


class ShardRun(Frozen):
    """What one shard took."""

    shard_idx: Count
    num_rows: Count
    num_rows_failed: Count
    num_requests: Count
    num_computed_tokens: Count
    """Prompt tokens of the requests that got a text, without those found in the cache."""
    num_output_tokens: Count
    engine_s: Seconds
    num_attempts: Count
    gpu_s: _Number | None = None
    """GPU seconds of all attempts, with engine starts and dropped work; None if unknown."""
    predicted_gpu_s: _Number | None = None
    worker: Count | None = None
    """Number of the worker that finished it; None for `run --shard`, or if unknown."""

    @property
    def computed_tokens_per_s(self) -> float:
        return self.num_computed_tokens / self.engine_s if self.engine_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.engine_s if self.engine_s else 0.0


class Bill(Frozen):
    """GPU time and its price, against what was predicted."""

    gpu_s: _Number | None
    """GPU seconds that attempts have held, from their start to their last sign, with engine starts
    and dropped work; those that a worker's shards share count once. None if unknown (no GPU, or an
    older release)."""
    usd_per_hour: _Number | None
    """Price of a GPU, from the table of GPUs; None if the spec names none."""
    gpu: str | None = None
    """The GPU of the price and the prediction."""
    predicted_gpu_s: _Number | None = None
    unshared_gpu_s: _Number | None = None
    """Prediction if each row's prompt were computed alone."""

    def usd(self, gpu_s: float | None) -> float | None:
        """The price of GPU seconds; None if either is unknown."""
        if gpu_s is None or self.usd_per_hour is None:
            return None
        return gpu_s / 3600 * self.usd_per_hour

    @property
    def cost_usd(self) -> float | None:
        return self.usd(self.gpu_s)

    @property
    def predicted_cost_usd(self) -> float | None:
        return self.usd(self.predicted_gpu_s)

    @property
    def predicted_saved_gpu_s(self) -> float | None:
        """Predicted GPU seconds that the plan saves against each row's prompt computed alone."""
        if self.unshared_gpu_s is None or self.predicted_gpu_s is None:
            return None
        return self.unshared_gpu_s - self.predicted_gpu_s

    @property
    def predicted_saved_usd(self) -> float | None:
        return self.usd(self.predicted_saved_gpu_s)


class AnswerSummary(Frozen):
    """What a job's answers are as a whole, over the rows without an error; by output column."""

    counts: dict[str, dict[str, Count]] = Field(default_factory=dict)
    """Rows by value, the most frequent first: by label, or by choice."""
    means: dict[str, Annotated[float, Field(ge=-1e24, le=1e24)]] = Field(default_factory=dict)
    """Of probabilities, scores, mean log-probabilities; not of infinite ones."""
    prior: dict[str, _Share] = Field(default_factory=dict)
    """Mean probability of each label before calibration, by which it was divided; empty without."""
    warnings: tuple[str, ...] = ()
    """What makes the answers doubtful, and its cures."""
    embedding_size: Count | None = None
    """Numbers of each embedding, which say nothing one by one."""

    def share(self, column: str, value: str) -> float | None:
        """Share of the rows that have the value, 0 to 1; None without rows."""
        found = self.counts.get(column, {})
        return found.get(value, 0) / sum(found.values()) if found else None


class Timeline(Frozen):
    """The token batches of one engine over time (paper, Fig. 2 and 6), in bins of equal length.

    A worker's engine goes on to other shards, and the timeline has the steps of all of them. Tuples
    hold a value for each bin; token counts are means over its time.
    """

    shard_idx: Count
    """The shard that the engine began with."""
    worker: Count | None = None
    """Number of the worker whose engine it is; None for `run --shard`."""
    num_steps: Count
    duration_s: Seconds
    chunk_size: Count | None
    """None in traces of older releases."""
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
    valley_share: _Share
    """Share of the time in valleys, 0 to 1."""
    num_preempted: Count

    @property
    def name(self) -> str:
        if self.worker is None:
            return f"shard {self.shard_idx}"
        return f"worker {self.worker}, from shard {self.shard_idx}"

    @model_validator(mode="after")
    def _check_bins(self) -> Timeline:
        lengths = {len(value) for _, value in self if isinstance(value, tuple)}
        if len(lengths) != 1:
            raise ValueError("a timeline has a value of each kind for each bin")
        return self


class RunReport(Frozen):
    """Version 2 of report.json. Ratios are fractions (0 to 1) of the logical prompt tokens.

    Version 1, of older releases, ends with `sample_rows`, and is read too.
    """

    report_version: Literal[1, 2] = 2
    job: str
    ds: str
    run_id: str
    plan_uri: str
    table_uri: str
    report_uri: str
    model: str
    num_rows_in: Count
    num_rows_out: Count
    """Rows with a text."""
    num_rows_failed: Count
    num_rows_duplicate: Count
    """Rows that took their text from an equal prompt's request."""
    num_rows_reused: Count = 0
    """Rows that took their text from an earlier commit. Tokens and ratios exclude them."""
    num_rows_control: Count = 0
    """Rows whose values spell a control token of the model; see `prompt.special_tokens`."""
    num_rows_truncated: Count = 0
    """Rows of which a value was cut; see `prompt.truncate`."""
    errors_by_kind: dict[str, Count]
    num_requests: Count
    num_groups: Count
    num_shared_groups: Count
    num_shards: Count
    num_logical_tokens: Count
    """Prompt tokens of all rows that could be prompted and reused no output."""
    num_computed_tokens: Count
    """Prompt tokens of the answered requests whose KV was computed rather than found in the
    cache, without recomputation after preemptions."""
    num_output_tokens: Count
    optimal_saving_ratio: _Saving
    """Eq. 2 of one engine with unbounded memory."""
    planned_saving_ratio: _Saving
    """Eq. 2 of the plan's shards; see `PlanCounts`."""
    achieved_saving_ratio: _Saving
    """Eq. 2 as measured, in whole KV blocks, over the rows that got a text."""
    engine_s: Seconds
    """Seconds of generating the parts, summed over the shards, without engine starts and without
    parts that an interruption dropped."""
    sample_rows: tuple[SampleRow, ...]

    committed_at: AwareDatetime | None = None
    tokens: TokenKinds | None = None
    bill: Bill | None = None
    errors: tuple[ErrorKind, ...] = ()
    """By frequency, descending."""
    shards: tuple[ShardRun, ...] = ()
    timelines: Annotated[tuple[Timeline, ...], Field(max_length=16)] = ()
    """Of the shards or workers that took longest, longest first; none with vLLM's own scheduler."""
    sharing: PlanSharing | None = None
    num_workers: Count | None = None
    """Workers that have finished a shard, by number and host; None with `run --shard`."""
    answers: AnswerSummary | None = None
    """None if the job asks for texts only."""

    @property
    def page_uri(self) -> str:
        return f"{self.plan_uri}/{PAGE_FILE}"

    @property
    def num_rows_invalid(self) -> int:
        """Rows whose answer can't be used."""
        return self.errors_by_kind.get(INVALID_OUTPUT, 0)

    @property
    def invalid_share(self) -> float | None:
        """Share of the answers that can't be used, 0 to 1; None without answers."""
        num_answers = self.num_rows_out + self.num_rows_invalid
        return self.num_rows_invalid / num_answers if num_answers else None

    @property
    def optimal_saving(self) -> float | None:
        """`optimal_saving_ratio`; None if there was nothing to generate."""
        return self.optimal_saving_ratio if self.num_logical_tokens else None

    @property
    def planned_saving(self) -> float | None:
        """`planned_saving_ratio`; None if there was nothing to generate."""
        return self.planned_saving_ratio if self.num_logical_tokens else None

    @property
    def achieved_saving(self) -> float | None:
        """`achieved_saving_ratio`; None if no row got a generated text."""
        num_tokens = self.num_computed_tokens if self.tokens is None else self.tokens.num_logical
        return self.achieved_saving_ratio if num_tokens else None

    @property
    def num_saved_tokens(self) -> int | None:
        """Prompt tokens of the rows with a text that weren't computed; None if unknown."""
        return None if self.tokens is None else self.tokens.num_duplicate + self.tokens.num_cached

    @property
    def computed_tokens_per_s(self) -> float | None:
        """`num_computed_tokens` per second of `engine_s`; None if there was nothing to generate."""
        return self.num_computed_tokens / self.engine_s if self.engine_s else None

    @property
    def output_tokens_per_s(self) -> float | None:
        """Output tokens per second of `engine_s`; None if there was nothing to generate."""
        return self.num_output_tokens / self.engine_s if self.engine_s else None

    @property
    def rows_per_s(self) -> float | None:
        """Generated rows per second of `engine_s`; None if there were none."""
        num_rows = sum(shard.num_rows for shard in self.shards)
        return num_rows / self.engine_s if self.engine_s and self.shards else None

    def figures(self) -> dict[str, Any]:
        """The figures for programs: URIs, counts, ratios, times and cost, without texts of rows.

        Unknown figures are None, such as ratios and speeds of a run with nothing to generate.
        """
        bill = self.bill or Bill(gpu_s=None, usd_per_hour=None)
        return {
            **self.model_dump(mode="json", exclude=_NOT_FIGURES),
            "optimal_saving_ratio": self.optimal_saving,
            "planned_saving_ratio": self.planned_saving,
            "achieved_saving_ratio": self.achieved_saving,
            "num_saved_tokens": self.num_saved_tokens,
            "computed_tokens_per_s": _rounded(self.computed_tokens_per_s, 1),
            "output_tokens_per_s": _rounded(self.output_tokens_per_s, 1),
            "rows_per_s": _rounded(self.rows_per_s, 3),
            "gpu_s": bill.gpu_s,
            "cost_usd": bill.cost_usd,
            "predicted_gpu_s": bill.predicted_gpu_s,
            "predicted_cost_usd": bill.predicted_cost_usd,
            "predicted_saved_gpu_s": bill.predicted_saved_gpu_s,
            "predicted_saved_cost_usd": bill.predicted_saved_usd,
        }

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> RunReport:
        """Read a stored report.

        Raises:
            PlanError: it isn't a report of a version that this release knows.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise PlanError(
                f"report {source}: can't be read by this release; a later one has written it, or it"
                " is damaged: remove it, and commit again to have it made"
            ) from error


def _rounded(value: float | None, num_digits: int) -> float | None:
    return None if value is None else round(value, num_digits)
