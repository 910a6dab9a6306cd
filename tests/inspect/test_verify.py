"""`verify`: whether what a stage was to leave in the lake is there."""

import json
from pathlib import Path

import pytest
from support.fake_job import DS, document_rows, fake_spec, job_fields, write_table

from batchllm_operator.errors import IncompleteRunError, PlanError, SpecError
from batchllm_operator.inspect.verify import record_plan, verify_plan, verify_shard
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_shard
from batchllm_operator.spec import parse_spec_json


@pytest.fixture
def plan_uri(tmp_path: Path) -> str:
    write_table(tmp_path / "documents", document_rows())
    return plan_job(fake_spec(tmp_path), DS).folder.uri


def shard_folder(plan_uri: str) -> Path:
    return Path(plan_uri) / "runs" / "shard-00000"


def test_a_finished_shard_is_what_its_report_says(plan_uri: str) -> None:
    with pytest.raises(IncompleteRunError, match=r"shard 0 of plan .* there is no report"):
        verify_shard(plan_uri, 0)
    report = run_shard(plan_uri, 0)
    before = sorted(shard_folder(plan_uri).rglob("*"))
    assert verify_shard(plan_uri, 0) == report
    assert sorted(shard_folder(plan_uri).rglob("*")) == before  # it only reads
    with pytest.raises(IncompleteRunError):
        verify_shard(plan_uri, 1)


def test_a_shard_that_a_small_partition_does_not_need_is_complete(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(1, 1))
    plan = plan_job(fake_spec(tmp_path), DS)
    for owner in (None, "a task"):
        assert verify_shard(plan.folder.uri, 1, owner).num_rows == 0
        with pytest.raises(PlanError):
            verify_shard(plan.folder.uri, 2, owner)


def test_all_parts_without_a_report_are_not_enough(plan_uri: str) -> None:
    run_shard(plan_uri, 0)
    (shard_folder(plan_uri) / "report.json").unlink()
    with pytest.raises(IncompleteRunError, match="there is no report"):
        verify_shard(plan_uri, 0)


def test_a_report_without_its_parts_is_not_enough(plan_uri: str) -> None:
    run_shard(plan_uri, 0)
    part = next(shard_folder(plan_uri).rglob("part-00001-*.parquet"))
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(IncompleteRunError, match="the first is part 1; run the shard again"):
        verify_shard(plan_uri, 0)
    part.unlink()
    with pytest.raises(IncompleteRunError, match="the first is part 1"):
        verify_shard(plan_uri, 0)
    run_shard(plan_uri, 0)
    verify_shard(plan_uri, 0)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"report_version": 2}, PlanError, "of version 2, this release reads version 1"),
        ({"plan_id": "another"}, PlanError, "that of another plan"),
        ({"num_rows": 1}, IncompleteRunError, "doesn't say what the ledger says"),
        ({"num_rows": None}, IncompleteRunError, "isn't whole"),
    ],
)
def test_a_report_that_is_not_this_shards_is_refused(
    plan_uri: str, changes: dict[str, object], error: type[Exception], reason: str
) -> None:
    run_shard(plan_uri, 0)
    path = shard_folder(plan_uri) / "report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(error, match=reason):
        verify_shard(plan_uri, 0)


def test_half_a_report_is_none(plan_uri: str) -> None:
    run_shard(plan_uri, 0)
    path = shard_folder(plan_uri) / "report.json"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(IncompleteRunError, match="isn't JSON"):
        verify_shard(plan_uri, 0)


def test_a_plans_record_leads_to_a_complete_plan(tmp_path: Path, plan_uri: str) -> None:
    spec = fake_spec(tmp_path)
    with pytest.raises(IncompleteRunError, match="record pod-1: planning hasn't come to its end"):
        verify_plan(spec, DS, "pod-1")
    result = {"plan_uri": plan_uri, "num_shards": 2}
    record_plan(spec, DS, "pod-1", result)
    assert verify_plan(spec, DS, "pod-1") == result
    with pytest.raises(IncompleteRunError):
        verify_plan(spec, DS, "pod-2")

    record = next(Path(plan_uri).parent.rglob("records/pod-1.json"))
    record.write_text(json.dumps({"record_version": 9, "result": result}))
    with pytest.raises(PlanError, match="of version 9"):
        verify_plan(spec, DS, "pod-1")
    record_plan(spec, DS, "pod-1", {"plan_uri": plan_uri + "-not"})
    with pytest.raises(PlanError):
        verify_plan(spec, DS, "pod-1")


def test_a_spec_that_goes_through_json_is_the_same_job(tmp_path: Path) -> None:
    spec = fake_spec(tmp_path)
    again = parse_spec_json(spec.model_dump_json(), source="pod")
    assert again == spec and again.identity == spec.identity
    for text, reason in (("{", "not JSON"), ("[]", "an object"), ("{}", "spec_version")):
        with pytest.raises(SpecError, match=f"pod: .*{reason}"):
            parse_spec_json(text, source="pod")


def test_a_spec_with_learned_lengths_and_filters_goes_through_json(tmp_path: Path) -> None:
    changes = {
        "planner": {"estimated_output_tokens": {"learned": True}, "memory_budget_bytes": "4GiB"},
        "input": {"filter": [{"column": "query", "op": "in", "value": ["a", "b"]}]},
        "sampling": {"stop": ["$(HOME)", "\n"]},
    }
    spec = fake_spec(tmp_path, **changes)
    assert job_fields(str(tmp_path), **changes)["sampling"]["stop"] == ["$(HOME)", "\n"]
    assert parse_spec_json(spec.model_dump_json(), source="pod") == spec
