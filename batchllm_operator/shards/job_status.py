"""The status of a plan's run, from what its attempts store in the lake; read-only."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Final

from batchllm_operator.errors import PlanError, TableError
from batchllm_operator.shards.attempts import (
    LIVE_STATES,
    ShardProgress,
    Worker,
    attempt_numbers,
    read_progress,
)
from batchllm_operator.shards.reports import (
    REFUSED_FILE,
    Refusal,
    ShardReport,
    find_committed,
    read_report,
)
from batchllm_operator.shards.status import (
    JobStatus,
    ShardState,
    ShardStatus,
    WorkerState,
    WorkerStatus,
)
from batchllm_operator.shards.usage import Usage
from batchllm_operator.spec import JobSpec, LimitsSpec
from batchllm_operator.stored_plan.bill import Bill
from batchllm_operator.stored_plan.counts import NOTHING
from batchllm_operator.stored_plan.manifest import MANIFEST_FILE, PlanManifest
from batchllm_operator.stored_plan.rounds import plans_of_rounds
from batchllm_operator.stored_plan.stored_plan import (
    PLAN_FOLDER,
    StoredPlan,
    job_folder,
    turn_of,
)
from batchllm_operator.streams import ahead

_NUM_THREADS: Final = 32
"""Shards read concurrently: each is a listing and some small files, one after another."""


@dataclass(frozen=True, slots=True)
class ShardAttempts:
    """What all attempts at a shard have left."""

    num_attempts: int = 0
    progress: tuple[ShardProgress, ...] = ()
    """By attempt, ascending; missing and unreadable progress is left out."""
    report: ShardReport | None = None
    """None, too, if the latest attempt's progress says as much."""
    notes: tuple[str, ...] = ()
    """Names what can't be read: it is corrupted, foreign or of another version."""

    @property
    def latest(self) -> ShardProgress | None:
        return self.progress[-1] if self.progress else None

    @property
    def gpu_s(self) -> float:
        """GPU seconds that the attempts have held; lacks those without progress."""
        return sum(attempt.gpu_s for attempt in self.progress)

    @property
    def start_gpu_s(self) -> float:
        """The part of `gpu_s` before engines took requests."""
        return sum(attempt.start_gpu_s for attempt in self.progress)

    @property
    def is_complete(self) -> bool:
        """Whether every attempt has progress, so that the bill is complete."""
        return len(self.progress) == self.num_attempts


def newest_plan_uri(spec: JobSpec, ds: str) -> str | None:
    """URI of the job's latest plan for a partition; None if there is none.

    Raises `SpecError`: the partition's name is wrong.
    """
    parent = job_folder(spec, ds)
    folders = [parent.child(n) for n in parent.subfolder_names() if PLAN_FOLDER.fullmatch(n)]
    complete = [folder for folder in folders if folder.exists(MANIFEST_FILE)]
    return max(complete, key=turn_of).uri if complete else None


def read_attempts(
    plan: StoredPlan, *, with_reports: bool = False, but: Collection[int] = ()
) -> dict[int, ShardAttempts]:
    """What attempts have left, by shard_idx, of the shards that were begun, all `but` these."""

    def read(shard_idx: int) -> ShardAttempts:
        folder = plan.run_folder(shard_idx)
        numbers, notes, report = attempt_numbers(folder), list[str](), None
        progress: list[ShardProgress] = []
        belongs = {"plan_id": plan.manifest.plan_id, "shard_idx": shard_idx}
        for number in numbers:
            try:
                found = read_progress(folder, number, **belongs, attempt=number)
            except PlanError as error:
                notes.append(str(error))
            else:
                progress += [found] if found is not None else []
        # After the progress: the report is written before the last progress, with the same counts.
        if with_reports and not (progress and progress[-1].state == "finished"):
            try:
                report = read_report(plan, shard_idx)
            except PlanError as error:
                notes.append(str(error))
        return ShardAttempts(len(numbers), tuple(progress), report, tuple(notes))

    begun = [idx for idx in plan.begun_shards() if idx not in but]
    return dict(zip(begun, ahead(begun, read, num_threads=_NUM_THREADS), strict=True))


def used_before(plan: StoredPlan) -> Usage:
    """What the rounds before a plan's have used."""
    before = [read_attempts(each) for each in plans_of_rounds(plan)[:-1]]
    return Usage.total(Usage.of(made.progress) for made in chain(*(m.values() for m in before)))


def _limits_reached(plan: StoredPlan, attempts: Mapping[int, ShardAttempts]) -> list[str]:
    if plan.manifest.spec.limits == LimitsSpec():
        return []
    used = [Usage.of(made.progress) for made in attempts.values()]
    return list(Usage.total([used_before(plan), *used]).reached(plan.manifest))


