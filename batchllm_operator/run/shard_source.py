"""Where a worker's shards come from, and what it says of them in the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from batchllm_operator.errors import FencedError
from batchllm_operator.shards.attempts import Attempt
from batchllm_operator.shards.parts import PartEntry
from batchllm_operator.shards.report import ShardReport
from batchllm_operator.stored_plan.counts import Counts


class Claimed(NamedTuple):
    """A shard that this process has to run."""

    shard_idx: int
    attempt: Attempt
    entries: Mapping[int, PartEntry] = {}
    """Finished parts that are known already."""


class RowsDone(NamedTuple):
    """Finished rows."""

    num_rows: int
    num_failed: int
    """Those of them with an error."""


class Shards(Protocol):
    """Where a worker's shards come from."""

    @property
    def worker(self) -> int | None:
        """The worker's number; None for a run of one shard."""

    @property
    def stands_back(self) -> bool:
        """Whether shards were free at the last `take` that others will have finished sooner."""

    def take(self) -> Claimed | None:
        """Claim the next shard; None if there is none now."""

    def own(self) -> list[int]:
        """Unfinished shards that will probably be this worker's."""

    def others(self) -> list[int]:
        """Unfinished shards that others run, as of the last `take`."""

    def num_left(self) -> int:
        """Unfinished shards of all workers, as of the last `take`."""

    @property
    def num_rows(self) -> int:
        """Rows of all these shards."""

    def elsewhere(self) -> Mapping[int, RowsDone]:
        """Finished rows of the shards that this process doesn't run, as of the last `take`."""

    def ended(self, shard_idx: int, num_failed: int) -> None:
        """Note that a shard is finished, with so many failed rows."""

    def give_up(self, shard_idx: int, error: FencedError) -> None:
        """Note that a later attempt has taken over a shard; raises `error` if nothing is left."""


class OneShard:
    """A single shard, whose attempt has been claimed."""

    worker = None
    stands_back = False

    def __init__(self, claimed: Claimed, num_rows: int) -> None:
        self._claimed: Claimed | None = claimed
        self.num_rows = num_rows
        self._elsewhere: dict[int, RowsDone] = {}

    def take(self) -> Claimed | None:
        claimed, self._claimed = self._claimed, None
        return claimed

    def own(self) -> list[int]:
        return []

    def others(self) -> list[int]:
        return []

    def num_left(self) -> int:
        return 0

    def elsewhere(self) -> Mapping[int, RowsDone]:
        return self._elsewhere

    def ended(self, shard_idx: int, num_failed: int) -> None:
        self._elsewhere = {shard_idx: RowsDone(self.num_rows, num_failed)}

    def give_up(self, shard_idx: int, error: FencedError) -> None:
        raise error


class WorkerReport(NamedTuple):
    """What a worker has done, and what is left of the plan."""

    worker: int
    num_workers: int
    num_shards: int
    num_finished: int
    """Finished shards of the plan, of all workers."""
    others: list[int]
    """Shards that other workers run."""
    shards: dict[int, ShardReport]
    """Those that it has finished, by shard_idx."""

    def to_result(self) -> dict[str, Any]:
        """For the command's result; counts are those of the shards that it has finished."""
        fields = self._asdict()
        reports = fields.pop("shards")
        counts = Counts.total(reports.values()).model_dump()
        num_parts = sum(report.num_parts for report in reports.values())
        return {**fields, "shard_idxs": sorted(reports), "num_parts": num_parts, **counts}
