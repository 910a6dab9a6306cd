"""Each spec of docs/examples runs, and its table has the columns that it names."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from demo_model import build_demo_model
from support.adapters import write_adapter
from support.answers_job import run_and_commit
from support.fake_job import DS

from batchllm_operator.spec import load_spec

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.yaml"))
OF_ALL_JOBS = {
    *("generated_text", "finish_reason", "num_prompt_tokens", "num_cached_tokens"),
    *("num_output_tokens", "error", "status", "model", "run_id"),
}
ROWS: list[dict[str, Any]] = [
    {
        "snippet_id": f"{document}:{query}",
        "document": document,
        "query": query,
        "language": language,
        "chat": json.dumps([{"role": "user", "content": document}]),
    }
    for document in ("A web server.", "A parser of dates.")
    for query, language in (
        ("What is it?", "dutch"),
        ("How is it installed?", "german"),
        ("Who wrote it?", None),
    )
]
HEAD = {"model.layers.0.self_attn.o_proj": (128, 128)}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "model"
    build_demo_model(folder)
    for name in ("dutch", "german"):
        write_adapter(folder.parent / "adapters" / name, HEAD)
    return folder


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_it_runs(example: Path, tmp_path: Path, model: Path) -> None:
    shutil.copytree(model.parent, tmp_path, dirs_exist_ok=True)
    (tmp_path / "documents" / f"ds={DS}").mkdir(parents=True)
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "documents" / f"ds={DS}" / "part-0.parquet")
    text = example.read_text(encoding="utf-8")
    fields = yaml.safe_load(text)
    assert "engine" not in fields
    fields["engine"] = {"backend": "fake"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(fields), encoding="utf-8")
    spec = load_spec(tmp_path / "job.yaml")
    run_and_commit(spec)
    found = pq.read_table(f"{spec.output.uri}/ds={DS}")
    assert found.num_rows == len(ROWS)
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    named = set(re.findall(r"[a-z]+(?:_[a-z]+)*", head.partition("Columns:")[2]))
    special = set(spec.output_columns) - OF_ALL_JOBS
    assert special or "those of every job" in head
    assert special <= named
    for column in special:
        assert found[column].null_count == 0, column
