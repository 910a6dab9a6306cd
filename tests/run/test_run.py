"""The run stage with the fake engine: parts as they finish, bounded memory, traces."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.fake_job import DS, document_rows, fake_spec, planned, write_table

from batchllm_operator.engine import Engine, EngineJob, EngineOutput, EngineRequest, start_engine
from batchllm_operator.errors import PlanError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.engine_job import pin_revision, traced
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.parts import ShardFiles
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan


@pytest.fixture
def plan(tmp_path: Path) -> StoredPlan:
    """One shard of 40 requests in 8 parts."""
    return planned(tmp_path, document_rows(8, 5), planner={"num_shards": 1})


class Watched:
    """An engine that passes requests on to the real one and lets a test look at them."""

    unread = ()
    chain = None

    def __init__(self, inner: Engine, job: EngineJob, stop_after: int | None = None) -> None:
        self.inner, self.job, self.stop_after = inner, job, stop_after
        self.requests: list[EngineRequest] = []
        self.closed = False

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        def watch() -> Iterator[EngineRequest]:
            for request in requests:
                self.requests.append(request)
                yield request

        for count, output in enumerate(self.inner.stream(watch())):
            if count == self.stop_after:
                raise KeyboardInterrupt
            yield output

    def close(self) -> None:
        self.closed = True


def run_watched(plan: StoredPlan, stop_after: int | None = None) -> Watched:
    started: list[Watched] = []

    def start(spec: JobSpec, job: EngineJob) -> Engine:
        started.append(Watched(start_engine(spec, job), job, stop_after))
        return started[0]

    try:
        run_worker(plan, start=start)
    except KeyboardInterrupt:
        assert stop_after is not None
    return started[0]


def test_only_parts_in_flight_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "documents", document_rows(40, 5))
    spec = fake_spec(
        tmp_path, planner={"num_shards": 1}, engine={"extra_args": {"max_in_flight": 4}}
    )
    plan = plan_job(spec, DS)
    read: list[int] = []
    ahead: list[int] = []
    original = pq.ParquetFile.read_row_group

    def counted(self: pq.ParquetFile, part_idx: int) -> object:
        read.append(part_idx)
        ahead.append(len(read) - len(ShardFiles.of(plan, 0).ledger()))
        return original(self, part_idx)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    run_worker(plan.folder.uri)
    assert read == list(range(40))
    assert max(ahead) <= 2, "a part is read when the one before it is nearly done"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tokenizer_fingerprint": "another"}, "tokenizer"),
        ({"model_version": "sha256:another"}, "the version of model no-model"),
    ],
)
def test_another_model_is_refused(plan: StoredPlan, changes: dict[str, str], what: str) -> None:
    changed = plan.manifest.model_copy(update=changes)
    plan.folder.write_bytes("manifest.json", changed.to_bytes())
    with pytest.raises(PlanError, match=what):
        run_worker(plan.folder.uri)


def test_a_model_of_the_hub_runs_at_the_commit_that_was_planned(plan: StoredPlan) -> None:
    manifest = plan.manifest.model_copy(update={"model_version": "commit:abc123"})
    assert pin_revision(manifest).model.revision == "abc123"
    assert pin_revision(plan.manifest) == plan.manifest.spec


def test_the_engine_gets_requests_in_plan_order_and_what_the_plan_knows(plan: StoredPlan) -> None:
    engine = run_watched(plan)
    assert [request.request_idx for request in engine.requests] == list(range(40))
    assert engine.closed
    sizes = Counter(request.group_id for request in engine.requests)
    assert [request.group_size for request in engine.requests] == [
        sizes[request.group_id] for request in engine.requests
    ]
    # The limit that the spec sets is no estimate.
    assert {request.num_output_tokens for request in engine.requests} == {None}
    assert engine.job.num_requests == 40
    assert engine.job.max_model_len == plan.manifest.max_model_len


def test_after_a_restart_groups_have_the_size_that_is_left(plan: StoredPlan) -> None:
    run_watched(plan, stop_after=23)
    resumed = run_watched(plan)
    sizes = Counter(request.group_id for request in resumed.requests)
    assert resumed.job.num_requests == 17
    assert all(request.group_size == sizes[request.group_id] for request in resumed.requests)


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"planner": {"estimated_output_tokens": 5}}, 5), ({"sampling": {"ignore_eos": True}}, 8)],
)
def test_estimates_reach_the_engine(
    tmp_path: Path, changes: dict[str, dict[str, object]], told: int
) -> None:
    write_table(tmp_path / "documents", document_rows(2, 3))
    planner = {"num_shards": 1, **changes.pop("planner", {})}
    plan = plan_job(fake_spec(tmp_path, planner=planner, **changes), DS)
    engine = run_watched(plan)
    assert {request.num_output_tokens for request in engine.requests} == {told}


def test_every_trace_of_every_attempt_is_published(lake_uri: str) -> None:
    folder = Folder.open(lake_uri).child("shard-00000")
    for attempt in (b"one", b"two"):
        with suppress(KeyError), traced(folder) as local:
            (local / "engine-000.parquet").write_bytes(attempt)
            (local / "engine-001.parquet").write_bytes(attempt * 2)
            raise KeyError(attempt)  # a trace survives the run that failed
        assert not local.exists()
    names = sorted(folder.find())
    contents = sorted(folder.read_bytes(name) for name in names)
    assert contents == [b"one", b"oneone", b"two", b"twotwo"]
    assert all(name.startswith("trace-2") and name.endswith(".parquet") for name in names)


def test_a_trace_that_cannot_be_published_does_not_cost_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    with traced(Folder.open(str(tmp_path / "file" / "shard"))) as local:
        (local / "engine-000.parquet").write_bytes(b"so far")
    assert "is lost" in caplog.text
