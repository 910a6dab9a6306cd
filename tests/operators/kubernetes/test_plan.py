"""Planning and committing in a pod of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from airflow.providers.common.compat.sdk import AirflowFailException
from support.fake_job import DS, document_rows, write_job, write_table
from support.pod_shards import NUM_ROWS, Shards, in_triggerer
from support.task_runs import TaskInstance, TaskRun

from batchllm_operator.operators import BatchLLMCommitOperator, BatchLLMPlanOperator


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
    return write_job(shards.lake, shards.lake, prompt={"system": 'Answer "$(HOME)" and $$5. '})


@in_triggerer
def test_a_pod_plans_as_the_worker_does(shards: Shards, spec: Path) -> None:
    ti = TaskInstance(task_id="plan")
    in_pod = plan_run(shards, spec, ti).wait()
    plan_uri = ti.pushed["plan_uri"]
    assert ti.pushed == {"plan_uri": plan_uri, "plan": in_pod, "num_workers": 2}
    assert (in_pod["plan_uri"], in_pod["num_shards"]) == (plan_uri, 2)
    shards.check_nothing_left()
    # Same input, same plan: the spec came through whole.
    assert plan_run(shards, spec, runner="local").wait()["plan_uri"] == plan_uri
    manifest = json.loads((Path(plan_uri) / "manifest.json").read_text())
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
    assert run.wait()["num_shards"] == 2
    shards.check_nothing_left()


@in_triggerer
def test_a_pod_that_vanished_after_planning_is_a_success(shards: Shards, spec: Path) -> None:
    shards.cluster.agent.vanish_after_finish()
    assert plan_run(shards, spec).wait()["num_shards"] == 2


@in_triggerer
def test_a_wrong_table_fails_the_task_with_its_reason(shards: Shards, spec: Path) -> None:
    fields = yaml.safe_load(spec.read_text())
    fields["prompt"]["template"] = "{no_such_column}"
    spec.write_text(yaml.safe_dump(fields))
    error = plan_run(shards, spec).failure()
    assert isinstance(error, AirflowFailException) and "no_such_column" in str(error)
    shards.check_nothing_left()


@in_triggerer
def test_a_wrong_spec_makes_no_job(shards: Shards, spec: Path) -> None:
    spec.write_text("name: x\n")
    error = plan_run(shards, spec).failure()
    assert isinstance(error, AirflowFailException) and "spec_version" in str(error)
    assert shards.jobs() == []


@in_triggerer
def test_a_pod_commits_and_a_commit_that_fails_is_none(shards: Shards) -> None:
    shards.plan()

    def commit(**options: Any) -> TaskRun:
        arguments = shards.pod_arguments() | options

        def make() -> BatchLLMCommitOperator:
            return BatchLLMCommitOperator(task_id="commit", plan_uri=shards.plan_uri, **arguments)

        return shards.start_task(make, TaskInstance(task_id="commit"))

    assert "unfinished: shard 0" in str(commit().failure())
    shards.start().wait()
    result = commit().wait()
    assert (result["num_rows_in"], result["num_rows_out"]) == (NUM_ROWS, NUM_ROWS)
    assert result == commit(runner="local").wait()
    shards.check_nothing_left()
