"""What docs/reference/tables.md shows is what happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyiceberg.catalog
import pytest
import yaml
from support.fake_job import DS, document_rows

from batchllm_operator.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "tables.md").read_text(encoding="utf-8")
COLUMNS = [
    *("row_key", "generated_text", "finish_reason", "num_prompt_tokens", "num_cached_tokens"),
    *("num_output_tokens", "status", "error", "model", "run_id", "query"),
]


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


def test_the_iceberg_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
