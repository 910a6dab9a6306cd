"""Jobs whose tables are in a cloud, by an Airflow connection alone."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fake_job import DS, document_rows, job_fields, write_table
from support.fork_server import ForkServer
from support.forked_children import fork_children
from support.task_runs import TaskInstance

from batchllm_operator.operators import (
    BatchLLMCommitOperator,
    BatchLLMGenerateOperator,
    BatchLLMPlanOperator,
)
from batchllm_operator.storage import Folder


def of_google(env: dict[str, str]) -> dict[str, Any]:
    extra = {"keyfile_dict": env["GOOGLE_SERVICE_ACCOUNT_KEY"]}
    return {"conn_type": "google_cloud_platform", "extra": extra}


def of_azure(env: dict[str, str]) -> dict[str, Any]:
    account, key = env["AZURE_STORAGE_ENDPOINT"], env["AZURE_STORAGE_ACCOUNT_KEY"]
    login = account.rpartition("/")[2]
    return {"conn_type": "wasb", "login": login, "host": account, "password": key}


@pytest.mark.parametrize(
    ("bucket", "fields"), [("gs_bucket", of_google), ("azure_bucket", of_azure)]
)
def test_a_jobs_tables_are_in_the_cloud_of_its_connection(
    bucket: str,
    fields: Any,
    request: pytest.FixtureRequest,
    commands: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lake = request.getfixturevalue(bucket)
    write_table(tmp_path / "documents", document_rows(4, 3))
    file = f"documents/ds={DS}/a.parquet"
    Folder.open(lake).write_bytes(file, (tmp_path / file).read_bytes())
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(fields(dict(os.environ))))
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    fork_children(commands, monkeypatch)
    spec = tmp_path / "job.yaml"
    spec.write_text(yaml.safe_dump(job_fields(lake)))
    ti = TaskInstance()

    def run(task: Any) -> dict[str, Any]:
        context: dict[str, Any] = {"ti": ti, "dag": None, "outlet_events": {}}
        return dict(type(task).execute.__wrapped__(task, context))

    plan = BatchLLMPlanOperator(task_id="plan", spec_path=str(spec), ds=DS, lake_conn_id="lake")
    uri = run(plan)["plan_uri"]
    of_plan = {"plan_uri": uri, "lake_conn_id": "lake"}
    run(BatchLLMGenerateOperator(task_id="generate", **of_plan))
    assert run(BatchLLMCommitOperator(task_id="commit", **of_plan))["num_rows_out"] == 12
    assert uri.startswith(lake)
