"""A small job in any lake, its attempts and workers, and what its table holds in the end."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from support.answers_job import published
from support.fake_job import DS, document_rows, expected_prompt, fake_spec, write_table

from batchllm_operator.answers.fakes import fake_text
from batchllm_operator.engine import Engine, EngineJob, EngineOutput, EngineRequest, start_engine
from batchllm_operator.engine.fake import FakeEngine
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.live_progress import Holder, interval_s
from batchllm_operator.run.shard_queue import ShardQueue
from batchllm_operator.run.worker import Start, Worker
from batchllm_operator.shards.attempts import Attempt, attempt_numbers, claim_number
from batchllm_operator.shards.reports import ShardReport
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan

NUM_ROWS = 30
NUM_PARTS = 6


def put_table(lake_uri: str, rows: Sequence[dict[str, Any]], ds: str = DS) -> None:
    """Write one partition of the input table, whatever kind of storage it is on."""
    with tempfile.TemporaryDirectory() as local:
        write_table(Path(local), rows, ds)
        source = Path(local) / f"ds={ds}" / "a.parquet"
        Folder.open(lake_uri).child("documents").publish_file(source, f"ds={ds}/a.parquet")


def plan_one_shard(lake_uri: str, **changes: Any) -> StoredPlan:
    """A plan of 30 requests in 6 parts; `changes` are the spec's."""
    put_table(lake_uri, document_rows())
    return plan_job(fake_spec(lake_uri, **{"planner": {"num_shards": 1}, **changes}), DS)


class ActingEngine(FakeEngine):
    """One request at a time; calls `act` before it answers request number `at`."""

    def __init__(self, spec: JobSpec, at: int, act: Callable[[], object]) -> None:
        super().__init__(spec, max_model_len=1 << 20)
        self._args = self._args.model_copy(update={"max_in_flight": 1})
        self._at, self._act = at, act
        self.num_answers = 0

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        for output in super().stream(requests):
            if self.num_answers == self._at:
                self._act()
            self.num_answers += 1
            self.unread = [output]
            yield output


class Engines:
    """Starts engines for `run_worker`, and counts what they were asked for."""

    def __init__(self, at: int = -1, act: Callable[[], object] = lambda: None) -> None:
        self._at, self._act = at, act
        self.started: list[ActingEngine] = []

    def __call__(self, spec: JobSpec, job: EngineJob) -> Engine:
        self.started.append(ActingEngine(spec, self._at, self._act))
        return self.started[-1]

    @property
    def num_answers(self) -> int:
        """Of all engines that were started."""
        return sum(engine.num_answers for engine in self.started)


def claim_attempt(shard_folder: Folder, owner: str | None = None) -> Attempt:
    """Begin the next attempt at a shard, whoever works on it."""
    while True:
        number = max(attempt_numbers(shard_folder), default=0) + 1
        if (attempt := claim_number(shard_folder, number, owner, worker=0)) is not None:
            return attempt


class _SomeShards(ShardQueue):
    def __init__(self, plan: StoredPlan, shard_idxs: Sequence[int]) -> None:
        super().__init__(plan, 0, 1)
        self._wanted = shard_idxs

    def next_shard(self) -> int | None:
        super().next_shard()  # looks at the lake
        taken = self._finished.keys() | self._mine
        return next((idx for idx in self._wanted if idx not in taken), None)

    def give_up(self, shard_idx: int) -> None:
        super().give_up(shard_idx)
        self._wanted = [idx for idx in self._wanted if idx != shard_idx]

    def others(self) -> list[int]:
        return []


def run_only(
    plan: StoredPlan, *shard_idxs: int, start: Start = start_engine, num_gpus: int = 0
) -> dict[int, ShardReport]:
    """Run a worker that leaves all other shards."""
    holder = Holder(num_gpus=num_gpus, every_s=interval_s())
    worker = Worker(plan, _SomeShards(plan, shard_idxs), start, holder)
    for _ in worker.steps():
        pass
    return worker.reports


def check_published(plan: StoredPlan) -> None:
    """Each row of the input is in the output table once, in order, with its own text."""
    found = published(plan.manifest.spec)
    assert [(row["row_key"], row["generated_text"]) for row in found] == [
        (row["row_key"], fake_text(list(expected_prompt(row).encode()))) for row in document_rows()
    ]
