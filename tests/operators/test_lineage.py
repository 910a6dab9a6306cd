"""What tasks tell OpenLineage, as Airflow's provider asks them for it and writes it."""

import json
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException
from jsonschema import ValidationError
from support.fake_job import DS, JobFolder
from support.fork_server import ForkServer
from support.forked_children import fork_children
from support.task_runs import TaskInstance

from batchllm_operator.operators import (
    BatchLLMCommitOperator,
    BatchLLMGenerateOperator,
    BatchLLMPlanOperator,
)
from batchllm_operator.operators.assets import dataset_name
from batchllm_operator.operators.lineage import WithLineage

pytest.importorskip("airflow.providers.openlineage", reason="an extra of Airflow's")
from airflow.providers.openlineage.extractors.base import DefaultExtractor
from openlineage.client.serde import Serde
from support.openlineage import check_facets

from batchllm_operator.operators.openlineage import FACET, BatchLLMJobRunFacet


def told(task: WithLineage, *, has_ended: bool = True) -> dict[str, Any]:
    """What the provider makes of a task, as it stands in events: inputs, outputs, facets.

    All facets are as their schemas have them.
    """
    extractor = DefaultExtractor(task)
    lineage = extractor.extract_on_complete(TaskInstance()) if has_ended else extractor.extract()
    assert lineage is not None
    told = dict(json.loads(Serde.to_json(lineage)))
    check_facets(told["run_facets"])
    for table in (*told["inputs"], *told["outputs"]):
        check_facets(table["facets"])
        check_facets(table.get("inputFacets") or table.get("outputFacets") or {})
    return told


def run(task: Any) -> dict[str, Any]:
    ti = TaskInstance()
    context: dict[str, Any] = {"ti": ti, "dag": None, "outlet_events": {}}
    type(task).execute.__wrapped__(task, context)
    return ti.pushed


