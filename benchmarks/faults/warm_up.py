"""Does a small job when it is imported, so that what a command imports and compiles is there."""

import json
import os
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import deltalake  # noqa: F401 - so that no command has to
import pyiceberg.catalog.sql  # noqa: F401
import s3fs  # noqa: F401

import batchllm_operator.commit.commit_run
import batchllm_operator.lake.delta.table
import batchllm_operator.lake.iceberg.table
import batchllm_operator.plan.plan_job
import batchllm_operator.run.run_shards  # noqa: F401
from batchllm_operator.cli import main
from benchmarks.faults.job import BY_ONE, input_rows, job_json
from benchmarks.faults.tables import DS, ParquetTables, set_environment


def do_job(root: Path) -> None:
    (root / "tmp").mkdir()
    set_environment(root, None)
    tables = ParquetTables(root, None)
    tables.replace_input(input_rows(0))
    result = root / "plan.json"
    spec = job_json(BY_ONE, tables, f"{root}/lake/staging")
    main(["plan", "--job-json", spec, "--ds", DS, "--result", str(result)])
    plan_uri = json.loads(result.read_text())["plan_uri"]
    for stage in ("run", "commit"):
        main([stage, "--plan", plan_uri])


with (
    tempfile.TemporaryDirectory(prefix="batchllm-faults-") as folder,
    Path(os.devnull).open("w") as quiet,
    redirect_stdout(quiet),
    redirect_stderr(quiet),
):
    do_job(Path(folder))
