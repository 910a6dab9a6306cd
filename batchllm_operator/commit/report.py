"""The report of a committed plan, gathered from its stages' files; as JSON and as a page."""

import heapq
import logging
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchllm_operator.answers import Answers, PlannedAnswers
from batchllm_operator.answers.expectations import Measured
from batchllm_operator.answers.kind import Parts
from batchllm_operator.commit.earlier import EarlierReports
from batchllm_operator.commit.work_bars import work_bars
from batchllm_operator.errors import PlanError, StorageError
from batchllm_operator.lake import LakeTable, Snapshot
from batchllm_operator.prefixes.sharing import merged
from batchllm_operator.report.timelines import read_timeline
from batchllm_operator.shards.attempts import Worker
from batchllm_operator.shards.buckets import Outputs, read_all, read_asked
from batchllm_operator.shards.job_status import ShardAttempts, bill_of, read_attempts
from batchllm_operator.shards.joining import FinishedRound, model_name, outputs_of
from batchllm_operator.shards.kept_outputs import why_not_retried
from batchllm_operator.shards.quarantine import quarantined
from batchllm_operator.shards.row_errors import RowErrors
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.counts import Counts, PlanCounts
from batchllm_operator.stored_plan.lineage import Lineage
from batchllm_operator.stored_plan.manifest import PlanManifest
from batchllm_operator.stored_plan.row_keys import key_texts
from batchllm_operator.stored_plan.run_report import (
    PAGE_FILE,
    REPORT_FILE,
    AnswerSummary,
    PromptRun,
    RunReport,
    SampleRow,
    ShardRun,
)
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.stored_plan.timeline import Timeline

_NUM_SAMPLE_ROWS: Final = 3
_NUM_TIMELINES: Final = 3
_MOST_TIMELINES: Final = 16
"""Of all rounds."""
_MOST_VALUES: Final = 128
"""Values of a column whose rows are counted, the most frequent ones."""
_DIGITS: Final = 6
_TEXT: Final = "generated_text"
_log = logging.getLogger(__name__)


def describe_run(
    rounds: Sequence[FinishedRound],
    table: LakeTable,
    errors: RowErrors,
    expectations: tuple[Measured, ...],
    earlier: EarlierReports,
) -> RunReport:
    """The report of a job whose outputs are published, of all its rounds together.

    Shards are numbered through all rounds.
    """
    plan, manifests = rounds[-1].plan, [each.plan.manifest for each in rounds]
    manifest, spec = plan.manifest, plan.manifest.spec
    attempts = [_attempts(each.plan) for each in rounds]
    by_round = [_shard_runs(*each) for each in zip(rounds, attempts, strict=True)]
    runs = [run for of_round in by_round for run in of_round]
    known = [run.gpu_s for run in runs if run.gpu_s is not None]
    gpu_s = sum(known) if len(known) == len(runs) else None  # 0 without shards
    published = table.snapshot(manifest.ds)
    apart = quarantined(spec, table, plan.publication)
    answers = summarize_answers(spec, manifest.planned_answers, outputs_of(rounds))
    for warning in answers.warnings:
        _log.warning("%s", warning)
    timelines = map(_timelines, (each.plan for each in rounds), by_round, attempts)
    of_shards = list(chain.from_iterable(attempts))
    makers = {begun.latest.maker for begun in of_shards if begun.latest}
    start_gpu_s = None if gpu_s is None else sum(begun.start_gpu_s for begun in of_shards)
    return RunReport(
        job=spec.name,
        ds=manifest.ds,
        run_id=manifest.run_id,
        plan_uri=plan.folder.uri,
        table_uri=table.uri,
        report_uri=f"{plan.folder.uri}/{REPORT_FILE}",
        model=model_name(spec),
        committed_at=_first_committed(plan.folder) or datetime.now(UTC),
        plan=PlanCounts.of_rounds([each.counts for each in manifests]),
        done=Counts.total(run.done for run in runs),
        errors_by_kind=dict(errors.counts),
        errors=errors.kinds(plan),
        failed_rows=errors.rows_by_kind(plan),
        retry=_retry(plan, errors.num_rows),
        bill=bill_of(manifests, gpu_s, start_gpu_s),
        earlier=tuple(each.run for each in reversed(earlier.values()) if each is not None),
        num_shards=len(runs),
        shards=tuple(run.model_copy(update={"shard_idx": idx}) for idx, run in enumerate(runs)),
        timelines=tuple(chain.from_iterable(timelines))[:_MOST_TIMELINES],
        work=work_bars(of_shards),
        num_attempts=sum(begun.num_attempts for begun in of_shards),
        sharing=merged([each.sharing for each in manifests]) if manifests[1:] else manifest.sharing,
        num_workers=len(makers),
        answers=answers,
        expectations=expectations,
        num_quarantined_rows=0 if apart is None else apart[1].num_rows,
        prompts=_prompts(rounds),
        num_rounds=len(rounds),
        num_repeated_tokens=sum(each.num_repeated_tokens for each in manifests),
        sample_rows=_sample(table, published, manifest),
        lineage=Lineage.of(manifest, published),
    )


