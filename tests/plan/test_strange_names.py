"""Values of rows and partitions are data: never a path, a query, code or a template, wherever they
come to stand. Whole jobs over such values, from and to a table of each format."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pds
import pytest
from conftest import Batchllm
from jobs.test_lake_formats import read
from support.fake_job import DS, fake_spec, write_job, write_table
from support.lake_tables import LAKES, Lake, ParquetLake, of_plan, open_lake, publish

from batchllm_operator.answers.fakes import fake_text
from batchllm_operator.commit.commit_run import commit_run, published_plan_uri
from batchllm_operator.commit.report import load_report
from batchllm_operator.errors import BatchLLMError
from batchllm_operator.inspect.gc import find_garbage, remove_garbage
from batchllm_operator.inspect.verify import record_plan, verify_plan, verify_worker
from batchllm_operator.lake import in_order
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan

PATHS = [
    *("..", ".", "../..", "../../up", "/etc/passwd", "a/b", "a//b/", "~", "~root/x", "C:\\x"),
    *("\\", "file:///etc/passwd", "s3://other/bucket", "delta+/x", "iceberg://c/ns.t", "-rf"),
    "_batchllm",
]
TEXTS = [
    *(" a  b ", "tab\tand\nline\r\n", "naïve 表🙂", "a\u0301", "\u202eright", "%2F", "%2e%2e%2f"),
    *("%", "a=b", "ds=2026-01-31", "a?b#c&d", "*", "[a-z]", "a:b", "'", '"', "`id`", ";", "+"),
    *("null", "", "__HIVE_DEFAULT_PARTITION__"),
]
CODE = [
    *("{query}", "{{query}}", "{0.__class__.__mro__}", "%s %(x)s %n", "{% for x in y %}"),
    *("{{ 7*7 }}", "{{ self.__init__.__globals__ }}", "${HOME}", "$(touch pwned)"),
    *("__import__('os').system('x')", "'; DROP TABLE docs; --", "' OR '1'='1", "1) or (1=1"),
    *("<script>", "!!python/object:os.system", "<|im_start|>system", "<|endoftext|>", "</s>"),
    *("[INST]", "\x1b[31mred", "\x07", "=cmd|'x'!A1"),
]
VALUES = [*PATHS, *TEXTS, *CODE, "x" * 5000]


def rows_of(values: list[str]) -> list[dict[str, Any]]:
    """Rows that have such values as keys, carried columns, and in their prompts."""
    return [
        {"row_key": value, "document": f"<{value}>", "query": value, "place": number}
        for number, value in enumerate(values)
    ]


def run_job(spec: JobSpec, ds: str) -> StoredPlan:
    """Plan, run and commit; what says so is where it is looked for."""
    plan = plan_job(spec, ds)
    record_plan(spec, ds, "../pod", {"plan_uri": plan.folder.uri})
    assert verify_plan(spec, ds, "../pod")["plan_uri"] == plan.folder.uri
    run_worker(plan)
    assert verify_worker(plan.folder.uri).shards
    report = commit_run(plan.folder.uri)
    assert published_plan_uri(spec, ds) == plan.folder.uri
    assert load_report(plan.folder.uri) == report
    assert commit_run(plan.folder.uri) == report
    return plan


def check_rows(lake: Lake, ds: str, rows: list[dict[str, Any]]) -> None:
    columns = ["row_key", "query", "place", "ds", "generated_text", "error"]
    for found, given in zip(read(lake, columns, ds), rows, strict=True):
        prompt = f"Answer. {given['document']}|{given['query']}"
        expected = {name: given[name] for name in ("row_key", "query", "place")}
        text = fake_text(list(prompt.encode()))
        assert found == {**expected, "ds": ds, "generated_text": text, "error": None}


@pytest.fixture(params=LAKES)
def lakes(
    request: pytest.FixtureRequest, lake_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Lake, Lake]:
    """Input and output."""
    make = LAKES[request.param]
    spool = tmp_path / "spool"
    spool.mkdir()
    source, target = (make(lake_uri, spool, monkeypatch, name) for name in ("docs", "out"))
    return source, target


def spec_of(lakes: tuple[Lake, Lake], **changes: Any) -> JobSpec:
    source, target = lakes
    return fake_spec(
        "unused",
        input={"uri": source.address},
        output={"uri": target.address, "staging_uri": target.staging, "carry": ["query", "place"]},
        engine={"max_model_len": 20_000},
        **changes,
    )


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def check_places(root: Path, *expected: str) -> None:
    """All files lie where the table, its staging and the test's own things are."""
    inside = tuple(f"{name}/" for name in expected)
    outside = {name for name in files_below(root) if not name.startswith(inside)}
    assert outside == set()


def test_rows_of_any_value(lakes: tuple[Lake, Lake], tmp_path: Path) -> None:
    rows = rows_of(VALUES)
    lakes[0].append(DS, pa.Table.from_pylist(rows))
    run_job(spec_of(lakes), DS)
    check_rows(lakes[1], DS, rows)
    check_places(tmp_path, "lake/docs", "lake/ns", "lake/out", "lake/staging", "spool")


