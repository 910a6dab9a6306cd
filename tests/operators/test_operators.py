import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import yaml
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import DAG, Asset, AssetAlias, BaseOperator, BaseOperatorLink, TriggerRule
from airflow.sdk import task as airflow_task
from airflow.sdk.execution_time.context import OutletEventAccessor, OutletEventAccessors
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from jsonschema import Draft7Validator
from support.fake_job import job_fields, write_job
from support.task_runs import TaskInstance

from batchllm_operator import __version__
from batchllm_operator.operators import (
    BatchLLMCommitOperator,
    BatchLLMGenerateOperator,
    BatchLLMPlanOperator,
    BatchLLMReportOperator,
    batchllm_task_group,
    input_asset,
    one_run_per_partition,
    stages,
    table_asset,
)
from batchllm_operator.operators.command import BatchLLMCommandOperator
from batchllm_operator.operators.jobs.owner import Attempt
from batchllm_operator.operators.jobs.pod import KINDS

RUN: dict[str, Any] = {"dag": None, "dag_run": SimpleNamespace(partition_key=None)}


def execute(task: BaseOperator, context: dict[str, Any]) -> Any:
    """Call execute itself, without the guard that wants a task runner around it."""
    return type(task).execute.__wrapped__(task, context)  # type: ignore[attr-defined]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Commands that were run; each answers with the counts of a plan of two shards."""
    calls: list[tuple[str, ...]] = []

    def run(self: BatchLLMCommandOperator, *arguments: str) -> dict[str, Any]:
        calls.append(arguments)
        return {
            "result_version": 1,
            "command": arguments[0],
            "plan_uri": "s3://b/plan-1",
            "num_shards": 2,
            "ds": "2026-01-31",
            "texts": ["not for XCom"],
        }

    monkeypatch.setattr(BatchLLMCommandOperator, "run_command", run)
    return calls


def write_spec(folder: Path, num_shards: int | None) -> str:
    return str(write_job(folder, "s3://b", planner={"num_shards": num_shards}))


def test_generate_commit_and_report_name_their_plan(ran: list[tuple[str, ...]]) -> None:
    counts = {"plan_uri": "s3://b/plan-1", "num_shards": 2}
    generate = BatchLLMGenerateOperator(task_id="g", plan_uri="s3://b/plan-1", num_workers="3")
    commit = BatchLLMCommitOperator(task_id="c", plan_uri="s3://b/plan-1")
    assert execute(generate, {"ti": TaskInstance()}) == counts
    report = BatchLLMReportOperator(task_id="r", plan_uri="s3://b/plan-1")
    assert execute(commit, {}) == counts
    assert execute(report, {}) == counts
    assert ran == [
        ("run", "--plan", "s3://b/plan-1", "--owner", mock.ANY),
        ("commit", "--plan", "s3://b/plan-1"),
        ("report", "--plan", "s3://b/plan-1"),
    ]


def test_all_tries_of_a_task_are_one_owner_and_another_run_is_another(
    ran: list[tuple[str, ...]],
) -> None:
    """By it `batchllm run` knows whether a live attempt is to be left alone."""
    task = BatchLLMGenerateOperator(task_id="g", plan_uri="s3://b/plan-1")
    for ti in (
        TaskInstance(),
        TaskInstance(try_number=2),
        TaskInstance(run_id="manual__2026-02-01"),
        TaskInstance(dag_id="other"),
    ):
        execute(task, {"ti": ti})
    first, again, *others = [call[call.index("--owner") + 1] for call in ran]
    assert first == again
    assert len({first, *others}) == 3


@given(stem=st.text(max_size=80))
def test_a_jobs_name_is_one_of_a_host_with_the_index_of_its_pods(stem: str) -> None:
    made = Attempt.of(TaskInstance(dag_id=stem), "s3://b", "plan-1")
    name = made.name
    assert len(f"{name}-99999") <= 63 and name.endswith(f"-{made.owner}")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and name[0] != "-"