def test_a_run_tells_tables_versions_columns_and_figures(
    commands: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_children(commands, monkeypatch)
    job = JobFolder(tmp_path)
    job.write_rows(DS)
    output = {"uri": f"{tmp_path}/out", "carry": {"query": "question"}}
    expected = {"generated_text": {"empty": {"max": 0.5}}}
    spec = job.write_spec("job", output=output, expect=expected)
    plan = BatchLLMPlanOperator(task_id="plan", spec_path=spec, ds=DS)
    documents = {"namespace": "file", "name": f"{tmp_path}/documents"}
    (read,) = told(plan, has_ended=False)["inputs"]
    assert read == {**documents, "facets": {}, "inputFacets": {}}

    uri = run(plan)["plan_uri"]
    (read,) = told(plan)["inputs"]
    version = read["facets"]["version"]["datasetVersion"]
    fields = {field["name"]: field["type"] for field in read["facets"]["schema"]["fields"]}
    assert fields == dict.fromkeys(("row_key", "query", "document"), "string")
    assert read["inputFacets"]["inputStatistics"]["rowCount"] == 12
    assert told(plan)["run_facets"][FACET]["num_logical_tokens"] > 0

    generate = BatchLLMGenerateOperator(task_id="generate", plan_uri=uri)
    commit = BatchLLMCommitOperator(task_id="commit", plan_uri=uri)
    run(generate), run(commit)
    assert told(generate)["run_facets"][FACET]["num_rows"] == 12
    figures = told(commit)["run_facets"][FACET]
    assert figures["num_rows_out"] == 12 and figures["num_computed_tokens"] > 0
    assert {"achieved_saving_ratio", "num_output_tokens", "engine_s"} <= figures.keys()
    (read,), (written,) = told(commit)["inputs"], told(commit)["outputs"]
    assert read["facets"]["version"]["datasetVersion"] == version
    assert (written["namespace"], written["name"]) == ("file", f"{tmp_path}/out")
    (file,) = job.partition("out").iterdir()
    assert (
        written["outputFacets"]["outputStatistics"].items()
        >= {
            "rowCount": 12,
            "size": file.stat().st_size,
            "fileCount": 1,
        }.items()
    )
    assert written["facets"]["version"]["datasetVersion"] not in ("", version)
    (empty,) = written["facets"]["dataQualityAssertions"]["assertions"]
    assert empty.items() >= {"column": "generated_text", "success": True, "actual": "0.0"}.items()
    sources = written["facets"]["columnLineage"]["fields"]
    assert sources.keys() <= {field["name"] for field in written["facets"]["schema"]["fields"]}
    (kept,) = sources["question"]["inputFields"]
    assert kept["transformations"][0]["subtype"] == "IDENTITY"
    assert kept.items() >= {**documents, "field": "query"}.items()
    made = sources["generated_text"]["inputFields"]
    assert [each["field"] for each in made] == ["document", "query"]
    assert {each["transformations"][0]["subtype"] for each in made} == {"TRANSFORMATION"}


def test_a_plan_that_fails_tells_what_it_would_have_read(
    commands: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one whose spec isn't readable, and a task of a plan, nothing."""
    fork_children(commands, monkeypatch)
    spec = JobFolder(tmp_path).write_spec("job")
    plan = BatchLLMPlanOperator(task_id="plan", spec_path=spec, ds=DS)
    with pytest.raises(AirflowFailException):
        run(plan)
    (read,) = told(plan)["inputs"]
    assert read["name"] == f"{tmp_path}/documents"
    nothing: dict[str, Any] = {"inputs": [], "outputs": [], "run_facets": {}, "job_facets": {}}
    absent = BatchLLMPlanOperator(task_id="absent", spec_path=f"{tmp_path}/absent.yaml")
    assert told(absent) == told(BatchLLMCommitOperator(task_id="c", plan_uri="p")) == nothing


def test_a_commit_that_is_refused_tells_which_expectations_werent_met(
    commands: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_children(commands, monkeypatch)
    job = JobFolder(tmp_path)
    job.write_rows(DS)
    bounds = {"empty": {"max": 0.5}, "duplicate": {"min": 0.5}}
    spec = job.write_spec("job", expect={"generated_text": bounds})
    uri = run(BatchLLMPlanOperator(task_id="plan", spec_path=spec, ds=DS))["plan_uri"]
    run(BatchLLMGenerateOperator(task_id="generate", plan_uri=uri))
    commit = BatchLLMCommitOperator(task_id="commit", plan_uri=uri)
    with pytest.raises(AirflowFailException, match="1 of 2 expectations not met"):
        run(commit)
    (written,) = told(commit)["outputs"]
    assert written["name"] == f"{tmp_path}/job" and written["outputFacets"] == {}
    found = written["facets"]["dataQualityAssertions"]["assertions"]
    assert {each["assertion"]: each["success"] for each in found} == {
        "empty": True,
        "duplicate": False,
    }
    assert "generated_text" in written["facets"]["columnLineage"]["fields"]


@pytest.mark.parametrize(
    ("facets", "fault"),
    [
        ({FACET: {"num_rows": "***"}}, "is not of type 'integer'"),
        ({FACET: {"cost_usd": -1.0}}, "less than the minimum"),
        ({FACET: {"_producer": "a command"}}, "is not a 'uri'"),
        ({"job_batchllm": {}}, "job_batchllm isn't of urn:batchllm-operator"),
    ],
)
def test_the_schema_of_our_facet_refuses_what_isnt_as_it_says(
    facets: dict[str, Any], fault: str
) -> None:
    ((name, fields),) = facets.items()
    facet = {"_producer": "urn:tests", "_schemaURL": BatchLLMJobRunFacet._get_schema(), **fields}
    with pytest.raises((AssertionError, ValidationError), match=fault):
        check_facets({name: facet})


@pytest.mark.parametrize(
    ("version", "known", "layer"),
    [
        ("delta:12", "12", "delta"),
        ("iceberg:7188/3", "7188", "iceberg"),
        ("iceberg:none/0", None, "iceberg"),
        ("listing:0a1b", "0a1b", None),
    ],
)
def test_a_tables_version_is_named_as_its_format_names_it(
    version: str, known: str | None, layer: str | None
) -> None:
    task = BatchLLMPlanOperator(task_id="plan", spec_path="absent.yaml")
    table = {"uri": "iceberg://prod/sales.eu", "version": version, "columns": {}, "num_rows": 1}
    task._result = {"lineage": {"input": table}}
    (read,) = told(task)["inputs"]
    assert (read["namespace"], read["name"]) == ("iceberg://prod", "sales.eu")
    assert read["facets"].get("version", {}).get("datasetVersion") == known
    assert read["facets"].get("storage", {}).get("storageLayer") == layer


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("s3a://lake/a/documents/", ("s3://lake", "a/documents")),
        ("delta+gs://lake/documents", ("gs://lake", "documents")),
        ("abfss://c@a.dfs.core.windows.net/t", ("abfss://c@a.dfs.core.windows.net", "t")),
        ("s3://lake", ("s3://lake", "/")),
        ("delta+/lake/documents", ("file", "/lake/documents")),
    ],
)
def test_tables_have_the_names_that_openlineage_gives_them(
    address: str, name: tuple[str, str]
) -> None:
    assert dataset_name(address) == name