def _retry(plan: StoredPlan, num_failed: int) -> str | None:
    """The command that asks the failed rows of a published plan again."""
    manifest = plan.manifest
    if num_failed <= manifest.counts.num_rejected_rows or why_not_retried(plan) is not None:
        return None
    return f"batchllm job --retry {shlex.quote(plan.folder.uri)}"


def _shard_runs(of_round: FinishedRound, attempts: Sequence[ShardAttempts]) -> list[ShardRun]:
    planned = of_round.plan.manifest.shards
    return [
        ShardRun(
            shard_idx=shard_idx,
            done=shard.counts,
            num_attempts=begun.num_attempts,
            # Unknown if an attempt has no progress, or none had a GPU.
            gpu_s=round(begun.gpu_s, 1) if begun.is_complete and begun.gpu_s else None,
            predicted_gpu_s=info.predicted_gpu_s,
            worker=begun.latest.worker if begun.latest else None,
        )
        for shard_idx, (shard, begun, info) in enumerate(
            zip(of_round.shards, attempts, planned, strict=True)
        )
    ]


def _prompts(rounds: Sequence[FinishedRound]) -> dict[str, PromptRun]:
    """What each of several prompts took."""
    names = list(rounds[-1].plan.manifest.spec.prompts)
    asked_in = {number: each for each in rounds for number in each.asked}
    planned = [asked_in[number].plan.manifest.prompt_counts[number] for number in range(len(names))]
    shards = [shard for each in rounds for shard in each.shards]
    columns = ["num_prompt_tokens", "num_cached_tokens", "num_output_tokens"]
    sums = np.zeros((len(names), 1 + len(columns)), dtype=np.int64)
    for part in read_all(shards, ["row_idxs", "finish_reason", *columns]) if names else ():
        served = part.filter(pc.is_valid(part["finish_reason"]))
        asked = pc.list_element(served["row_idxs"], 0).to_numpy() % len(names)
        prompt_tokens, cached, outputs = (served[name].to_numpy() for name in columns)
        num_rows = pc.list_value_length(served["row_idxs"]).to_numpy()
        logical = prompt_tokens * num_rows.astype(np.int64)
        np.add.at(sums, asked, np.column_stack([logical, prompt_tokens, cached, outputs]))
    runs = {}
    for name, plans, counts in zip(names, planned, sums.tolist(), strict=True):
        logical, prompt, cached, output = counts
        runs[name] = PromptRun(
            num_requests=plans.num_requests,
            num_logical_tokens=logical,
            num_computed_tokens=prompt - cached,
            num_alone_tokens=plans.num_alone_tokens,
            num_output_tokens=output,
        )
    return runs


def _attempts(plan: StoredPlan) -> list[ShardAttempts]:
    """What attempts have left of each shard; if that can't be read, only the bill is unknown."""
    try:
        made = read_attempts(plan)
    except StorageError as error:
        _log.warning("plan %s: what its attempts took isn't known: %s", plan.folder.uri, error)
        made = {}
    for note in (note for begun in made.values() for note in begun.notes):
        _log.warning("%s", note)
    return [made.get(idx, ShardAttempts()) for idx in range(len(plan.manifest.shards))]


def _first_committed(folder: Folder) -> datetime | None:
    """The time of the plan's first commit, which a repeated commit keeps."""
    try:
        report = RunReport.read(folder, REPORT_FILE)
    except PlanError:
        return None
    return None if report is None else report.committed_at


def store_page(folder: Folder, report: RunReport) -> None:
    """Create `report.html` in the plan's folder, or replace it if it is outdated.

    A page that can't be rendered or written leads to a warning only, as the rows are published.
    """
    from batchllm_operator.report.page import render_report

    try:
        page = render_report(report).encode()
        try:
            if folder.read_bytes(PAGE_FILE) == page:
                return
        except FileNotFoundError:
            pass
        folder.write_bytes(PAGE_FILE, page)
    # Any error: a nightly job must not fail, and run again, because of a page.
    except Exception as error:  # noqa: BLE001
        _log.warning("%s/%s isn't written: %r", folder.uri, PAGE_FILE, error)


def load_report(plan_uri: str) -> RunReport:
    """The stored report of a committed plan.

    Raises `PlanError`: the plan is absent, wasn't committed, or this release can't read its report.
    """
    plan = StoredPlan.open(plan_uri)
    report = RunReport.read(plan.folder, REPORT_FILE)
    if report is None:
        raise PlanError(
            f"plan {plan_uri}: has no {REPORT_FILE}: it wasn't committed yet, or the file was"
            " removed since; commit writes it"
        )
    return report