def read_status(plan: StoredPlan | str, *, now: datetime | None = None) -> JobStatus:
    """The status of a plan's run: each shard by its report, else by its latest attempt.

    A shard with a report is finished, unless a live attempt works on it again. After a commit all
    are finished, with the counts in the commit's note.

    Raises `PlanError`: there is no plan, or it is corrupted, foreign or of another version.
    """
    plan, now = StoredPlan.open(plan), now or datetime.now(UTC)
    manifest, num_shards = plan.manifest, len(plan.manifest.shards)
    notes, committed, refusal = list[str](), None, None
    try:
        committed = find_committed(plan)
    except TableError as error:
        notes.append(f"whether it is committed isn't known: {error}")
    attempts = read_attempts(plan, with_reports=committed is None)
    reports = committed.shards if committed is not None else [None] * num_shards
    shards = [
        _shard_status(plan, idx, attempts.get(idx, ShardAttempts()), reports[idx], now)
        for idx in range(num_shards)
    ]
    notes += [note for made in attempts.values() for note in made.notes]
    if committed is None and any(shard.state != "finished" for shard in shards):
        try:
            notes += _limits_reached(plan, attempts)
        except PlanError as error:  # a round before is gone
            notes.append(f"limits: {error}")
    if committed is None:
        try:
            refusal = Refusal.read(plan.folder, REFUSED_FILE, plan_id=manifest.plan_id)
        except PlanError as error:
            notes.append(str(error))
    return JobStatus(
        plan_uri=plan.folder.uri,
        plan_id=manifest.plan_id,
        job=manifest.spec.name,
        ds=manifest.ds,
        is_committed=committed is not None,
        unit=manifest.spec.unit,
        read_at=now,
        shards=tuple(shards),
        notes=tuple(notes),
        workers=_worker_statuses(shards, attempts, now),
        num_rejected_rows=manifest.counts.num_rejected_rows,
        planned_saving_ratio=manifest.counts.planned_saving_ratio if shards else None,
        bill=bill_of([manifest], sum(shard.gpu_s for shard in shards) or None),
        round=manifest.round_idx + 1,
        num_rounds=len(manifest.spec.rounds),
        refusal=refusal,
    )


def bill_of(
    manifests: Sequence[PlanManifest], gpu_s: float | None, start_gpu_s: float | None = None
) -> Bill:
    """GPU seconds that the runs of plans have held, beside what the plans predict."""
    estimates = [each.estimate for each in manifests if each.estimate is not None]
    if not estimates:
        return Bill(gpu_s=gpu_s, start_gpu_s=start_gpu_s, usd_per_hour=None)
    return Bill(
        gpu_s=gpu_s,
        start_gpu_s=start_gpu_s,
        usd_per_hour=estimates[0].gpu.usd_per_hour,
        gpu=estimates[0].gpu.name,
        predicted_gpu_s=sum(estimate.gpu_s for estimate in estimates),
        unshared_gpu_s=sum(estimate.unshared_gpu_s for estimate in estimates),
    )


def _shard_status(
    plan: StoredPlan,
    shard_idx: int,
    attempts: ShardAttempts,
    committed: ShardReport | None,
    now: datetime,
) -> ShardStatus:
    shard, latest = plan.manifest.shards[shard_idx], attempts.latest
    live = latest if committed is None and latest is not None and latest.is_live(now) else None
    report = None if live is not None else committed or attempts.report
    state: ShardState = "silent" if attempts.num_attempts else "waiting"
    num_parts_done, done = 0, NOTHING
    if report is not None:
        state, num_parts_done, done = "finished", report.num_parts, report.counts
    elif latest is not None:
        num_parts_done, done = latest.num_parts_done, latest.done
        state = _state_of(latest, now)
    return ShardStatus(
        shard_idx,
        state,
        shard.num_rows,
        shard.num_parts,
        num_parts_done,
        done,
        computed_tokens_per_s=live.computed_tokens_per_s if live else 0.0,
        output_tokens_per_s=live.output_tokens_per_s if live else 0.0,
        eta_s=max(0.0, live.eta_s - live.age_s(now)) if live and live.eta_s is not None else None,
        predicted_gpu_s=shard.predicted_gpu_s,
        age_s=latest.age_s(now) if latest else None,
        num_attempts=attempts.num_attempts,
        gpu_s=attempts.gpu_s,
        host=latest.host if latest else "",
        worker=latest.worker if latest else None,
        error=latest.error if latest and report is None else None,
    )


def _state_of(progress: ShardProgress, now: datetime) -> ShardState:
    is_silent = progress.state in LIVE_STATES and not progress.is_live(now)
    return "silent" if is_silent else progress.state


def _worker_statuses(
    shards: Iterable[ShardStatus], attempts: Mapping[int, ShardAttempts], now: datetime
) -> tuple[WorkerStatus, ...]:
    """The workers that made `attempts`, which are those at all of the plan's `shards`."""
    made: defaultdict[Worker, list[ShardProgress]] = defaultdict(list)
    for attempt in (progress for begun in attempts.values() for progress in begun.progress):
        made[attempt.maker].append(attempt)
    latest: defaultdict[tuple[int | None, str], list[ShardStatus]] = defaultdict(list)
    for shard in shards:
        latest[shard.worker, shard.host].append(shard)
    workers = []
    for maker, attempted in made.items():
        last = max(attempted, key=lambda attempt: attempt.updated_at)
        live = [attempt for attempt in attempted if attempt.is_live(now)]
        ended = _state_of(last, now)
        state: WorkerState = ended if ended in ("silent", "stopped", "failed") else "idle"
        if live:
            state = "running" if any(attempt.state == "running" for attempt in live) else "starting"
        worker = WorkerStatus(
            worker=last.worker,
            host=last.host,
            num_workers=last.num_workers,
            state=state,
            live_shards=tuple(sorted(attempt.shard_idx for attempt in live)),
            num_finished=sum(shard.state == "finished" for shard in latest[maker]),
            num_rows_done=sum(shard.done.num_rows for shard in latest[maker]),
            computed_tokens_per_s=sum(attempt.computed_tokens_per_s for attempt in live),
            output_tokens_per_s=sum(attempt.output_tokens_per_s for attempt in live),
            age_s=last.age_s(now),
            gpu_s=sum(attempt.gpu_s for attempt in attempted),
        )
        workers.append(worker)
    return tuple(sorted(workers, key=lambda worker: (worker.worker, worker.age_s, worker.host)))