def test_a_jobs_name_stays_in_all_tries_and_is_no_other_tables_runs_or_tasks() -> None:
    def name_of(ti: TaskInstance, table: str = "s3://b", work: str = "plan-1") -> str:
        return Attempt.of(ti, table, work).name

    first, again = TaskInstance(), TaskInstance(try_number=2)
    assert name_of(again, work="plan-2") == name_of(first)
    others = [
        TaskInstance(task_id="group.generate"),
        TaskInstance(dag_id="Job"),
        TaskInstance(run_id="manual__2026-02-01"),
        TaskInstance(map_index=0),
    ]
    names = {name_of(first), name_of(first, table="s3://c"), *map(name_of, others)}
    assert len(names) == 2 + len(others)
    assert {name.rpartition("-")[0] for name in names} == {"batchllm-job-generate"}


@pytest.mark.parametrize("num_failed", [0, 1234])
def test_commit_sends_each_asset_counts_and_uris_and_warns_of_failed_rows(
    monkeypatch: pytest.MonkeyPatch, num_failed: int
) -> None:
    event = {
        "ds": "2026-01-31",
        "num_rows_in": 56_789,
        "num_rows_out": 56_789,
        "num_failed_rows": num_failed,
        "num_logical_tokens": 1_000,
        "num_computed_tokens": 400,
        "num_output_tokens": 50,
        "achieved_saving_ratio": 0.6,
        "gpu_s": 3600.0,
        "cost_usd": None,
        "plan_uri": "s3://b/plan-1",
        "report_uri": "s3://b/plan-1/report.json",
        "table_uri": "s3://b",
    }
    result = {**event, "result_version": 1, "command": "commit", "model": "m", "errors": {}}
    log, events = mock.Mock(), OutletEventAccessors()
    monkeypatch.setattr(BatchLLMCommitOperator, "log", log)
    monkeypatch.setattr(BatchLLMCommandOperator, "run_command", lambda *_: result)
    outlets = [Asset("snippets"), Asset("s3://b/snippets"), AssetAlias("any")]
    task = BatchLLMCommitOperator(task_id="c", plan_uri="s3://b/plan-1", outlets=outlets)
    execute(task, {"ti": TaskInstance(), "outlet_events": events, **RUN})
    keys = [list(getattr(each, "partition_keys", ())) for each in events.values()]  # from 3.3 on
    assert keys == [[], []]
    sent = {asset.name: accessor.extra for asset, accessor in events.items()}
    assert sent == {"snippets": event, "s3://b/snippets": event}
    assert task.outcome == f"56,789 rows, {num_failed:,} failed, 60.0% of prompt tokens saved"
    warnings = [call.args[0] % call.args[1:] for call in log.warning.call_args_list]
    assert len(warnings) == (num_failed > 0)
    assert all("1,234 of 56,789 rows failed" in warning for warning in warnings)
    assert all("s3://b/plan-1/report.json" in warning for warning in warnings)


