"""Bad input, through the command line with the fake engine: what users see, and what is left.

Every refusal is one line on stderr that names the file, field, column or row at fault, with the
documented exit code, and without a trace in the output table.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.fake_job import DS, job_fields


@dataclass(frozen=True)
class Job:
    """A job over a small table in `folder`, and the commands to run it."""

    folder: Path
    batchllm: Any  # the fixture of conftest.py

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def write_table(self, table: pa.Table, name: str = f"ds={DS}/a.parquet") -> None:
        path = self.folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)

    def write_rows(self, *docs: Any) -> None:
        keys = [f"k{idx}" for idx in range(len(docs))]
        self.write_table(pa.table({"id": keys, "doc": list(docs), "q": ["?"] * len(docs)}))

    def write_spec(self, **changes: Any) -> None:
        own: dict[str, Any] = {
            "input": {"uri": "in", "key": "id"},
            "prompt": {"system": None, "template": "{doc}|{q}"},
            "output": {"uri": "out", "carry": []},
            "planner": {"part_rows": 2},
            "max_failed_fraction": 0.5,
        }
        for section, value in changes.items():
            own[section] = {**own.get(section, {}), **value} if isinstance(value, dict) else value
        (self.folder / "job.yaml").write_text(yaml.safe_dump(job_fields(".", **own)))

    def plan(self, *more: Any, ds: str = DS) -> Any:
        return self.batchllm("plan", "--job", self.folder / "job.yaml", "--ds", ds, *more)

    def planned(self) -> Path:
        """Plan, and return where the plan lies."""
        result = self.folder / "plan-result.json"
        outcome = self.plan("--result", result)
        assert outcome.code == 0, outcome.err
        return Path(json.loads(result.read_text(encoding="utf-8"))["plan_uri"])

    def run_all(self, plan: Path | str) -> None:
        outcome = self.batchllm("run", "--plan", plan)
        assert outcome.code == 0, outcome.err

    def finish(self) -> Path:
        """Plan, run and commit; returns where the plan lies."""
        plan = self.planned()
        self.run_all(plan)
        outcome = self.commit(plan)
        assert outcome.code == 0, outcome.err
        return plan

    def refuse(self, *words: str, code: int = 2) -> None:
        """Check that `plan` is refused with these words, and leaves no trace."""
        assert_refused(self.plan(), code, *words)
        assert not self.out.exists()

    def commit(self, plan: Path | str) -> Any:
        return self.batchllm("commit", "--plan", plan)

    def published(self) -> list[dict[str, Any]]:
        file = self.out / f"ds={DS}" / "data.parquet"
        rows: list[dict[str, Any]] = pq.read_table(file, partitioning=None).to_pylist()
        return rows


@pytest.fixture
def job(tmp_path: Path, batchllm: Any) -> Job:
    job = Job(tmp_path, batchllm)
    job.write_rows("first", "second", "third", "fourth", "fifth")
    job.write_spec()
    return job


def assert_refused(outcome: Any, code: int, *words: str) -> None:
    """One clear line, with these words in it."""
    assert outcome.code == code, outcome.err
    errors = [line for line in outcome.err.splitlines() if line.startswith("batchllm: error: ")]
    assert len(errors) == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.err.endswith(errors[0] + "\n")  # nothing after it
    for word in words:
        assert word in errors[0]


# The spec, its table and its columns


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": {"extra_args": {"dealy_s": 1}}}, ["extra_args.dealy_s", "mean delay_s"]),
        ({"prompt": {"template": "{doc} {title}"}}, ["prompt.template", "'title'", "id, doc, q"]),
        ({"prompt": {"template": "{doc.__class__}"}}, ["prompt.template", "'doc.__class__'"]),
        ({"input": {"key": ["id", "part"]}}, ["input.key", "'part'", "/in", "id, doc, q"]),
        ({"output": {"carry": ["lang"]}}, ["output.carry", "'lang'", "/in", "id, doc, q"]),
        ({"input": {"filter": [{"column": "n", "value": 1}]}}, ["input.filter", "'n'", "/in"]),
        (
            {"input": {"filter": [{"column": "doc", "op": ">", "value": 3}]}},
            ["input.filter", "/in", "'doc'", "string", "with > 3"],
        ),
        ({"input": {"uri": "nowhere"}}, ["/nowhere", "no such folder"]),
        ({"input": {"uri": f"in/ds={DS}/a.parquet"}}, [f"in/ds={DS}/a.parquet"]),
        ({"input": {"uri": "nosuch://b/t"}}, ["input.uri: nosuch:// isn't a storage", "s3://"]),
    ],
)
def test_a_spec_that_is_wrong_names_field_column_and_table(
    job: Job, changes: dict[str, Any], words: list[str]
) -> None:
    job.write_spec(**changes)
    outcome = job.plan()
    assert_refused(outcome, 2, *words)
    assert not job.out.exists()


@pytest.mark.parametrize("command", ["plan", "job"])
def test_a_command_without_job_and_partition_names_both(batchllm: Any, command: str) -> None:
    assert_refused(batchllm(command), 2, "--job FILE", "--ds DS")
    assert_refused(batchllm(command, "--ds", "2026-01-31"), 2, "--job FILE")


def test_a_partition_without_a_name_is_refused(job: Job) -> None:
    assert_refused(job.plan(ds=""), 2, "ds: is empty; name a partition")
    assert not job.out.exists()


def test_of_very_many_columns_some_are_named(job: Job) -> None:
    columns = {f"c{idx}": [1] for idx in range(5000)}
    job.write_table(pa.table({"id": ["a"], "doc": ["x"], "a\nb": ["x"], **columns}))
    outcome = job.plan()
    assert_refused(outcome, 2, "'q'", "id, doc, 'a\\nb', c0", "and 4974 more")


def test_a_table_with_a_truncated_file(job: Job) -> None:
    path = job.folder / "in" / f"ds={DS}" / "a.parquet"
    path.write_bytes(path.read_bytes()[:-10])
    job.refuse(f"ds={DS}/a.parquet")


@pytest.mark.parametrize(
    "uri", ["gcs://b/plan", "S3://b/plan", "abfs://c@a/plan", "iceberg://c/n.t"]
)
@pytest.mark.parametrize("command", ["commit", "report", "status"])
def test_a_plan_in_a_storage_that_does_not_work(job: Job, uri: str, command: str) -> None:
    assert_refused(job.batchllm(command, "--plan", uri), 2, uri, "write ", "s3://")


@pytest.mark.parametrize("layout", [f"ds={DS}", f"region=eu/ds={DS}"])
def test_outputs_inside_the_input_are_refused(job: Job, layout: str) -> None:
    shutil.copytree(job.folder / "in" / f"ds={DS}", job.folder / "lake" / layout)
    job.write_spec(input={"uri": "lake"}, output={"uri": "lake/out"})
    outcome = job.plan()
    assert_refused(outcome, 2, "output.uri", str(job.folder / "lake"))


def test_a_refused_command_writes_no_result(job: Job) -> None:
    job.write_spec(input={"uri": "nowhere"})
    result = job.folder / "result.json"
    assert_refused(job.plan("--result", result), 2)
    assert not result.exists()


def test_folder_columns_can_be_keys_carried_and_placed(job: Job) -> None:
    shutil.rmtree(job.folder / "in")
    for region in ("eu", "us"):
        table = pa.table({"id": ["a", "b"], "doc": [f"x {region}", f"y {region}"]})
        job.write_table(table, f"ds={DS}/region={region}/a.parquet")
    job.write_spec(
        input={"key": ["id", "region"]},
        prompt={"template": "{ds} {region} {doc}"},
        output={"carry": ["doc"]},
    )
    job.finish()
    rows = job.published()
    keys = [("a", "eu"), ("b", "eu"), ("a", "us"), ("b", "us")]
    assert [(row["id"], row["region"]) for row in rows] == keys
    assert len({row["generated_text"] for row in rows}) == 4


# Empty partitions


REASONS = {
    "no such partition": f"there is no partition '{DS}'; the newest are: '2025-01-01'",
    "a file without rows": "has no rows",
    "all filtered out": "has no rows that meet input.filter (of 5)",
}


@pytest.mark.parametrize("how", REASONS)
@pytest.mark.parametrize("on_empty", ["fail", "commit"])
def test_an_empty_partition(job: Job, how: str, on_empty: str) -> None:
    nothing = [{"column": "id", "value": "no such key"}] if how == "all filtered out" else []
    partition, reason = job.folder / "in" / f"ds={DS}", REASONS[how]
    if how == "no such partition":
        shutil.move(partition, job.folder / "in" / "ds=2025-01-01")
    elif how == "a file without rows":
        job.write_table(pq.read_table(partition / "a.parquet").slice(0, 0))
    job.write_spec(on_empty=on_empty, input={"filter": nothing}, output={"carry": ["q"]})
    if on_empty == "fail":
        assert_refused(job.plan(), 3, str(job.folder / "in"), DS, reason)
        assert not job.out.exists()
        return
    outcome = job.plan()
    assert outcome.code == 0
    assert "WARNING" in outcome.err
    assert reason in outcome.err
    assert list(job.planned().glob("shard-*")) == []


# Rows that can't be prompted


def test_bad_rows_get_an_error_and_the_others_a_text(job: Job) -> None:
    docs = ["good", None, "", "x" * 5000, "good too", "and good"]
    job.write_rows(*docs)
    job.write_spec(prompt={"template": "{doc}"}, output={"carry": ["doc"]})
    plan = job.finish()
    rows = job.published()
    assert [row["id"] for row in rows] == ["k0", "k1", "k2", "k3", "k4", "k5"]
    assert [row["doc"] for row in rows] == docs
    errors = [row["error"] for row in rows]
    kinds = [None, "null_value", "empty_prompt", "prompt_too_long", None, None]
    assert [error and error["kind"] for error in errors] == kinds
    for row in rows:
        assert (row["generated_text"] is None) == (row["error"] is not None)
        assert (row["finish_reason"] is None) == (row["error"] is not None)
        assert row["run_id"].startswith(f"job/{DS}/")
        assert row["model"] == "no-model"
    report = job.batchllm("report", "--plan", plan)
    assert "6 in, 3 out, 3 failed" in report.out


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([{"a": 1}]), "struct<a: int64>"),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "map<string, int64"),
        (pa.array([[["x"]]]), "list<"),
        (pa.array([b"x"]), "binary"),
        (pa.array([1], pa.duration("s")), "duration[s]"),
    ],
)
def test_a_column_that_has_no_text(job: Job, values: pa.Array, kind: str) -> None:
    """Refused by its type, before a row is read."""
    job.write_table(pa.table({"id": ["a"], "doc": ["x"], "q": values}))
    job.refuse("prompt.template", "'q'", str(job.folder / "in"), kind, "cast")


BROKEN = pa.StringArray.from_buffers(
    2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pa.py_buffer(b"x\xff\xfe")
)


@pytest.mark.parametrize(
    "column",
    [
        BROKEN,
        BROKEN.cast(pa.large_string()),
        BROKEN.cast(pa.string_view()),
        BROKEN.dictionary_encode(),
        pa.ListArray.from_arrays([0, 1, 2], BROKEN),
        pa.StructArray.from_arrays([BROKEN], ["part"]),
        pa.MapArray.from_arrays([0, 1, 2], pa.array(["k", "k"]), BROKEN),
    ],
    ids=lambda column: str(column.type.id),
)
def test_a_carried_column_that_is_not_utf8(job: Job, column: pa.Array) -> None:
    """Some readers of the output would refuse all of it."""
    for name, size in (("a", 3), ("b", 2)):
        rows = {"id": [f"{name}{n}" for n in range(size)], "doc": ["x"] * size, "q": ["?"] * size}
        good = pa.array([column[0].as_py()] * size, column.type)
        job.write_table(
            pa.table({**rows, "note": column if name == "b" else good}), f"ds={DS}/{name}.parquet"
        )
    job.write_spec(output={"carry": ["note"]})
    outcome = job.plan()
    assert_refused(outcome, 2, str(job.folder / "in"), DS, "'note'", "row 4 ", "id='b1'", "carry")
    assert not job.out.exists()


@pytest.mark.parametrize("key", [None, b"\xff"])
def test_rows_of_a_filter_are_counted_without_the_others(job: Job, key: bytes | None) -> None:
    ids = pa.array([b"a", b"b", key, b"c"]).view(pa.string())
    job.write_table(pa.table({"id": ids, "doc": ["x"] * 4, "q": ["?"] * 4, "n": [0, 0, 1, 1]}))
    job.write_spec(input={"filter": [{"column": "n", "value": 1}]})
    assert_refused(job.plan(), 2, "'id'", "row 0 (counted from 0)", "rows that input.filter keeps")
    job.write_spec()
    outcome = job.plan()
    assert_refused(outcome, 2, "'id'", "row 2 (counted from 0)")
    assert "input.filter" not in outcome.err


@pytest.mark.parametrize(
    ("field", "place", "file"),
    [
        ("uri", "file", "file"),
        ("uri", "file/out", "file"),
        ("staging_uri", "file/a/b", "file"),
        ("uri", "out", "out/_batchllm"),
    ],
)
def test_a_file_where_a_folder_is_to_be(job: Job, field: str, place: str, file: str) -> None:
    path = job.folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    job.write_spec(output={field: place})
    assert_refused(job.plan(), 2, f"output.{field}: {path} isn't a folder")


# Rows that fail in the engine


def test_a_row_that_kills_the_engine_costs_only_itself(job: Job) -> None:
    job.write_rows(*(f"row {idx}{'#' if idx in (3, 8) else ''}" for idx in range(12)))
    job.write_spec(engine={"extra_args": {"fatal_token_id": ord("#")}})
    job.finish()
    failed = [row["id"] for row in job.published() if row["error"] is not None]
    assert failed == ["k3", "k8"]


def test_no_row_that_can_be_prompted(job: Job) -> None:
    job.write_rows(None, None)
    assert_refused(job.plan(), 4, "2 of 2 rows", "null_value", "no plan was made")
    job.write_spec(max_failed_fraction=1.0)
    plan = job.planned()
    assert list(plan.glob("shard-*")) == []
    assert job.batchllm("run", "--plan", plan).code == 0, "nothing to do"
    assert job.commit(plan).code == 0
    assert [row["generated_text"] for row in job.published()] == [None, None]


# All of it on S3


def test_a_bucket_that_is_not_there(job: Job, s3_environment: None) -> None:
    job.write_spec(input={"uri": "s3://no-such-bucket/in"})
    assert_refused(job.plan(), 2, "s3://no-such-bucket/in")
    job.write_spec(output={"uri": "s3://no-such-bucket/out"})
    assert_refused(job.plan(), 1, "s3://no-such-bucket/out")


def test_an_endpoint_that_is_not_there(
    job: Job, fresh_s3_client: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the storage: a retry may help."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    job.write_spec(input={"uri": "s3://bucket/in"})
    assert_refused(job.plan(), 1, "s3://bucket/in")
    assert_refused(job.commit("s3://bucket/out/plan-1"), 1, "s3://bucket/out/plan-1")
