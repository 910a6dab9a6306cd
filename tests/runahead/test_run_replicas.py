"""Workers that are replicas: threads here, with fake engines whose chains are doubles."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from runahead.test_meeting import Chain
from support.fake_job import DS, document_rows, fake_spec, write_table

from batchllm_operator.engine import Engine, EngineJob, EngineOutput, EngineRequest
from batchllm_operator.engine.device_profile import StoredProfiles
from batchllm_operator.engine.fake import FakeEngine
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.replicas import Replicas
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.runahead.groups import ChainLimits, ChainProfile, chain_subject
from batchllm_operator.shards.reports import WorkerReport
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import ReplicaPlacement
from batchllm_operator.stored_plan.stored_plan import StoredPlan

LIMITS = ChainLimits(block_size=1, num_blocks=1000, max_chunk=256, max_model_len=4096)
STEPS = [(64, 0, 0.5), (128, 0, 1.0)]
MakePlan = Callable[..., StoredPlan]


@pytest.fixture
def make_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    """A plan of six groups of five requests, with a placement for its first shard."""
    monkeypatch.setattr(JobSpec, "reason_against_chains", None)  # a fake engine would be one

    def make(num_shards: int = 1, **placement: Any) -> StoredPlan:
        write_table(tmp_path / "documents", document_rows())
        planner = {"num_shards": num_shards, "part_rows": 10}
        plan = plan_job(fake_spec(tmp_path, engine={"replicas": 2}, planner=planner), DS)
        fields = {"num_replicas": 2, "makespan_s": 1.0, "without_chains_s": 2.0, **placement}
        first, *others = plan.manifest.shards
        first = first.model_copy(update={"replicas": ReplicaPlacement.model_validate(fields)})
        manifest = plan.manifest.model_copy(update={"shards": (first, *others)})
        plan.folder.write_bytes("manifest.json", manifest.to_bytes())
        return StoredPlan.open(plan.folder.uri)

    return make


class Starter:
    """Starts engines of one replica, and remembers their jobs, chains and requests."""

    def __init__(self, dies: bool = False) -> None:
        self.dies = dies
        self.jobs: list[EngineJob] = []
        self.chain = Chain(limits=LIMITS, steps=STEPS)
        self.taken: list[EngineRequest] = []

    def __call__(self, spec: JobSpec, job: EngineJob) -> Engine:
        self.jobs.append(job)
        return _Watched(FakeEngine(spec, job.max_model_len), self, job.is_chained)


class _Watched:
    unread = ()

    def __init__(self, engine: FakeEngine, starter: Starter, is_chained: bool) -> None:
        self._engine, self._starter = engine, starter
        self.chain: Any = starter.chain if is_chained else None

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        for output in self._engine.stream(self._watch(requests)):
            if self._starter.dies:
                raise KeyboardInterrupt
            yield output

    def _watch(self, requests: Iterator[EngineRequest]) -> Iterator[EngineRequest]:
        for request in requests:
            self._starter.taken.append(request)
            yield request

    def close(self) -> None:
        self._engine.close()


def run(
    plan: StoredPlan, folder: Path, starters: list[Starter]
) -> list[WorkerReport | KeyboardInterrupt]:
    """Run all replicas to their end."""
    folder.mkdir()

    def one(rank: int) -> WorkerReport | KeyboardInterrupt:
        place = {"replica": rank, "meeting_folder": folder, "owner": f"test/{rank}"}
        try:
            return run_worker(plan.folder.uri, rank, 2, start=starters[rank], **place)
        except KeyboardInterrupt as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_replicas_compute_a_prefix_together_and_share_the_shards(
    make_plan: MakePlan, tmp_path: Path, num_shards: int
) -> None:
    plan = make_plan(num_shards, spread=[{"group_id": 0, "split": [4, 3]}])
    starters = [Starter(), Starter()]
    reports = run(plan, tmp_path / "meeting", starters)
    done = [report.shards[idx] for report in reports for idx in report.shards]  # type: ignore[union-attr]
    assert sum(shard.counts.num_rows for shard in done) == 30
    assert len(done) == num_shards
    assert [starter.chain.prefilled for starter in starters] == [[[0]], [[0]]]
    for starter in starters:
        assert [job.is_chained for job in starter.jobs][:2] in ([True], [True, False])
    taken = [request.request_idx for starter in starters for request in starter.taken]
    assert sorted(taken) == list(range(sum(s.num_requests for s in plan.manifest.shards)))


def test_the_shard_of_a_replica_that_ends_is_taken_up_without_a_chain(
    make_plan: MakePlan, tmp_path: Path
) -> None:
    plan = make_plan(1, spread=[{"group_id": 0, "split": [4, 3]}])
    starters = [Starter(dies=True), Starter(dies=True)]
    run(plan, tmp_path / "first", starters)  # the one with the shard dies, the other one after it
    starters = [Starter(), Starter()]
    reports = run(plan, tmp_path / "second", starters)
    shards = [idx for report in reports for idx in report.shards]  # type: ignore[union-attr]
    assert len(shards) == 1
    assert {chain.prefilled[0][0] for chain in (starter.chain for starter in starters)} == {0}


def test_a_plan_without_a_chain_needs_no_meeting(make_plan: MakePlan, tmp_path: Path) -> None:
    plan = make_plan(3, spread=[])
    starters = [Starter(), Starter()]
    run(plan, tmp_path / "meeting", starters)
    assert not list((tmp_path / "meeting").iterdir())
    assert not any(job.is_chained for starter in starters for job in starter.jobs)


def test_what_replicas_measure_is_found_by_the_spec_that_was_planned_with(
    make_plan: MakePlan, tmp_path: Path
) -> None:
    plan = make_plan(1, measure=True)
    run(plan, tmp_path / "meeting", [Starter(), Starter()])
    spec = plan.manifest.spec
    profile = StoredProfiles.of(spec).find(ChainProfile, chain_subject(spec))
    assert profile == ChainProfile(
        subject=chain_subject(spec), link_bytes_per_s=1e9, steps=tuple(STEPS)
    )


def test_the_first_request_of_a_group_pays_for_what_was_computed_together(
    make_plan: MakePlan, tmp_path: Path
) -> None:
    replicas = Replicas(make_plan(), tmp_path, 0)
    replicas._costs = {3: 100}
    requests = [EngineRequest(idx, [1] * 120, group_id=3, num_prefix_tokens=100) for idx in (0, 1)]
    assert list(replicas.noted(requests)) == requests
    outputs = [EngineOutput(idx, "x", "stop", 120, 112, 1, None) for idx in (0, 1)]
    assert [replicas.charged(output).num_cached_tokens for output in outputs] == [12, 112]
    replicas.close()


@pytest.mark.parametrize("change", [{"target_gpu": "A100"}, {"num_shards": 2}])
def test_a_chain_is_measured_again_for_another_gpu_and_for_nothing_else(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    ours = chain_subject(fake_spec(tmp_path, engine={"replicas": 2}))
    theirs = chain_subject(fake_spec(tmp_path, engine={"replicas": 2}, planner=change))
    assert (ours == theirs) == ("target_gpu" not in change)
    assert chain_subject(fake_spec(tmp_path, engine={"replicas": 3})) != ours