@pytest.mark.skipif(not hasattr(OutletEventAccessor, "add_partitions"), reason="of Airflow 3.3")
@pytest.mark.parametrize("given", [{"partition_key": "2026-01-31T00:00:00"}, {"is_late": True}])
def test_a_run_of_airflows_partitions_sends_its_partition_as_the_events_key(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    """Others don't: an event with a key starts no DAG whose schedule knows no keys."""
    names = stages._EVENT_FIELDS
    result = {**dict.fromkeys(names, 0), "ds": "2026-01-31", "plan_uri": "p", "report_uri": "r"}
    monkeypatch.setattr(BatchLLMCommandOperator, "run_command", lambda *_: result)
    events, asset = OutletEventAccessors(), Asset("snippets")
    task = BatchLLMCommitOperator(task_id="c", plan_uri="s3://b/plan-1", outlets=[asset])
    timetable = SimpleNamespace(partitioned_at_runtime=given.get("is_late", False))
    run = SimpleNamespace(partition_key=given.get("partition_key"))
    context = {"dag": SimpleNamespace(timetable=timetable), "dag_run": run}
    execute(task, {"ti": TaskInstance(), "outlet_events": events, **context})
    assert events[asset].partition_keys == {"2026-01-31"}


@pytest.mark.parametrize(
    ("make", "given", "rendered"),
    [
        (
            BatchLLMPlanOperator,
            {"spec_path": "{{ root }}/j.yaml", "env": {"D": "{{ ds }}"}},
            {"spec_path": "s3://b/j.yaml", "env": {"D": "2026-01-31"}, "ds": "2026-01-31"},
        ),
        (
            BatchLLMPlanOperator,
            {"spec_path": "j.yaml", "ds": "{{ conf['ds'] }}"},
            {"ds": "2026-01-31 05"},
        ),
        (
            BatchLLMGenerateOperator,
            {"plan_uri": "{{ root }}/p", "num_workers": "{{ 10 }}", "queue_name": "{{ ds }}"},
            {"plan_uri": "s3://b/p", "num_workers": "10", "queue_name": "2026-01-31"},
        ),
        (BatchLLMCommitOperator, {"plan_uri": "{{ root }}/p"}, {"plan_uri": "s3://b/p"}),
    ],
)
def test_templates_are_rendered(make: Any, given: Any, rendered: dict[str, Any]) -> None:
    task = make(task_id="t", **given)
    conf = {"ds": "2026-01-31 05"}
    task.render_template_fields({"ds": "2026-01-31", "root": "s3://b", "conf": conf, **RUN})
    assert {name: getattr(task, name) for name in rendered} == rendered


@pytest.mark.parametrize("ds", ["{{ ds }}", "{{ logical_date.strftime('%Y%m%d') }}", "{{ day }}"])
@pytest.mark.parametrize("context", [{}, {"logical_date": None}])
def test_a_run_without_a_logical_date_says_how_to_name_its_partition(
    ds: str, context: dict[str, Any], tmp_path: Path
) -> None:
    with DAG("job", schedule=None):  # whose templates are strict
        task = BatchLLMPlanOperator(task_id="p", spec_path=write_spec(tmp_path, 1), ds=ds)
    with pytest.raises(AirflowFailException, match=r"no logical date.*dag_run.conf\['ds'\]"):
        task.render_template_fields(cast(Any, context))


def test_a_template_of_another_field_is_not_taken_for_the_partitions(tmp_path: Path) -> None:
    with DAG("job", schedule=None):
        env = {"DAY": "{{ logical_date.day }}"}
        spec = write_spec(tmp_path, 1)
        task = BatchLLMPlanOperator(task_id="p", spec_path=spec, ds="{{ conf.ds }}", env=env)
    with pytest.raises(UndefinedError):
        task.render_template_fields(cast(Any, {"conf": {"ds": "2026-01-31"}}))


@pytest.mark.parametrize("ds", ["", "None"])
def test_a_partition_without_a_name_is_refused(
    ran: list[tuple[str, ...]], tmp_path: Path, ds: str
) -> None:
    task = BatchLLMPlanOperator(task_id="p", spec_path=write_spec(tmp_path, 1), ds=ds)
    with pytest.raises(AirflowFailException, match="nothing says which partition"):
        execute(task, {"ti": TaskInstance()})
    assert ran == []


def test_task_group_wires_plan_generate_commit_report() -> None:
    with DAG("job", schedule=None) as dag:
        batchllm_task_group(
            Path("job.yaml"),
            group_id="job",
            env={"A": "1"},
            lake_conn_id="lake",
            num_workers=8,
            gpu="nvidia",
            pool="gpus",
            input_asset=Asset("documents"),
            output_asset="snippets",
        )
    tasks = [dag.get_task(f"job.{name}") for name in ("plan", "generate", "commit", "report")]
    plan, generate, commit, report = tasks
    assert plan.downstream_task_ids == {"job.generate", "job.commit", "job.report"}
    assert generate.downstream_task_ids == {"job.commit"}
    assert commit.downstream_task_ids == {"job.report"}
    assert {task.trigger_rule for task in tasks} == {TriggerRule.ALL_SUCCESS}
    assert not generate.is_mapped
    assert (generate.pool, generate.pool_slots) == ("gpus", 8)
    assert {task.pool for task in (plan, commit, report)} == {"default_pool"}
    assert (plan.inlets, commit.outlets) == ([Asset("documents")], [Asset.ref(name="snippets")])
    assert {(task.lake_conn_id, *task.env.items()) for task in tasks} == {("lake", ("A", "1"))}
    assert (plan.spec_path, plan.num_workers) == ("job.yaml", 8)
    assert (generate.num_workers.operator, generate.num_workers.key) == (plan, "num_workers")


def test_an_assets_name_gets_the_uri_of_the_specs_table(tmp_path: Path) -> None:
    """Once the spec is readable where the DAG is parsed."""
    spec = write_spec(tmp_path, 1)
    with DAG("job", schedule=None) as dag:
        batchllm_task_group(spec, input_asset="documents", output_asset="snippets")
    plan, commit = dag.get_task("batchllm.plan"), dag.get_task("batchllm.commit")
    assert plan.inlets == [Asset("documents", uri="s3://b/documents")]
    assert input_asset("documents", spec) == plan.inlets[0]
    assert commit.outlets == [Asset("snippets", uri="s3://b/out")]


@pytest.mark.parametrize(
    ("address", "uri"),
    [
        ("s3a://lake/documents/", "s3://lake/documents"),
        ("delta+s3://lake/documents", "s3://lake/documents"),
        ("gs://lake/a/b", "gs://lake/a/b"),
        (
            "delta+abfss://c@account.dfs.core.windows.net/t",
            "abfss://c@account.dfs.core.windows.net/t",
        ),
        ("iceberg://prod/sales.eu.documents", "x-iceberg://prod/sales.eu.documents"),
        ("/lake/my documents", "file:///lake/my%20documents"),
        ("file:///lake/documents", "file:///lake/documents"),
    ],
)
def test_a_tables_asset_has_a_uri_that_airflow_keeps(address: str, uri: str) -> None:
    assert table_asset("documents", address) == Asset("documents", uri=uri)
    assert table_asset("documents", address).uri == uri


@pytest.mark.parametrize("address", ["lake/documents", "iceberg://prod", "http://lake/documents"])
def test_what_is_no_tables_address_is_no_asset(address: str) -> None:
    with pytest.raises(ValueError, match=r"relative path|write iceberg|isn't a storage"):
        table_asset("documents", address)


def test_task_group_repeats_plan_and_generate_for_each_round(tmp_path: Path) -> None:
    fields = job_fields(str(tmp_path))
    del fields["prompt"], fields["sampling"]
    texts = {"topic": "{query}", "title": "{query}: {topic}", "again": "{title}"}
    fields["prompts"] = {name: {"template": text} for name, text in texts.items()}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(fields))
    with DAG("job", schedule=None) as dag:
        batchllm_task_group(tmp_path / "job.yaml", group_id="job", pool="gpus")
    names = ["plan", "generate", "plan_2", "generate_2", "plan_3", "generate_3", "commit"]
    tasks = [dag.get_task(f"job.{name}") for name in names]
    for task, after in pairwise(tasks):
        assert after.task_id in task.downstream_task_ids
    for plan, generate in (tasks[:2], tasks[2:4], tasks[4:6]):
        assert generate.plan_uri.operator == generate.num_workers.operator == plan
    assert dag.get_task("job.commit").plan_uri.operator == tasks[4]
    assert dag.get_task("job.report").plan_uri.operator == tasks[4]


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        ({"num_workers": 8, "gpu": "amd"}, 8),
        ({"num_workers": 8, "generate_args": {"runner": "kubernetes"}}, 8),
        ({"num_workers": 8}, 1),  # one worker here
        ({"num_workers": "{{ params.workers }}", "gpu": "amd"}, 1),
        ({"gpu": "amd"}, 1),
    ],
)
def test_generate_takes_a_slot_of_its_pool_for_each_pod(arguments: Any, slots: int) -> None:
    with DAG("job", schedule=None) as dag:
        batchllm_task_group("job.yaml", pool="gpus", **arguments)
    assert dag.get_task("batchllm.generate").pool_slots == slots


