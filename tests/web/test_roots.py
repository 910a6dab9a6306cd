"""Where plans are read is said by the DAG or by the API server's settings, and by no XCom."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.airflow_records import Records
from support.fake_job import job_fields

Browser = Any  # the class in conftest.py
SETTING = "AIRFLOW__BATCHLLM__REPORT_ROOTS"
RUN = "/dags/job/runs/a"
PATHS = ("", "/jobs/batchllm.plan/-1/live", "/jobs/batchllm.plan/-1/report.html")


@pytest.fixture(autouse=True)
def no_setting(all_roots: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING)


def parsed_dag(spec_path: str) -> Any:
    """A DAG with the job, parsed now."""
    from airflow.sdk import DAG

    from batchllm_operator.operators.task_group import batchllm_task_group

    with DAG("job", schedule=None) as dag:
        batchllm_task_group(spec_path)
    return dag


def write_spec(path: Path, lake: Path, **changes: Any) -> str:
    path.write_text(yaml.safe_dump(job_fields(str(lake), **changes)))
    return str(path)


def test_by_default_a_plan_is_read_where_the_spec_puts_it(
    anna: Browser, records: Records, committed: Any, tmp_path: Path
) -> None:
    """The same plan, noted in a DAG whose job writes elsewhere, isn't."""
    uri = committed.folder.uri
    records.dag(parsed_dag(write_spec(tmp_path / "job.yaml", tmp_path)))
    records.run().job(uri, outcome={})
    assert [anna.get(RUN + path).status_code for path in PATHS] == [200, 205, 200]
    for changes in ({"output": {"uri": f"{tmp_path}/ou"}}, {"name": "jo"}, {"name": "job_2"}):
        records.dag(parsed_dag(write_spec(tmp_path / "job.yaml", tmp_path, **changes)))
        for path in PATHS:
            answer = anna.get(RUN + path)
            assert answer.status_code == 409 and "report_roots" in answer.text, changes
        ref = "job/a/batchllm.plan/-1"
        assert anna.get(f"/compare?before={ref}&after={ref}").status_code == 409


def test_a_spec_that_the_parser_cannot_read_names_no_root(
    anna: Browser, records: Records, committed: Any, tmp_path: Path
) -> None:
    records.run().job(committed.folder.uri, outcome={})
    for spec_path in (None, f"{tmp_path}/absent.yaml", "{{ var.value.spec }}"):
        if spec_path is not None:
            records.dag(parsed_dag(spec_path))
        answer = anna.get(RUN)
        assert answer.status_code == 409
        assert "[batchllm] report_roots" in answer.text and "s3://BUCKET/TABLE" in answer.text


def test_the_setting_names_roots_by_dag_and_by_team(
    anna: Browser,
    records: Records,
    committed: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from batchllm_operator.web import runs

    ads = SimpleNamespace(get_team_name=lambda dag_id: "ads")
    monkeypatch.setattr(runs, "DagModel", ads)
    records.run().job(committed.folder.uri, outcome={})
    lake = str(tmp_path)
    settings: list[tuple[Any, int]] = [
        ({"jo?": [lake]}, 200),
        ({"job": [], "j*": ["/nowhere", f"{lake}/out"]}, 200),
        ({"team:ads": [lake]}, 200),
        ({"other": [lake]}, 409),
        ({"JOB": [lake]}, 409),
        ({"team:job": [lake]}, 409),
        ({"team:ad*": [lake]}, 409),
        ({"job": []}, 409),
        ({"job": [f"{lake}-secret", "s3://lake"]}, 409),
        ({"job": lake}, 409),
        ({"job": [1]}, 409),
        ([lake], 409),
    ]
    for setting, status_code in settings:
        monkeypatch.setenv(SETTING, json.dumps(setting))
        assert anna.get(RUN).status_code == status_code, setting
    monkeypatch.setenv(SETTING, "s3://lake")
    assert "JSON object of lists" in anna.get(RUN).text
