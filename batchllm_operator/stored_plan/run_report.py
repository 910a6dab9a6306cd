"""The figures of one committed run, stored beside its plan."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, ConfigDict, Field
from pydantic.dataclasses import dataclass

from batchllm_operator.answers.expectations import Measured
from batchllm_operator.prefixes.sharing import PlanSharing
from batchllm_operator.row_error import INVALID_OUTPUT
from batchllm_operator.spec import TableAddress
from batchllm_operator.stored_plan.bill import Bill, EarlierRun, Number
from batchllm_operator.stored_plan.counts import Count, Counts, Frozen, PlanCounts
from batchllm_operator.stored_plan.lineage import Lineage
from batchllm_operator.stored_plan.stored_json import StoredJson
from batchllm_operator.stored_plan.timeline import Share, Timeline, WorkBar

REPORT_FILE: Final = "report.json"
PAGE_FILE: Final = "report.html"
_FIGURES: Final = {
    *("job", "ds", "run_id", "plan_uri", "table_uri", "report_uri", "model", "committed_at"),
    *("errors_by_kind", "num_shards", "num_workers", "answers", "prompts", "lineage"),
    *("expectations", "num_quarantined_rows"),
}
_OF_PLAN: Final = {
    *("num_duplicate_rows", "num_reused_rows", "num_control_rows", "num_truncated_rows"),
    "num_unasked_rows",
    *("num_requests", "num_groups", "num_shared_groups", "num_logical_tokens"),
    *("num_field_orders", "num_field_bytes", "num_shared_field_bytes", "num_single_order_bytes"),
}
_MOST_TIMES: Final = 1000
"""Beyond that, what a run would have cost without sharing isn't estimated."""


class SampleRow(Frozen):
    """A row of the output table, for a look."""

    key: dict[str, str]
    generated_text: str


class ErrorKind(Frozen):
    """Rows that failed in the same way."""

    kind: str
    num_rows: Count
    example_keys: tuple[dict[str, str], ...]
    """Keys of the first few rows of this kind, in input order."""
    example_error: str
    """Error of the first of these rows, clipped."""


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class FailedRow:
    """A row without a usable answer; in a job of several prompts, one of its answers."""

    key: dict[str, str]
    """By column, as text."""
    kind: str
    message: str
    """Clipped to 300 characters with the kind; empty if the error is a kind alone."""
    prompt: str | None = None
    """The one that failed, in a job of several."""


class ShardRun(Frozen):
    """What one shard took."""

    shard_idx: Count
    done: Counts
    num_attempts: Count
    gpu_s: Number | None = None
    """GPU seconds of all attempts, with engine starts and dropped work; None if unknown."""
    predicted_gpu_s: Number | None = None
    worker: Count | None = None
    """Number of the worker that finished it; None if unknown."""


class PromptRun(Frozen):
    """What one of several prompts took."""

    num_requests: Count
    num_logical_tokens: Count
    """Prompt tokens of the rows that were served, duplicates included."""
    num_computed_tokens: Count
    """Of a beginning that prompts share, the first in the plan's order has computed it for all."""
    num_alone_tokens: Count
    """What a job of this prompt alone would compute, with one shard."""
    num_output_tokens: Count


class AnswerSummary(Frozen):
    """What a job's answers are as a whole, over the rows without an error; by output column."""

    counts: dict[str, dict[str, Count]] = Field(default_factory=dict)
    """Rows by value, the most frequent first: by label, or by choice."""
    means: dict[str, Annotated[float, Field(ge=-1e24, le=1e24)]] = Field(default_factory=dict)
    """Of probabilities, scores, mean log-probabilities; not of infinite ones."""
    prior: dict[str, Share] = Field(default_factory=dict)
    """Mean probability of each label before calibration, by which it was divided; empty without."""
    warnings: tuple[str, ...] = ()
    """What makes the answers doubtful, and its cures."""
    embedding_size: Count | None = None
    """Numbers of each embedding, which say nothing one by one."""

    def share(self, column: str, value: str) -> float | None:
        """Share of the rows that have the value, 0 to 1; None without rows."""
        counts = self.counts.get(column, {})
        return counts.get(value, 0) / sum(counts.values()) if counts else None