def test_task_group_lets_arguments_of_a_task_override_its_own() -> None:
    own: dict[str, dict[str, Any]] = {
        "plan": {"ds": "{{ params.day }}", "queue": "plans"},
        "generate": {"gpu_count": 2, "pool": "mine", "num_workers": 3},
        "commit": {"runner": "kubernetes", "outlets": [], "pool": "commits"},
        "report": {"lake_conn_id": None, "retries": 5},
    }
    with DAG("job", schedule=None) as dag:
        arguments: Any = {f"{name}_args": fields for name, fields in own.items()}
        batchllm_task_group("job.yaml", pool="gpus", lake_conn_id="lake", **arguments)
    for name, fields in own.items():
        task = dag.get_task(f"batchllm.{name}")
        assert {field: getattr(task, field) for field in fields} == fields


def test_the_group_takes_templates_assets_and_a_partition_that_a_task_names() -> None:
    """A template of workers is rendered at each look: that is how a running Job is scaled."""
    output = Asset("snippets", uri="s3://b/snippets")
    with DAG("job", schedule=None) as dag:
        ds = one_run_per_partition(Asset("documents"))
        workers = "{{ var.value.workers }}"
        batchllm_task_group("job.yaml", ds=ds, output_asset=output, num_workers=workers)
    plan = dag.get_task("batchllm.plan")
    assert plan.upstream_task_ids == {"arrival.partition"}
    assert "task_ids='arrival.partition'" in plan.ds and "key='return_value'" in plan.ds
    assert dag.get_task("batchllm.commit").outlets == [output]
    assert plan.num_workers == dag.get_task("batchllm.generate").num_workers == workers


