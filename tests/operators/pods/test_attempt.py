"""The pods of an attempt, with an API that answers as the test wants it."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client import models as k8s
from kubernetes.client.exceptions import ApiException
from support.task_runs import TaskInstance

from batchllm_operator.operators.pods.attempt import Attempt, AttemptPods, StoppedError


def pods_with(api: Any, limit_s: float = 3.0, patience_s: float = 2.0) -> AttemptPods:
    give_up = time.monotonic() + limit_s
    return AttemptPods(
        api,
        "n",
        Attempt("a", "b", 1),
        "base",
        logging.getLogger("x"),
        has_secrets=False,
        patience_s=patience_s,
        is_stopped=lambda: time.monotonic() > give_up,
        poll_s=0.01,
    )


def refusal(status: int, reason: str, message: str) -> ApiException:
    error = ApiException(status=status, reason=reason)
    error.body = json.dumps({"kind": "Status", "reason": reason, "message": message})
    return error


class FakeApi:
    """Lists one pod, and counts deletions."""

    def __init__(self, **metadata: Any) -> None:
        long_ago = datetime.now(UTC) - timedelta(hours=1)
        fields = {"name": "held", "labels": {}, "creation_timestamp": long_ago, **metadata}
        status = k8s.V1PodStatus(phase=fields.pop("phase"))
        self._pod = k8s.V1Pod(metadata=k8s.V1ObjectMeta(**fields), status=status)
        self.deletions: list[dict[str, Any]] = []

    def __call__(self) -> Any:
        return self

    def list_namespaced_pod(self, *names: str, **options: Any) -> Any:
        return SimpleNamespace(items=[self._pod])

    def delete_namespaced_pod(self, *names: str, **options: Any) -> None:
        self.deletions.append(options)


def test_a_pod_that_a_finalizer_holds_is_not_waited_for() -> None:
    """As Kueue's: deleted and ended, but there until somebody takes the finalizer away."""
    deleted = datetime.now(UTC) - timedelta(hours=1)
    api = FakeApi(phase="Failed", deletion_timestamp=deleted, finalizers=["kueue.x-k8s.io/managed"])
    assert pods_with(api).find(keep_dead=False) is None  # an ended pod works no more
    assert api.deletions == []


def test_a_clock_that_is_ahead_forces_nobody_out() -> None:
    """By this machine's clock the pod's grace has been over for an hour."""
    deleted = datetime.now(UTC) - timedelta(hours=1)
    api = FakeApi(phase="Running", deletion_timestamp=deleted, deletion_grace_period_seconds=330)
    with pytest.raises(StoppedError):
        pods_with(api, limit_s=0.3).find(keep_dead=False)
    assert api.deletions == []


def test_a_conflict_over_a_quota_is_tried_again() -> None:
    """Many pods made at once under a ResourceQuota: 409 Conflict, not 409 AlreadyExists."""

    class Api(FakeApi):
        tries = 0

        def create_namespaced_pod(self, namespace: str, pod: Any, **options: Any) -> Any:
            self.tries += 1
            if self.tries > 1:
                return pod
            message = 'Operation cannot be fulfilled on resourcequotas "gpus": the object has been'
            raise refusal(409, "Conflict", message)

    pod = k8s.V1Pod(metadata=k8s.V1ObjectMeta(name="p"), status=k8s.V1PodStatus())
    api = Api(phase="Running")
    assert pods_with(api).create(pod) is pod
    assert api.tries == 2


def test_a_name_that_a_dead_pod_has_is_not_taken() -> None:
    class Api(FakeApi):
        def create_namespaced_pod(self, *names: Any, **options: Any) -> Any:
            raise refusal(409, "AlreadyExists", 'pods "p" already exists')

        def read_namespaced_pod(self, *names: Any, **options: Any) -> Any:
            return self._pod

    pod = k8s.V1Pod(metadata=k8s.V1ObjectMeta(name="p"))
    assert pods_with(Api(phase="Failed")).create(pod) is None
    assert pods_with(Api(phase="Running")).create(pod) is not None


def test_attempts_are_told_apart_by_table_run_and_task_but_not_by_try() -> None:
    ti = TaskInstance()
    one = Attempt.of(ti, "s3://prod/out", "work")
    assert Attempt.of(TaskInstance(try_number=2), "s3://prod/out", "other").selector == one.selector
    others = [
        Attempt.of(ti, "s3://staging/out", "work"),
        Attempt.of(TaskInstance(map_index=0), "s3://prod/out", "work"),
        Attempt.of(TaskInstance(run_id="manual"), "s3://prod/out", "work"),
        Attempt.of(TaskInstance(task_id="plan"), "s3://prod/out", "work"),
    ]
    assert len({one.selector, *(other.selector for other in others)}) == 5


@pytest.mark.parametrize("stem", ["batchllm-job-0", "B_" * 80, "Umlaut ä snippets"])
def test_names_are_what_a_host_may_be_called(stem: str) -> None:
    name = Attempt("0123456789abcdef", "b", 12).pod_name(stem, 3)
    assert len(name) <= 63 and name.endswith("-01234567-12-3")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and name[0] != "-"