class RunReport(StoredJson):
    """Version 1 of report.json."""

    what = "report"
    version_field = "report_version"
    cure = "remove it, and commit again to have it made"

    report_version: Literal[1] = 1
    job: str
    ds: str
    run_id: str
    plan_uri: str
    table_uri: str
    report_uri: str
    model: str
    committed_at: AwareDatetime
    """When the outputs were published."""
    plan: PlanCounts
    """What the plan counts. Tokens and ratios exclude reused rows."""
    done: Counts
    """What the shards' parts count. `engine_s` is without engine starts, and without parts that an
    interruption dropped."""
    errors_by_kind: dict[str, Count]
    """Failed rows by kind."""
    errors: tuple[ErrorKind, ...] = ()
    """The twenty most frequent kinds, each with rows, keys and an example."""
    failed_rows: tuple[FailedRow, ...] = ()
    """At most a hundred, by kind and in input order: the first of each kind, then the second."""
    retry: str | None = None
    """The command that asks again only what failed; None if that would fail again, or can't be."""
    bill: Bill
    """GPU seconds, price of an hour, prediction."""
    earlier: tuple[EarlierRun, ...] = ()
    """Up to thirteen earlier partitions of the job, the last one nearest."""
    num_shards: Count
    """Shards of the plan."""
    shards: tuple[ShardRun, ...] = ()
    """What each has done, attempts, GPU seconds, and the worker that finished it."""
    timelines: Annotated[tuple[Timeline, ...], Field(max_length=16)] = ()
    """Token batches of the three shards or workers that took longest; none with vLLM's own
    scheduler."""
    work: tuple[WorkBar, ...] = ()
    """Attempts at shards by worker and time, of forty workers at most; none without progress."""
    num_attempts: Count = 0
    """Of all shards, those without progress included."""
    sharing: PlanSharing
    """Histograms of prefix lengths and share degrees; the ten groups that save most; the
    nodes of the prefix tree that save most."""
    num_workers: Count = 0
    """Workers that have finished a shard, by number and host; lacks those without progress."""
    answers: AnswerSummary = AnswerSummary()
    """Over the rows without an error: rows by label or choice (`counts`), means of probabilities,
    scores and log-probabilities (`means`), the labels' `prior` where they are calibrated, and what
    makes them doubtful (`warnings`). Empty if the job asks for texts only."""
    expectations: tuple[Measured, ...] = ()
    """What the spec's `expect` bounds, as the answers have it, and those of earlier partitions."""
    num_quarantined_rows: Count = 0
    """Rows in the quarantine table instead of the output (`on_unmet`)."""
    prompts: dict[str, PromptRun] = Field(default_factory=dict)
    """Of several prompts, what each took, and what a job of its own would compute
    (`num_alone_tokens`)."""
    num_rounds: Count = Field(default=1, exclude_if=lambda num: num == 1)
    """Of several prompts."""
    num_repeated_tokens: Count = Field(default=0, exclude_if=lambda num: not num)
    """Prompt tokens that later rounds computed again."""
    sample_rows: tuple[SampleRow, ...] = ()
    """The first three with a text."""
    lineage: Lineage | None = None
    """Versions of the input and the output, columns and their types, and for each output column the
    input columns that it is made of. None in reports of earlier releases."""

    @property
    def page_uri(self) -> str:
        return f"{self.plan_uri}/{PAGE_FILE}"

    @property
    def quarantine_uri(self) -> str:
        return TableAddress.parse(self.table_uri).quarantine.uri

    @property
    def num_rows_out(self) -> int:
        """Rows with a text."""
        return self.plan.num_asked_rows - self.num_failed_rows

    @property
    def num_failed_rows(self) -> int:
        """Rows with an error, those that the plan has rejected included."""
        return sum(self.errors_by_kind.values())

    @property
    def num_invalid_rows(self) -> int:
        """Rows whose answer can't be used."""
        return self.errors_by_kind.get(INVALID_OUTPUT, 0)

    @property
    def invalid_share(self) -> float | None:
        """Share of the answers that can't be used, 0 to 1; None without answers."""
        num_answers = self.num_rows_out + self.num_invalid_rows
        return self.num_invalid_rows / num_answers if num_answers else None

    @property
    def num_rows_in(self) -> int:
        """Rows of the table, each of which counts for each prompt elsewhere."""
        return self.plan.num_rows // (len(self.prompts) or 1)

    @property
    def saving_against_jobs(self) -> float | None:
        """Share of the prompt tokens that separate jobs of the prompts would compute, and this one
        hasn't; None for a job of one, or with nothing to generate."""
        num_alone = sum(prompt.num_alone_tokens for prompt in self.prompts.values())
        return 1 - self.done.num_computed_tokens / num_alone if num_alone else None

    @property
    def optimal_saving(self) -> float | None:
        """Eq. 2 of one engine with unbounded memory; None if there was nothing to generate."""
        return self.plan.optimal_saving_ratio if self.plan.num_logical_tokens else None

    @property
    def planned_saving(self) -> float | None:
        """Eq. 2 of the plan's shards; None if there was nothing to generate."""
        return self.plan.planned_saving_ratio if self.plan.num_logical_tokens else None

    @property
    def achieved_saving(self) -> float | None:
        """Eq. 2 as measured; None if no row got a generated text."""
        return self.done.saving_ratio

    @property
    def unshared_gpu_s(self) -> float | None:
        """GPU seconds of this run, had each row's prompt been computed alone; None if unknown.

        The engines' starts as measured, and generating as measured, times what is predicted for
        each row alone over what is predicted for the tokens that were computed. The latter lies as
        far between the plan's prediction and that for each row alone as the achieved saving does
        between the planned one and none.
        """
        bill, planned, achieved = self.bill, self.planned_saving, self.achieved_saving
        alone_s, plan_s, start_s = bill.unshared_gpu_s, bill.predicted_gpu_s, bill.start_gpu_s
        if not bill.gpu_s or start_s is None or alone_s is None or plan_s is None:
            return None
        reached = achieved / planned if achieved is not None and planned else 1.0
        computed_s = alone_s - reached * (alone_s - plan_s)
        if computed_s <= alone_s / _MOST_TIMES:
            return None
        return start_s + (bill.gpu_s - start_s) * alone_s / computed_s

    @property
    def unshared_usd(self) -> float | None:
        return self.bill.usd(self.unshared_gpu_s)

    def as_earlier(self) -> EarlierRun:
        """What later partitions' reports say of this one."""
        return EarlierRun(
            ds=self.ds,
            num_rows=self.num_rows_in,
            num_failed_rows=self.num_failed_rows,
            achieved_saving=self.achieved_saving,
            gpu_s=self.bill.gpu_s,
            cost_usd=self.bill.cost_usd,
            unshared_usd=self.unshared_usd,
        )

    def figures(self) -> dict[str, Any]:
        """The figures for programs: URIs, counts, ratios, times and cost, without texts of rows.

        Unknown figures are None, such as ratios and speeds of a run with nothing to generate.
        """
        plan, done, bill = self.plan, self.done, self.bill
        return {
            **self.model_dump(mode="json", include=_FIGURES),
            **plan.model_dump(include=_OF_PLAN),
            "num_rows_in": self.num_rows_in,
            "num_rows_out": self.num_rows_out,
            "num_failed_rows": self.num_failed_rows,
            "num_duplicate_tokens": done.num_duplicate_tokens,
            "num_cached_tokens": done.num_cached_tokens,
            "num_computed_tokens": done.num_computed_tokens,
            "num_output_tokens": done.num_output_tokens,
            "num_saved_tokens": done.num_duplicate_tokens + done.num_cached_tokens,
            "engine_s": done.engine_s,
            "optimal_saving_ratio": self.optimal_saving,
            "planned_saving_ratio": self.planned_saving,
            "achieved_saving_ratio": self.achieved_saving,
            "saving_ratio_against_jobs": self.saving_against_jobs,
            "computed_tokens_per_s": _rounded(done.computed_tokens_per_s, 1),
            "output_tokens_per_s": _rounded(done.output_tokens_per_s, 1),
            "rows_per_s": _rounded(done.rows_per_s, 3),
            "gpu_s": bill.gpu_s,
            "cost_usd": bill.cost_usd,
            "unshared_gpu_s": self.unshared_gpu_s,
            "unshared_cost_usd": self.unshared_usd,
            "predicted_gpu_s": bill.predicted_gpu_s,
            "predicted_cost_usd": bill.predicted_cost_usd,
            "predicted_saved_gpu_s": bill.predicted_saved_gpu_s,
            "predicted_saved_cost_usd": bill.predicted_saved_usd,
        }


def _rounded(value: float | None, num_digits: int) -> float | None:
    return None if value is None else round(value, num_digits)