def test_a_spec_may_be_what_a_task_returns() -> None:
    with DAG("job", schedule=None) as dag:

        @airflow_task
        def spec() -> dict[str, Any]:
            return job_fields("/lake", prompt={"template": "{document} {{json}}"})

        batchllm_task_group(spec(), input_asset="documents")
    plan = dag.get_task("batchllm.plan")
    assert plan.upstream_task_ids == {"spec"} and plan.report_root is None
    assert plan.inlets == [Asset.ref(name="documents")]
    plan.spec_path = spec.function()  # as Airflow renders it
    assert plan.spec.prompt.template == "{document} {{json}}"
    assert plan.command({})[:2] == ["plan", "--job-json"]


@pytest.mark.parametrize("default", ["True", "False"])
def test_airflows_setting_decides_what_is_deferred(
    default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", default)
    generate = BatchLLMGenerateOperator(task_id="g", plan_uri="s3://b/plan-1", gpu="nvidia")
    assert generate.deferrable == (default == "True")
    given = BatchLLMGenerateOperator(task_id="h", plan_uri="s3://b/plan-1", deferrable=False)
    assert given.deferrable is False


def test_provider_info_fits_airflows_schema_and_loads_no_operator() -> None:
    """Every Airflow process reads it before the modules that operators need can be imported."""
    code = (
        "import json, sys; from batchllm_operator.provider import get_provider_info;"
        "print(json.dumps([get_provider_info(), 'airflow' in sys.modules]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    info, is_loaded = json.loads(run.stdout)
    schema = json.loads(files("airflow").joinpath("provider_info.schema.json").read_text())
    Draft7Validator(schema).validate(info)
    assert (info["package-name"], is_loaded) == ("batchllm-operator", False)
    assert info["versions"] == [__version__]
    listed = [*info["operators"], *info["triggers"]]
    for module in (name for each in listed for name in each["python-modules"]):
        import_module(module)
    for module, _, name in (each.rpartition(".") for each in info["extra-links"]):
        assert issubclass(getattr(import_module(module), name), BaseOperatorLink)


def test_the_documented_example_for_kubernetes_makes_pods() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operate" / "airflow.md").read_text(
        encoding="utf-8"
    )
    blocks = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    (example,) = [block for block in blocks if 'gpu="nvidia"' in block]
    with DAG("readme", schedule=None) as dag:
        exec(example, {"batchllm_task_group": batchllm_task_group})
    plan = dag.get_task("batchllm.plan")
    assert isinstance(plan, BatchLLMPlanOperator)
    assert (plan.runner, plan.namespace, plan.lake_conn_id) == ("kubernetes", "batch-gpu", "lake")
    generate = dag.get_task("batchllm.generate")
    assert (generate.gpu, generate.gpu_count, generate.pool) == ("nvidia", 2, "gpus")
    assert generate.memory == "96Gi"


def test_images_are_named_as_the_chart_names_them() -> None:
    values = Path(__file__).parents[2] / "helm" / "batchllm" / "values.yaml"
    named = re.findall(r"repository: (batchllm-\w+)", values.read_text(encoding="utf-8"))
    operators = set(named) - {"batchllm-spark"}  # only a SparkApplication names that one
    assert {kind["image"] for kind in KINDS.values()} == operators
    assert len(named) == len(operators) + 1
