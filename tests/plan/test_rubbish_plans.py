"""Data files of a plan that aren't what was planned: refused by a typed error, never half trusted.

*Sealed*: the checksum beside the file says that it is whole, as if another release had written it.
"""

import io
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.fake_job import DS, document_rows, fake_spec, finish, write_table

from batchllm_operator.errors import BatchLLMError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.shards.parts import PART_SCHEMA
from batchllm_operator.shards.reports import COMMITTED_FILE
from batchllm_operator.shards.reuse_index import INDEX_FILE
from batchllm_operator.stored_plan.manifest import MANIFEST_FILE, describe_file
from batchllm_operator.stored_plan.shard_files import SHARD_SCHEMA
from batchllm_operator.stored_plan.stored_plan import StoredPlan

NEXT_DS = "2026-02-01"
CHANGES: dict[str, Any] = {
    "reuse_outputs": True,
    "planner": {"num_shards": 1, "estimated_output_tokens": {"learned": True}, "target_gpu": None},
}
FILES = ["rows.parquet", "shard-00000.parquet", "fingerprints.parquet", "reused.parquet"]
EARLIER_FILES = [INDEX_FILE, "lengths.parquet"]


class Job:
    """A first day that is committed, and a second one that is planned, from the same lake."""

    def __init__(self, lake: Path) -> None:
        self.lake = lake
        self.spec = fake_spec(lake, **CHANGES)
        write_table(lake / "documents", document_rows(2, 2))
        self.first = plan_job(self.spec, DS)
        finish(self.first)
        rows = [*document_rows(2, 2), {"row_key": "new", "document": "new", "query": "new"}]
        write_table(lake / "documents", rows, NEXT_DS)
        self.second = plan_job(self.spec, NEXT_DS)
        assert self.second.manifest.counts.num_reused_rows == 4
        assert set(self.second.manifest.files) == {*FILES, "groups.parquet"}
        self._whole = lake.with_name("whole")
        shutil.copytree(lake, self._whole)

    def restore(self) -> None:
        """Make everything as it was after the second day was planned."""
        shutil.rmtree(self.lake)
        shutil.copytree(self._whole, self.lake)

    def go_on(self) -> None:
        """Run and commit the second day, and plan it once more."""
        finish(self.second)
        plan_job(self.spec, NEXT_DS)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("plans") / "lake")


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    at = len(data) // 3
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def _rewritten(change: Callable[[pa.Table], pa.Table]) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        sink = io.BytesIO()
        pq.write_table(change(pq.read_table(io.BytesIO(data))), sink)
        return sink.getvalue()

    return damage


def _as_text(table: pa.Table) -> pa.Table:
    return pa.table({name: ["x"] * table.num_rows for name in table.column_names})


def _nulls(table: pa.Table) -> pa.Table:
    nulls = [pa.nulls(table.num_rows, field.type) for field in table.schema]
    return pa.table(nulls, names=table.column_names)


def _far_away(table: pa.Table) -> pa.Table:
    """Every number is a large one."""
    columns = {}
    for field in table.schema:
        column = table[field.name]
        if pa.types.is_list(field.type) and pa.types.is_integer(field.type.value_type):
            column = pa.array([[2_000_000_000]] * table.num_rows, field.type)
        elif pa.types.is_integer(field.type):
            column = pa.array([2_000_000_000] * table.num_rows, field.type)
        columns[field.name] = column
    return pa.table(columns)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "noise": lambda data: b"PAR1" + b"\xff" * 60 + b"PAR1",
    "cut": cut,
    "flipped": flipped,
    "footer": lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1",
    "other columns": _rewritten(lambda table: pa.table({"x": [1] * table.num_rows})),
    "no columns": _rewritten(lambda table: table.select([])),
    "a column less": _rewritten(lambda table: table.drop_columns(table.column_names[-1])),
    "other types": _rewritten(_as_text),
    "nulls": _rewritten(_nulls),
    "no rows": _rewritten(lambda table: table.slice(0, 0)),
    "rows twice": _rewritten(lambda table: pa.concat_tables([table, table])),
    "far away": _rewritten(_far_away),
}


