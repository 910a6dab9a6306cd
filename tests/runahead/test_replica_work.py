"""What a run makes of a placement: the order of its requests, and what replicas are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_job import DS, document_rows, fake_spec, write_table

from batchllm_operator.engine import ChainJob, Engine, EngineJob, EngineOutput, EngineRequest
from batchllm_operator.engine.fake import FakeEngine
from batchllm_operator.engine.replicas.chain_profile import ChainProfile, chain_subject
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.engine_job import pin_revision
from batchllm_operator.run.replicas import chain_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.run.shard_work import ShardWork
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import ReplicaPlacement
from batchllm_operator.stored_plan.plan_file import PlanFile
from batchllm_operator.stored_plan.profiles import StoredProfiles, profiles_folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan

FAKE = {"engine": {"replicas": 2}, "planner": {"num_shards": 1, "part_rows": 10}}


@pytest.fixture
def plan(tmp_path: Path) -> StoredPlan:
    """Six groups of five requests in parts of two groups."""
    write_table(tmp_path / "documents", document_rows())
    return plan_job(fake_spec(tmp_path, **FAKE), DS)


def placed(plan: StoredPlan, **changes: Any) -> StoredPlan:
    """The plan with a placement in its manifest."""
    fields = {"num_replicas": 2, "makespan_s": 1.0, "without_chains_s": 2.0, **changes}
    (shard,) = plan.manifest.shards
    shard = shard.model_copy(update={"replicas": ReplicaPlacement.model_validate(fields)})
    manifest = plan.manifest.model_copy(update={"shards": (shard,)})
    plan.folder.write_bytes("manifest.json", manifest.to_bytes())
    return StoredPlan.open(plan.folder.uri)


def as_for_vllm(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"engine": spec.engine.model_copy(update={"backend": "vllm"})})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The parts that are read whole."""
    found: list[int] = []
    read = PlanFile.read_row_group

    def spy(self: PlanFile, part_idx: int, *args: Any, **kwargs: Any) -> Any:
        found.append(part_idx)
        return read(self, part_idx, *args, **kwargs)

    monkeypatch.setattr(PlanFile, "read_row_group", spy)
    return found


class Spy:
    """Starts fake engines, and remembers what it was asked for and which requests came."""

    def __init__(self, dies_after: int | None = None) -> None:
        self._dies_after = dies_after
        self.jobs: list[EngineJob] = []
        self.taken: list[EngineRequest] = []

    def __call__(self, spec: JobSpec, job: EngineJob) -> Engine:
        self.jobs.append(job)
        return _Watched(FakeEngine(spec, job.max_model_len), self.taken, self._dies_after)


class _Watched:
    def __init__(self, engine: Engine, taken: list[EngineRequest], dies_after: int | None) -> None:
        self._engine, self._taken, self._dies_after = engine, taken, dies_after

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        for at, output in enumerate(self._engine.stream(self._watch(requests))):
            if at == self._dies_after:
                raise KeyboardInterrupt
            yield output

    def _watch(self, requests: Iterator[EngineRequest]) -> Iterator[EngineRequest]:
        for request in requests:
            self._taken.append(request)
            yield request

    def close(self) -> None:
        self._engine.close()


def test_a_run_begins_with_the_groups_that_its_plan_names(plan: StoredPlan) -> None:
    marked, spy = placed(plan, spread=[{"group_id": 5}], whole_first=[3]), Spy()
    report = run_worker(marked, start=spy).shards[0]
    assert report.counts.num_rows == 30
    order = [request.group_id for request in spy.taken]
    assert sorted({request.request_idx for request in spy.taken}) == list(range(len(order)))
    assert list(dict.fromkeys(order)) == [5, 4, 3, 2, 0, 1]  # parts stay whole
    (job,) = spy.jobs
    assert job.spread_groups == {5}
    assert job.chain is None


