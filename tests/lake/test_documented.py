"""What docs/reference/tables.md and docs/start/first-job.md show is what happens."""

import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
import yaml
from support.fake_job import DS, document_rows
from support.lake_tables import DeltaLake, delta_options

from batchllm_operator.cli import main
from batchllm_operator.storage.folder import Folder

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "tables.md").read_text(encoding="utf-8")
COLUMNS = [
    *("row_key", "generated_text", "finish_reason", "num_prompt_tokens", "num_cached_tokens"),
    *("num_output_tokens", "status", "error", "model", "run_id", "query"),
]
FIRST_JOB = (Path(__file__).parents[2] / "docs/start/first-job.md").read_text(encoding="utf-8")


def shown(begins: str) -> str:
    """The code block that begins so."""
    found = [block.partition("```")[0] for block in PAGE.split("\n```")[1::2]]
    [block] = [block for block in found if begins in block]
    return block.partition("\n")[2]


def documents() -> pa.Table:
    rows = pa.Table.from_pylist(document_rows(4, 3))
    return rows.append_column("ds", pa.array([DS] * rows.num_rows))


def run_spec(begins: str, lake: Path, tmp_path: Path) -> None:
    """Take the shown job through all stages, with the fake engine."""
    spec = yaml.safe_load(shown(begins).replace("/data/lake", str(lake)))
    spec["engine"] = {"backend": "fake", "extra_args": {"byte_tokens": True}}
    result = tmp_path / "plan.json"
    plan = ["plan", "--job-json", json.dumps(spec), "--ds", DS, "--result", str(result)]
    assert main(plan) == 0
    uri = json.loads(result.read_text())["plan_uri"]
    assert main(["run", "--plan", uri]) == 0
    assert main(["commit", "--plan", uri]) == 0
    manifest = json.loads((Path(uri.removeprefix("file://")) / "manifest.json").read_text())
    assert manifest["input_version"]


def test_the_delta_example(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    deltalake.write_deltalake(str(lake / "documents"), documents(), partition_by="ds")
    run_spec("# delta\n", lake, tmp_path)
    table = deltalake.DeltaTable(str(lake / "snippets"))
    assert sorted(table.schema().to_arrow().names) == sorted([*COLUMNS, "ds"])
    assert table.history()[0]["batchllm.job"] == "snippets"


def test_the_iceberg_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.transforms import IdentityTransform
    from pyiceberg.utils.config import Config

    from batchllm_operator.lake.iceberg.schema import iceberg_schema

    lake = tmp_path / "lake"
    lake.mkdir()
    for line in shown("PYICEBERG_").replace("/data/lake", str(lake)).split():
        monkeypatch.setenv(*line.split("=", 1))
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # it was read at import
    catalog = pyiceberg.catalog.load_catalog("lake")
    request.addfinalizer(catalog.close)
    catalog.create_namespace("search")
    schema = iceberg_schema(documents().schema)
    field = PartitionField(schema.find_field("ds").field_id, 1000, IdentityTransform(), "ds")
    table = catalog.create_table("search.documents", schema, partition_spec=PartitionSpec(field))
    table.append(documents())
    run_spec("# iceberg\n", lake, tmp_path)
    written = catalog.load_table("search.snippets")
    assert sorted(field.name for field in written.schema().fields) == sorted([*COLUMNS, "ds"])
    snapshot: Any = written.current_snapshot()
    assert snapshot.summary["batchllm.job"] == "snippets"
    assert len(written.scan().to_arrow()) == 12
    assert not (lake / "warehouse" / "_batchllm").exists()


def run_first_job(spec: str) -> None:
    """Give the first job's command in this folder, with the fake engine."""
    engine = "engine: {backend: fake, extra_args: {byte_tokens: true}}\n"
    Path("job.yaml").write_text(spec.replace(", chat_template: true", "") + engine, "utf-8")
    assert main(["job", "--job", "job.yaml", "--ds", DS]) == 0


def first_job_blocks(language: str) -> list[str]:
    pieces = FIRST_JOB.split(f"    ```{language}\n")[1:]
    return [dedent(piece.partition("    ```")[0]) for piece in pieces]


def test_the_first_job_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [make_table] = first_job_blocks("python")
    exec(compile(make_table.replace("2026-01-31", DS), "the first job", "exec"), {})
    run_first_job(first_job_blocks("yaml")[0])
    found = pq.read_table(tmp_path / "product_answers")
    assert found.num_rows == 9
    assert {"generated_text", "status", "error", "query"} < {*found.column_names}
    [shown_line] = re.findall(r"^9 rows: .*$", FIRST_JOB, re.MULTILINE)
    assert shown_line in capfd.readouterr().out.splitlines()


def test_the_first_job_of_a_delta_table_on_s3(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"product_id": "a", "query_id": n, "body": "b", "query": "c"} for n in range(3)]
    lake = DeltaLake(s3_bucket, tmp_path, monkeypatch, "products")
    lake.append(DS, pa.Table.from_pylist(rows))
    run_first_job(first_job_blocks("yaml")[1].replace("s3://lake", s3_bucket))
    outputs = Folder.open(f"{s3_bucket}/product_answers")
    found = deltalake.DeltaTable(outputs.uri, storage_options=delta_options(outputs))
    assert found.to_pyarrow_table().num_rows == 3
