"""Planning in a pod of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from airflow.providers.common.compat.sdk import AirflowFailException
from support.fake_job import DS, document_rows, job_fields, write_table
from support.pod_shards import Shards, in_triggerer
from support.task_runs import TaskInstance, TaskRun

from batchllm_operator.operators import BatchLLMPlanOperator


def plan_run(shards: Shards, spec: Path, ti: TaskInstance | None = None, **options: Any) -> TaskRun:
    def make() -> BatchLLMPlanOperator:
        arguments = shards.pod_arguments() | options
        return BatchLLMPlanOperator(task_id="plan", spec_path=str(spec), ds=DS, **arguments)

    run = TaskRun(make, ti or TaskInstance(task_id="plan"), shards.mode)
    shards.runs.append(run)
    return run


@pytest.fixture
def spec(shards: Shards) -> Path:
    write_table(shards.lake / "documents", document_rows())
    path = shards.lake / "job.yaml"
    fields = job_fields(str(shards.lake), prompt={"system": 'Answer "$(HOME)" and $$5. '})
    path.write_text(yaml.safe_dump(fields))
    return path


@in_triggerer
def test_a_pod_plans_as_the_worker_does(shards: Shards, spec: Path) -> None:
    ti = TaskInstance(task_id="plan")
    in_pod = plan_run(shards, spec, ti).wait()
    assert [each["worker"] for each in in_pod] == [0, 1]
    assert ti.pushed["plan_uri"] == in_pod[0]["plan_uri"]
    assert ti.pushed["plan"]["num_shards"] == 2
    shards.check_nothing_left()
    # Same input, same plan: the spec came through whole.
    assert plan_run(shards, spec, runner="local").wait() == in_pod
    manifest = json.loads((Path(in_pod[0]["plan_uri"]) / "manifest.json").read_text())
    assert manifest["spec"]["prompt"]["system"] == 'Answer "$(HOME)" and $$5. '


@in_triggerer
def test_a_plan_is_made_again_after_an_eviction(shards: Shards, spec: Path) -> None:
    shards.cluster.agent.hold_images("job:1")
    run = plan_run(shards, spec)
    shards.wait(shards.live, "a pod")
    (pod,) = shards.live()
    shards.wait(lambda: shards.cluster.waiting_reason(pod.metadata.name), "it to wait")
    shards.cluster.agent.evict(pod.metadata.name)
    shards.cluster.agent.release_images("job:1")
    assert len(run.wait()) == 2
    shards.check_nothing_left()


@in_triggerer
def test_a_pod_that_vanished_after_planning_is_a_success(shards: Shards, spec: Path) -> None:
    shards.cluster.agent.vanish_after_finish()
    assert len(plan_run(shards, spec).wait()) == 2


@in_triggerer
def test_a_wrong_table_fails_the_task_with_its_reason(shards: Shards, spec: Path) -> None:
    fields = yaml.safe_load(spec.read_text())
    fields["prompt"]["template"] = "{no_such_column}"
    spec.write_text(yaml.safe_dump(fields))
    error = plan_run(shards, spec).failure()
    assert isinstance(error, AirflowFailException) and "no_such_column" in str(error)
    shards.check_nothing_left()


@in_triggerer
def test_a_wrong_spec_makes_no_pod(shards: Shards, spec: Path) -> None:
    spec.write_text("name: x\n")
    error = plan_run(shards, spec).failure()
    assert isinstance(error, AirflowFailException) and "spec_version" in str(error)
    assert shards.cluster.pods() == []