def _timelines(
    plan: StoredPlan, runs: Sequence[ShardRun], attempts: Sequence[ShardAttempts]
) -> tuple[Timeline, ...]:
    """Of the workers that took longest; an engine's traces lie with its worker's first attempt."""
    engine_s = defaultdict[Worker, float](float)
    for run, begun in zip(runs, attempts, strict=True):
        if begun.latest is not None:
            engine_s[begun.latest.maker] += run.done.engine_s
    made = (progress for begun in attempts for progress in begun.progress)
    latest_first = sorted(made, key=lambda progress: progress.started_at, reverse=True)
    first = {progress.maker: progress for progress in latest_first}
    slowest = heapq.nlargest(_NUM_TIMELINES, engine_s, key=lambda worker: engine_s[worker])
    began = [first[worker] for worker in slowest]
    read = (read_timeline(plan.run_folder(start.shard_idx), start) for start in began)
    return tuple(line for line in read if line is not None)


def _sample(table: LakeTable, published: Snapshot, manifest: PlanManifest) -> tuple[SampleRow, ...]:
    key = manifest.spec.input.key
    if manifest.spec.is_pooled:  # a vector says nothing to a reader
        return ()
    samples: list[SampleRow] = []
    prompts = manifest.spec.prompts
    for batch in table.scan(published, [*key, *(prompts or [_TEXT])]):
        texts = batch.column(_TEXT).to_pylist() if not prompts else _joint_texts(batch, prompts)
        for idx, text in enumerate(texts):
            if text and len(samples) < _NUM_SAMPLE_ROWS:
                samples.append(SampleRow(key=key_texts(batch, idx, key), generated_text=text))
        if len(samples) == _NUM_SAMPLE_ROWS:
            break
    return tuple(samples)


def _joint_texts(batch: pa.RecordBatch, prompts: Iterable[str]) -> Iterator[str]:
    """The answers to all prompts in one text for each row."""
    answers = {name: pc.struct_field(batch.column(name), _TEXT).to_pylist() for name in prompts}
    for texts in zip(*answers.values(), strict=True):
        known = zip(answers, texts, strict=True)
        yield "; ".join(f"{name}: {text}" for name, text in known if text is not None)


def summarize_answers(
    spec: JobSpec, planned: Sequence[PlannedAnswers], sources: Sequence[Outputs]
) -> AnswerSummary:
    """Count and average the answers of `sources`, each for the rows that its request stands for.

    Memory is one part. Empty if the job asks for nothing that can be counted or averaged. Of
    several prompts, columns and labels are named with theirs: `prompt.column`.
    """
    questions, num = spec.questions, len(spec.questions)
    summaries = [
        _summary(question, known, partial(read_asked, sources, number, num))
        for number, (question, known) in enumerate(zip(questions, planned, strict=True))
    ]
    if not spec.prompts:
        return summaries[0]
    of_all: dict[str, Any] = {"counts": {}, "means": {}, "prior": {}, "warnings": ()}
    for name, summary in zip(spec.prompts, summaries, strict=True):
        for field in ("counts", "means", "prior"):
            of_all[field] |= {f"{name}.{k}": v for k, v in getattr(summary, field).items()}
        of_all["warnings"] += tuple(f"{name}: {warning}" for warning in summary.warnings)
    return AnswerSummary(**of_all)


def _summary(spec: JobSpec, planned: PlannedAnswers, parts: Parts) -> AnswerSummary:
    answers = Answers.of(spec, planned).over(parts)
    counts = {name: Counter[str]() for kind in answers.kinds for name in kind.counted}
    # Sum of finite numbers, and the rows that have one.
    sums = {name: np.zeros(2) for kind in answers.kinds for name in kind.averaged}
    texts = Counter[str]()
    names = ["row_idxs", "generated_text", "error", *(field.name for field in answers.raw_fields)]
    for part in parts(names) if counts or sums else ():
        answered = part.filter(pc.is_null(part["error"]))
        if not answered.num_rows:
            continue
        num_rows = pc.list_value_length(answered["row_idxs"]).to_numpy().astype(np.int64)
        if spec.task == "classify":  # texts are single tokens, so there are few
            texts.update(_rows_by_value(answered["generated_text"], num_rows))
        columns = {"generated_text": answered["generated_text"], **answers.columns(answered)}
        for name, counter in counts.items():
            counter.update(_rows_by_value(columns[name], num_rows))
        for name, total in sums.items():
            values = columns[name].to_numpy(zero_copy_only=False)  # null becomes NaN
            finite = np.isfinite(values)
            total += values[finite] @ num_rows[finite], num_rows[finite].sum()
    means = {name: round(float(s / n), _DIGITS) for name, (s, n) in sums.items() if n}
    remarks = {k: v for kind in answers.kinds for k, v in kind.remarks(means, texts).items()}
    most_frequent = {
        name: dict(sorted(counter.items(), key=lambda item: (-item[1], item[0]))[:_MOST_VALUES])
        for name, counter in counts.items()
    }
    return AnswerSummary(counts=most_frequent, means=means, **remarks)


def _rows_by_value(
    column: pa.Array | pa.ChunkedArray, num_rows: NDArray[np.int64]
) -> dict[str, int]:
    rows = pa.table({"value": column, "rows": num_rows}).group_by("value")
    sums = rows.aggregate([("rows", "sum")])
    return dict(zip(sums["value"].to_pylist(), sums["rows_sum"].to_pylist(), strict=True))
