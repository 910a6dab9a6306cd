"""A lake of version 0.1.0: this release reads its plan, its work and its table, or names what it
can't read.

`tests/data/make_lake.py` has made it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from data.make_lake import CHANGES, ROOT
from support.fake_job import DS, document_rows, fake_spec, write_table
from support.staged_job import Engines

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.failed_rows import find_failed_rows
from batchllm_operator.commit.report import load_report
from batchllm_operator.inspect.verify import verify_worker
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.job_status import read_status
from batchllm_operator.stored_plan.manifest import _digest, _dump
from batchllm_operator.stored_plan.stored_plan import StoredPlan

LAKE = Path(__file__).parent / "data" / "lake-0.1.0"
TABLE = f"out/ds={DS}/data.parquet"
NEXT = "2026-02-01"


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A copy, in which the plan names the copy's folder."""
    lake = tmp_path / "lake"
    shutil.copytree(LAKE, lake)
    [manifest] = lake.rglob("manifest.json")
    fields = json.loads(manifest.read_text().replace(str(ROOT), str(lake)))
    del fields["manifest_sha256"]
    manifest.write_bytes(_dump({**fields, "manifest_sha256": _digest(fields)}))
    return lake


@pytest.fixture
def plan(lake: Path) -> StoredPlan:
    [manifest] = lake.rglob("manifest.json")
    return StoredPlan.open(manifest.parent)


def published(lake: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(lake / TABLE, partitioning=None).to_pylist()
    return rows


def test_a_committed_plan_is_read_by_all_that_looks_at_it(plan: StoredPlan) -> None:
    status = read_status(plan)
    assert (status.is_committed, status.done.num_rows, status.notes) == (True, 9, ())
    assert {shard.state for shard in status.shards} == {"finished"}
    report = load_report(plan.folder.uri)
    counts = (report.plan.num_rows, report.num_rows_out, report.errors_by_kind)
    assert counts == (10, 9, {"null_value": 1})
    [failed] = find_failed_rows(plan.folder.uri, 9).rows
    assert (failed.key, failed.kind) == ({"row_key": "null"}, "null_value")
    engines = Engines()
    assert run_worker(plan, start=engines).num_finished == 2 and engines.started == []
    assert commit_run(plan) == report


def test_work_without_a_commit_is_published_as_it_was(plan: StoredPlan, lake: Path) -> None:
    before = published(lake)
    (lake / TABLE).unlink()
    for name in ("committed.json", "report.json"):
        plan.folder.remove(name)
    assert verify_worker(plan.folder.uri).num_finished == 2
    commit_run(plan)
    assert published(lake) == before


def test_work_that_was_stopped_is_gone_on_with(plan: StoredPlan, lake: Path) -> None:
    before = published(lake)
    (lake / TABLE).unlink()
    for name in ("committed.json", "runs/shard-00001/report.json"):
        plan.folder.remove(name)
    for part in Path(plan.folder.full_path("runs/shard-00001")).rglob("part-*"):
        part.unlink()
    engines = Engines()
    run_worker(plan, start=engines)
    assert engines.num_answers == plan.manifest.shards[1].num_requests
    commit_run(plan)
    names = [name for name in before[0] if name != "num_cached_tokens"]  # another engine's cache
    assert [[row[name] for name in names] for row in published(lake)] == [
        [row[name] for name in names] for row in before
    ]


def test_a_later_partition_learns_from_it_and_reuses_its_outputs(lake: Path) -> None:
    rows = [*document_rows(3, 3), {"row_key": "new", "document": "new", "query": "new"}]
    write_table(lake / "documents", rows, NEXT)
    plan = plan_job(fake_spec(lake, **CHANGES), NEXT)
    assert plan.manifest.counts.num_reused_rows == 9
    assert plan.manifest.learned is not None and plan.manifest.learned.ds == DS
    run_worker(plan)
    assert commit_run(plan).num_rows_out == 10
