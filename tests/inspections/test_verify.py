"""`verify`: whether what a stage was to leave in the lake is there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_job import DS, document_rows, fake_spec, planned
from support.staged_job import run_only

from batchllm_operator.errors import IncompleteRunError, PlanError
from batchllm_operator.inspect.verify import record_plan, verify_plan, verify_worker
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.stored_plan.stored_plan import StoredPlan


@pytest.fixture
def plan_uri(tmp_path: Path) -> str:
    return planned(tmp_path, document_rows()).folder.uri


def shard_folder(plan_uri: str) -> Path:
    return Path(plan_uri) / "runs" / "shard-00000"


def test_a_finished_plan_is_what_its_reports_say(plan_uri: str) -> None:
    with pytest.raises(IncompleteRunError, match=r"0 of 2 shards finished, and no worker runs"):
        verify_worker(plan_uri)
    run_only(StoredPlan.open(plan_uri), 1)
    with pytest.raises(IncompleteRunError, match=f"runs shard 0; `batchllm run --plan {plan_uri}`"):
        verify_worker(plan_uri)
    run_worker(plan_uri)
    before = sorted(Path(plan_uri).rglob("*"))
    report = verify_worker(plan_uri)
    assert (report.num_finished, report.to_result()["num_rows"]) == (2, 30)
    assert sorted(Path(plan_uri).rglob("*")) == before  # it only reads


@pytest.mark.parametrize(
    ("damaged", "damage", "warning"),
    [
        ("report.json", None, None),
        ("report.json", lambda data: data[:50], "isn't JSON"),
        ("report.json", lambda data: changed(data, plan_id="another"), "belongs elsewhere"),
        (
            "report.json",
            lambda data: data.replace(b'"num_rows": 15', b'"num_rows": 14'),
            "the ledger",
        ),
        ("report.json", lambda data: changed(data, num_parts=None), "refuses it"),
    ],
)
def test_a_damaged_shard_is_free_to_run_until_a_worker_has_mended_it(
    plan_uri: str,
    damaged: str,
    damage: Callable[[bytes], bytes] | None,
    warning: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_worker(plan_uri)
    path = next(shard_folder(plan_uri).rglob(damaged))
    whole = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(whole))
    with pytest.raises(IncompleteRunError, match="1 of 2 shards finished, and no worker runs"):
        verify_worker(plan_uri)
    assert warning is None or warning in caplog.text
    assert list(run_worker(plan_uri).shards) == [0]
    assert verify_worker(plan_uri).num_finished == 2


def test_a_report_of_another_version_is_refused(plan_uri: str) -> None:
    run_worker(plan_uri)
    path = shard_folder(plan_uri) / "report.json"
    path.write_bytes(changed(path.read_bytes(), report_version=2))
    with pytest.raises(PlanError, match="of report_version 2, this release reads 1"):
        verify_worker(plan_uri)


def changed(data: bytes, **fields: object) -> bytes:
    return json.dumps(json.loads(data) | fields).encode()


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
    with pytest.raises(PlanError, match="of record_version 9"):
        verify_plan(spec, DS, "pod-1")
    record_plan(spec, DS, "pod-1", {"plan_uri": plan_uri + "-not"})
    with pytest.raises(PlanError):
        verify_plan(spec, DS, "pod-1")
