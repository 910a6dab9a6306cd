"""The status of a plan's run, from what its attempts store in the lake; read-only."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

from batchllm_operator.errors import PlanError, TableError
from batchllm_operator.shards.attempts import attempt_name, attempt_numbers
from batchllm_operator.shards.committed import REFUSED_FILE, Refusal, find_committed
from batchllm_operator.shards.progress import PROGRESS_FILE, ShardProgress
from batchllm_operator.shards.report import ShardReport, read_report
from batchllm_operator.shards.status import (
    JobStatus,
    ShardStatus,
    shard_status,
    worker_statuses,
)
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import MANIFEST_FILE, PlanManifest
from batchllm_operator.stored_plan.run_report import Bill
from batchllm_operator.stored_plan.stored_plan import (
    PLAN_FOLDER,
    StoredPlan,
    job_folder,
    turn_of,
)
from batchllm_operator.streams import ahead

_log = logging.getLogger(__name__)
_NUM_THREADS: Final = 32
"""Shards read concurrently: each is a listing and some small files, one after another."""


@dataclass(frozen=True, slots=True)
class ShardAttempts:
    """The progress of all attempts at a shard."""

    num_attempts: int
    progress: tuple[ShardProgress, ...]
    """By attempt, ascending; missing and unreadable progress is left out."""
    notes: tuple[str, ...] = ()
    """Names what can't be read."""

    @property
    def latest(self) -> ShardProgress | None:
        return self.progress[-1] if self.progress else None

    @property
    def gpu_s(self) -> float:
        """GPU seconds that the attempts have held; lacks those without progress."""
        return sum(each.gpu_s for each in self.progress)

    @property
    def is_complete(self) -> bool:
        """Whether every attempt has progress, so that the bill is complete."""
        return len(self.progress) == self.num_attempts


@dataclass(frozen=True, slots=True)
class _Found:
    """The content of a shard's run folder."""

    attempts: ShardAttempts
    report: ShardReport | None


def read_attempts(plan: StoredPlan) -> dict[int, ShardAttempts]:
    """The progress of all attempts at the shards that were begun, by shard_idx.

    Progress that is corrupted, foreign or of another version is left out, with a warning.
    """
    found = {idx: each.attempts for idx, each in _read_shards(plan, with_reports=False).items()}
    for attempts in found.values():
        for note in attempts.notes:
            _log.warning("%s", note)
    return found


def newest_plan_uri(spec: JobSpec, ds: str) -> str | None:
    """URI of the job's latest plan for a partition; None if there is none.

    Raises:
        SpecError: the partition's name is wrong.
    """
    parent = job_folder(spec, ds)
    folders = [parent.child(n) for n in parent.subfolder_names() if PLAN_FOLDER.fullmatch(n)]
    complete = [folder for folder in folders if folder.exists(MANIFEST_FILE)]
    return max(complete, key=turn_of).uri if complete else None


def read_status(plan: StoredPlan | str, *, now: datetime | None = None) -> JobStatus:
    """The status of a plan's run: each shard by its report, else by its latest attempt.

    A shard with a report is finished, unless a live attempt works on it again. After a commit all
    are finished, with the counts in the commit's note.

    Args:
        plan: a plan or its URI.
        now: the current time, for tests.

    Raises:
        PlanError: there is no plan, or it is corrupted, foreign or of another version.
    """
    if isinstance(plan, str):
        plan = StoredPlan.open(plan)
    now = now or datetime.now(UTC)
    manifest = plan.manifest
    notes: list[str] = []
    try:
        committed = find_committed(plan)
    except TableError as error:
        committed = None
        notes.append(f"whether it is committed isn't known: {error}")
    found = _read_shards(plan, with_reports=committed is None)
    shards = []
    for shard_idx in range(len(manifest.shards)):
        each = found.get(shard_idx, _Found(ShardAttempts(0, ()), None))
        report = None if committed is None else committed.shards[shard_idx]
        shards.append(_status(plan, shard_idx, each, report, now))
        notes += each.attempts.notes
    attempts = [one for each in found.values() for one in each.attempts.progress]
    refusal = None
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
        read_at=now,
        shards=tuple(shards),
        notes=tuple(notes),
        workers=worker_statuses(shards, attempts, now),
        num_rejected_rows=manifest.counts.num_rejected_rows,
        planned_saving_ratio=manifest.counts.planned_saving_ratio if shards else None,
        bill=bill_of(manifest, sum(shard.gpu_s for shard in shards) or None),
        refusal=refusal,
    )


def bill_of(manifest: PlanManifest, gpu_s: float | None) -> Bill:
    """GPU seconds that a run has held, beside what its plan predicts."""
    estimate = manifest.estimate
    if estimate is None:
        return Bill(gpu_s=gpu_s, usd_per_hour=None)
    return Bill(
        gpu_s=gpu_s,
        usd_per_hour=estimate.gpu.usd_per_hour,
        gpu=estimate.gpu.name,
        predicted_gpu_s=estimate.gpu_s,
        unshared_gpu_s=estimate.unshared_gpu_s,
    )


def _status(
    plan: StoredPlan, shard_idx: int, found: _Found, committed: ShardReport | None, now: datetime
) -> ShardStatus:
    shard = plan.manifest.shards[shard_idx]
    status = ShardStatus(shard_idx, "waiting", shard.num_rows, shard.num_parts)
    attempts, latest = found.attempts, found.attempts.latest
    report = committed or found.report
    is_at_work = committed is None and latest is not None and latest.is_live(now)
    if report is not None and not is_at_work:
        status = replace(
            status,
            state="finished",
            num_parts_done=report.num_parts,
            done=report.counts,
            age_s=latest.age_s(now) if latest is not None else None,
            host=latest.host if latest is not None else "",
            worker=latest.worker if latest is not None else None,
        )
    elif latest is not None:
        status = shard_status(latest, now)
    elif attempts.num_attempts:
        status = replace(status, state="silent")
    return replace(
        status,
        num_attempts=attempts.num_attempts,
        gpu_s=attempts.gpu_s,
        predicted_gpu_s=shard.predicted_gpu_s,
    )


def _read_shards(plan: StoredPlan, *, with_reports: bool) -> dict[int, _Found]:
    """The content of the run folders of the plan's shards, by shard_idx."""
    begun = plan.begun_shards()
    read = partial(_read_shard, plan, with_report=with_reports)
    return dict(zip(begun, ahead(begun, read, num_threads=_NUM_THREADS), strict=True))


def _read_shard(plan: StoredPlan, shard_idx: int, *, with_report: bool) -> _Found:
    folder, plan_id = plan.run_folder(shard_idx), plan.manifest.plan_id
    numbers = attempt_numbers(folder)
    progress: list[ShardProgress] = []
    notes: list[str] = []
    for number in numbers:
        name = f"{attempt_name(number)}/{PROGRESS_FILE}"
        place = {"plan_id": plan_id, "shard_idx": shard_idx, "attempt": number}
        try:
            last = ShardProgress.read(folder, name, **place)
        except PlanError as error:
            notes.append(str(error))
        else:
            progress += [last] if last is not None else []
    report = None
    # Read after the progress: the report is written before the last progress, with the same counts.
    is_known = bool(progress) and progress[-1].state == "finished"
    if with_report and not is_known:
        try:
            report = read_report(plan, shard_idx)
        except PlanError as error:
            notes.append(str(error))
    return _Found(ShardAttempts(len(numbers), tuple(progress), tuple(notes)), report)