NAMES = [name for name in (*PATHS, *TEXTS, *CODE) if name and not name.startswith("__HIVE")]
FEW_NAMES = ["../../up", "..", "/etc/passwd", "a/b", "~", "s3://other/bucket", "%2F", "a=b"]
FEW_NAMES += [" a  b ", "naïve 表🙂", "tab\tand\nline\r\n", "$(touch pwned)", "'; DROP TABLE x"]


def local(lakes: tuple[Lake, Lake]) -> bool:
    return not lakes[0].staging.startswith("s3://")


def test_partitions_of_any_name(lakes: tuple[Lake, Lake], tmp_path: Path) -> None:
    spec = spec_of(lakes, planner={"num_shards": 1, "target_gpu": None})
    names = FEW_NAMES if isinstance(lakes[0], ParquetLake) and local(lakes) else FEW_NAMES[::3]
    names = names if local(lakes) else names[::2]
    rows = rows_of(["k"])
    before = set(tmp_path.parent.iterdir())
    for name in names:
        lakes[0].append(name, pa.Table.from_pylist(rows))
    plans = [run_job(spec, name) for name in names]
    for name in names:
        check_rows(lakes[1], name, rows)
    staging = Folder.open(f"{lakes[1].staging}/_batchllm/job")
    assert len(staging.subfolder_names()) == len(names) == len({p.folder.uri for p in plans})
    check_places(tmp_path, "lake/docs", "lake/ns", "lake/out", "lake/staging", "spool")
    assert set(tmp_path.parent.iterdir()) == before
    garbage, _ = find_garbage(spec, before=2e10)
    remove_garbage(garbage)
    assert {each.folder.exists("manifest.json") for each in plans} == {True}, "all are published"


def test_other_readers_see_the_same_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = ParquetLake(str(tmp_path), tmp_path, monkeypatch, "out")
    table = open_lake(lake)
    rows = pa.table({"row_key": ["k"]})
    for name in NAMES:
        publish(table, rows, of_plan(partition=name))
    found = pds.dataset(tmp_path / "out", partitioning="hive")
    assert set(found.to_table(columns=["ds"])["ds"].to_pylist()) == set(NAMES)
    assert table.partitions() == in_order(NAMES)


@pytest.mark.parametrize("column", ["a/../../../up", "a/b", "a=b", "naïve 表", "a b", "%2F", "$x"])
def test_partition_columns_of_any_name(tmp_path: Path, column: str) -> None:
    """Of the spec, which nobody wants to write outside of its table, either."""
    from urllib.parse import quote

    folder = tmp_path / "lake" / "documents" / f"{quote(column, safe='')}=x"
    folder.parent.mkdir(parents=True)
    write_table(tmp_path / "scratch", rows_of(["k"]))
    (tmp_path / "scratch" / f"ds={DS}").rename(folder)
    (tmp_path / "scratch").rmdir()
    spec = fake_spec(tmp_path / "lake", input={"partition_column": column})
    run_job(spec, "x")
    check_places(tmp_path, "lake/documents", "lake/out")
    [data] = (tmp_path / "lake" / "out").glob("*/data.parquet")
    assert data.parent.parent == tmp_path / "lake" / "out"


@pytest.mark.parametrize("ds", ["\0", "a\0b", "\ud800", "\udcff", "x" * 300, ""])
def test_names_that_no_partition_can_have(tmp_path: Path, batchllm: Batchllm, ds: str) -> None:
    write_table(tmp_path / "documents", rows_of(["k"]))
    job = write_job(tmp_path, tmp_path, on_empty="commit")
    before = files_below(tmp_path)
    spec = fake_spec(tmp_path, on_empty="commit")
    for action in (
        lambda: plan_job(spec, ds),
        lambda: published_plan_uri(spec, ds),
        lambda: verify_plan(spec, ds, "pod"),
    ):
        with pytest.raises(BatchLLMError):
            action()
    for arguments in (["plan"], ["plan", "--advise"], ["report"], ["verify", "--record", "pod"]):
        outcome = batchllm(*arguments, "--job", job, "--ds", ds)
        assert outcome.code in (1, 2, 3, 5), outcome.err
        assert "Traceback" not in outcome.err
    assert files_below(tmp_path) == before


def test_control_characters_of_values_do_not_reach_the_terminal(
    tmp_path: Path, batchllm: Batchllm
) -> None:
    """In errors, values are shown as Python writes them: no colours, no lines of their own."""
    rows = rows_of(["\x1b[31mred\nbatchllm: error: forged"] * 2)
    write_table(tmp_path / "documents", rows)
    outcome = batchllm("plan", "--job", write_job(tmp_path, tmp_path), "--ds", DS)
    assert outcome.code == 2
    assert "\x1b" not in outcome.err
    assert [
        line for line in outcome.err.splitlines() if line.startswith("batchllm: error: f")
    ] == []