def seal(plan: StoredPlan, name: str) -> None:
    """Let the manifest say that the file is whole."""
    file = describe_file(Path(plan.folder.full_path(name)))
    files = {**plan.manifest.files, name: file}
    manifest = plan.manifest.model_copy(update={"files": files})
    plan.folder.write_bytes(MANIFEST_FILE, manifest.to_bytes())


@pytest.mark.parametrize(("name", "damage"), [*zip(cycle(FILES), DAMAGES)])
def test_a_damaged_data_file(job: Job, name: str, damage: str) -> None:
    """Sealed; `tests/test_damage.py` has those whose checksum doesn't hold."""
    job.second.folder.write_bytes(name, DAMAGES[damage](job.second.folder.read_bytes(name)))
    seal(job.second, name)
    try:
        with suppress(BatchLLMError):  # by type, whatever it is
            job.go_on()
    finally:
        job.restore()


@pytest.mark.parametrize(
    ("name", "damage"), [*zip(cycle(EARLIER_FILES), DAMAGES), (INDEX_FILE, "missing")]
)
def test_a_damaged_file_of_an_earlier_day_costs_only_its_use(
    job: Job, name: str, damage: str
) -> None:
    """Of what was committed, later plans take outputs and their lengths."""
    whole = job.first.folder.read_bytes(name)
    for is_sealed in (False, True):
        if damage == "missing":
            job.first.folder.remove(name)
        else:
            job.first.folder.write_bytes(name, DAMAGES[damage](whole))
        if is_sealed and name == INDEX_FILE and damage != "missing":
            note = json.loads(job.first.folder.read_bytes(COMMITTED_FILE))
            file = describe_file(Path(job.first.folder.full_path(name)))
            note["reuse_sha256"] = file.sha256
            job.first.folder.write_bytes(COMMITTED_FILE, json.dumps(note).encode())
        try:
            again = plan_job(job.spec, NEXT_DS)
            if name == INDEX_FILE and not is_sealed:
                assert again.manifest.counts.num_reused_rows == 0
        except BatchLLMError:
            assert is_sealed
        finally:
            job.restore()


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {}},
        {"shards": []},
        {"shards": [{"file": "../../../documents/ds=2026-02-01/a.parquet"}]},
        {"shards": [{"file": "/etc/passwd"}]},
        {"shards": [{"num_parts": 7}]},
        {"shards": [{"num_parts": -1}]},
        {"shards": [{"num_rows": -1, "num_requests": 1 << 70}]},
        {"counts": {"num_rows": -5}},
        {"counts": {"num_rows": 1 << 40}},
        {"counts": {"num_rows": 3, "num_logical_tokens": -1}},
        {"ds": "../../x"},
        {"ds": ""},
        {"plan_id": "../../x"},
        {"input_version": "\x00"},
        {"max_model_len": -1},
    ],
    ids=str,
)
def test_a_manifest_that_says_what_cannot_be(job: Job, changes: dict[str, Any]) -> None:
    """As another release might write it: its checksum holds."""
    fields = job.second.manifest.model_dump(mode="json")
    for name, value in changes.items():
        if isinstance(value, dict) and value:
            fields[name] |= value
        elif isinstance(value, list) and value:
            fields[name] = [{**fields[name][0], **value[0]}]
        else:
            fields[name] = value
    manifest = type(job.second.manifest).model_construct(**fields)
    before = sorted(path for path in job.lake.parent.rglob("*") if path.is_file())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(manifest), "model_dump", lambda *_, **__: fields)
        data = manifest.to_bytes()
    job.second.folder.write_bytes(MANIFEST_FILE, data)
    try:
        with suppress(BatchLLMError):
            job.go_on()
        outside = [
            path
            for path in job.lake.parent.rglob("*")
            if path.is_file() and path not in before and job.lake / "out" not in path.parents
        ]
        assert outside == []
    finally:
        job.restore()


def test_the_schemas_are_those_of_the_files(job: Job) -> None:
    """Or the damages above would damage nothing."""
    assert pq.read_schema(job.second.folder.full_path("shard-00000.parquet")).equals(SHARD_SCHEMA)
    assert pq.read_schema(job.second.folder.full_path("reused.parquet")).equals(PART_SCHEMA)