def test_a_run_goes_on_with_what_is_left_in_that_order(plan: StoredPlan) -> None:
    marked, killed, spy = placed(plan, whole_first=[5, 3]), Spy(dies_after=17), Spy()
    with pytest.raises(KeyboardInterrupt):
        run_worker(marked, start=killed)
    report = run_worker(marked, start=spy).shards[0]
    assert report.counts.num_rows == 30
    assert report.num_resumed_parts > 0
    again = {request.request_idx for request in spy.taken}
    done = {request.request_idx for request in killed.taken} - again
    assert done | again == set(range(plan.manifest.shards[0].num_requests))
    (job,) = spy.jobs
    assert job.num_requests == len(spy.taken) == len(again)


def work_of(plan: StoredPlan, part_idxs: list[int], *first: int) -> Iterator[ShardWork]:
    with plan.open_shard(0) as file:
        yield ShardWork(file, part_idxs, has_estimates=False, first=first)


def chained(
    plan: StoredPlan, part_idxs: list[int], spread: list[dict[str, Any]], measure: bool = False
) -> tuple[ChainJob | None, list[list[int]]]:
    """What replicas are told for these parts, and a prompt of each group."""
    placement = placed(plan, spread=spread, measure=measure).manifest.shards[0].replicas
    spec = as_for_vllm(plan.manifest.spec)
    profiles = StoredProfiles(profiles_folder(spec))
    first = [group["group_id"] for group in spread]
    for work in work_of(plan, part_idxs, *first):
        known = [work.first_prompt(each) for each in first if each in work.sizes]
        return chain_job(spec, placement, work, profiles), known
    raise AssertionError


def all_parts(plan: StoredPlan) -> list[int]:
    return list(range(plan.manifest.shards[0].num_parts))


def test_replicas_are_told_the_prefix_its_split_and_how_many_come(plan: StoredPlan) -> None:
    spread = [{"group_id": 3, "split": [4, 3]}, {"group_id": 1}]
    job, (prompt, _) = chained(plan, all_parts(plan), spread)
    assert job is not None
    (group,) = job.groups
    assert group.prefix.group_id == 3
    assert group.prefix.split == (4, 3)
    assert list(group.prefix.prefix_token_ids) == prompt[:7]
    assert group.num_members == 5
    assert job.keep_profile is None


def test_groups_whose_parts_are_done_arent_computed_again(plan: StoredPlan) -> None:
    for work in work_of(plan, all_parts(plan), 0):
        ((first_part, _), *_) = work.parts()
    left = [idx for idx in all_parts(plan) if idx != first_part]
    for work in work_of(plan, left, 0):
        assert 0 not in work.sizes
    assert chained(plan, left, [{"group_id": 0, "split": [4, 3]}])[0] is None
    job, _ = chained(plan, left, [{"group_id": 0, "split": [4, 3]}], measure=True)
    assert job is not None
    assert job.groups == ()


def test_only_the_part_with_a_groups_first_request_is_read_for_its_prefix(
    plan: StoredPlan, reads: list[int]
) -> None:
    """Parts of long prompts are large, and the groups before may fill many of them."""
    for work in work_of(plan, all_parts(plan), 0, 1, 5):
        assert work.first_prompt(5)
        assert len(reads) == 1
        with pytest.raises(KeyError):
            work.first_prompt(99)


def test_what_is_measured_is_found_by_the_spec_that_was_planned_with(plan: StoredPlan) -> None:
    """A model of the hub runs at a commit; plans are made for its branch, or none."""
    job, _ = chained(plan, all_parts(plan), [{"group_id": 0, "split": [4, 3]}], measure=True)
    assert job is not None
    assert job.keep_profile is not None
    spec = as_for_vllm(plan.manifest.spec)
    assert job.subject == chain_subject(spec)
    pinned = plan.manifest.model_copy(update={"spec": spec, "model_version": "commit:abc"})
    assert chain_subject(pin_revision(pinned)) != job.subject
    job.keep_profile(
        ChainProfile(subject=job.subject, device="x", link_bytes_per_s=1e9, steps=((64, 0, 0.5),))
    )
    profiles = StoredProfiles(profiles_folder(spec))
    assert profiles.find_chain(chain_subject(spec)) is not None
