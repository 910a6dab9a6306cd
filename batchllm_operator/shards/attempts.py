"""Attempts at a shard: each has a folder of its own, and a later one fences the earlier (ADR 19).

A process that its cluster believes dead may run beside its successor, and can't be stopped from
outside. So before its work counts, an attempt checks whether a higher number has been claimed.
"""

import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, Field

from batchllm_operator.errors import FencedError, PlanError
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.counts import Count, Counts, Seconds
from batchllm_operator.stored_plan.stored_json import StoredJson

PROGRESS_FILE: Final = "progress.json"

State = Literal["starting", "running", "finished", "stopped", "failed"]

Worker = tuple[int, str]
"""Number and host: the number alone may be that of several processes."""

LIVE_STATES: Final[tuple[State, ...]] = ("starting", "running")
SILENT_AFTER_S: Final = 60.0
"""How long a live attempt gives no sign at most, at the usual interval."""
_SILENT_AFTER_INTERVALS: Final = 10
MOST_INTERVAL_S: Final = 60.0
"""Upper bound of intervals that count: otherwise a killed attempt could look live for hours."""
CLAIM_FILE: Final = "claim.json"
_NAME: Final = re.compile(r"attempt-([0-9]{5,})")


class Claim(StoredJson):
    """Describes the attempt that claimed a number."""

    what = "claim"
    version_field = "claim_version"

    claim_version: Literal[1] = 1
    token: str
    """Random; by it an attempt recognises its own claim if the answer was lost."""
    host: str
    """A pod's name, or a machine's."""
    process_id: int
    processes: str | None = None
    """Identifies the boot and the process namespace that `process_id` is of; None if unknown."""
    claimed_at: str
    owner: str | None = None
    """Common to all tries of one task; None for a run by hand."""
    worker: int


class ShardProgress(StoredJson):
    """Version 1 of an attempt's progress.json. For people, and for waiting tasks."""

    what = "progress"
    version_field = "progress_version"

    progress_version: Literal[1] = 1
    plan_id: str
    shard_idx: Count
    attempt: Count
    host: str
    state: State
    """`starting` until the engine takes requests; `stopped` by a signal, to be resumed."""
    started_at: AwareDatetime
    updated_at: AwareDatetime
    interval_s: Seconds = 5.0
    """Seconds between two updates by a live attempt."""
    elapsed_s: Seconds
    """Since `started_at`, by a monotonic clock, including the engine's start."""
    engine_start_s: Seconds = 0.0
    """The part of it until the engine took requests."""
    worker: Count
    """Number of the worker that runs the shard, from 0, as one of `num_workers`."""
    num_workers: Count
    num_gpus: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    """GPUs that the attempt holds; 0 on a CPU."""
    gpu_held_s: Seconds
    """The part of `elapsed_s` that counts for this attempt's GPU time: a worker begins its next
    shard before the last one has ended, and its GPUs are counted once."""
    num_rows: Count
    num_parts: Count
    num_parts_done: Count
    """Written parts. Rows of other parts count as done once the engine has generated them."""
    done: Counts
    """Finished work, by this attempt and by those before it."""
    num_generated_tokens: Count = 0
    """Output tokens of this attempt, with those of rows that are generated again, or lost."""
    computed_tokens_per_s: Annotated[float, Field(ge=0, le=1e18)] = 0.0
    """Prompt tokens of this attempt over the last minute, without those found in the cache."""
    output_tokens_per_s: Annotated[float, Field(ge=0, le=1e18)] = 0.0
    eta_s: Seconds | None = None
    """Until the last row, as of `updated_at`; None while unknown."""
    error: str | None = None
    """First line of a failed attempt's error."""

    @property
    def maker(self) -> Worker:
        return self.worker, self.host

    @property
    def gpu_s(self) -> float:
        """GPU seconds that count for the attempt, up to its last sign."""
        return self.gpu_held_s * self.num_gpus

    @property
    def start_gpu_s(self) -> float:
        """The part of `gpu_s` before the engine took requests."""
        held_after_s = max(0.0, self.elapsed_s - self.gpu_held_s)
        return max(0.0, self.engine_start_s - held_after_s) * self.num_gpus

    def age_s(self, now: datetime) -> float:
        """Seconds since it was written, at least 0, because clocks differ."""
        return max(0.0, (now - self.updated_at).total_seconds())

    @property
    def silent_after_s(self) -> float:
        """Upper bound of a live attempt's `age_s`: a minute, or ten intervals."""
        interval_s = min(self.interval_s, MOST_INTERVAL_S)
        return max(SILENT_AFTER_S, _SILENT_AFTER_INTERVALS * interval_s)

    def is_live(self, now: datetime) -> bool:
        """Whether the attempt seems to be at work.

        A killed process leaves its last state behind, but doesn't update it any more.
        """
        return self.state in LIVE_STATES and self.age_s(now) <= self.silent_after_s


@dataclass(frozen=True, slots=True)
class Attempt:
    shard_folder: Folder
    number: int
    """From 1."""

    @property
    def folder(self) -> Folder:
        return self.shard_folder.child(attempt_name(self.number))

    def check_current(self) -> None:
        """Raise `FencedError` if a later attempt has begun."""
        folder = self.shard_folder
        later = (number for number in reversed(attempt_numbers(folder)) if number > self.number)
        latest = next((n for n in later if folder.exists(f"{attempt_name(n)}/{CLAIM_FILE}")), None)
        if latest is None:
            return
        who, claim = "its claim can't be read", read_claim(folder, latest)
        if claim is not None:
            who = f"process {claim.process_id} on {claim.host!r}, since {claim.claimed_at}"
        raise FencedError(
            f"{folder.uri}: attempt {latest} ({who}) has taken over from"
            f" attempt {self.number}, which stops; the parts that it has finished are kept"
        )


def attempt_name(number: int) -> str:
    return f"attempt-{number:05d}"


def claim_number(
    shard_folder: Folder, number: int, owner: str | None, worker: int
) -> Attempt | None:
    """Begin the attempt with this number; None if another process has claimed it."""
    claim = Claim(
        token=secrets.token_hex(16),
        host=socket.gethostname(),
        process_id=os.getpid(),
        processes=_processes(),
        claimed_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        owner=owner,
        worker=worker,
    )
    is_ours = shard_folder.create(f"{attempt_name(number)}/{CLAIM_FILE}", claim.to_bytes())
    return Attempt(shard_folder, number) if is_ours else None


def attempt_numbers(shard_folder: Folder) -> list[int]:
    """Numbers of all attempts that have a folder, ascending."""
    found = map(_NAME.fullmatch, shard_folder.subfolder_names())
    return sorted(int(match[1]) for match in found if match)


def read_progress(shard_folder: Folder, number: int, **belongs: object) -> ShardProgress | None:
    name = f"{attempt_name(number)}/{PROGRESS_FILE}"
    return ShardProgress.read(shard_folder, name, **belongs)


def has_ended(claim: Claim) -> bool:
    """Whether the attempt's process ran here, and isn't there any more. False says nothing."""
    if claim.processes is None or claim.processes != _processes():
        return False
    try:
        os.kill(claim.process_id, 0)
    except OSError as error:  # otherwise another user's
        return isinstance(error, ProcessLookupError)
    return False


def _processes() -> str | None:
    """See `Claim.processes`; hosts with one name may be several, so names don't identify them."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return None


def read_claim(shard_folder: Folder, number: int) -> Claim | None:
    """The claim of an attempt; None if there is none, or it can't be read."""
    try:
        return Claim.read(shard_folder, f"{attempt_name(number)}/{CLAIM_FILE}")
    except PlanError:
        return None
