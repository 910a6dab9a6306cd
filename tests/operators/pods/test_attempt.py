"""The pods of an attempt, with an API that answers as the test wants it."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client import models as k8s
from kubernetes.client.exceptions import ApiException
from support.task_runs import TaskInstance
from urllib3.exceptions import ReadTimeoutError

from batchllm_operator.operators.pods.attempt import OwnerPods, SupersededError
from batchllm_operator.operators.pods.calls import ClusterCalls, StoppedError
from batchllm_operator.operators.pods.owner import LABEL, Attempt

EARLIER, LATER = Attempt("a", "b", 1, "01"), Attempt("a", "b", 2, "02")


def pods_with(
    api: Any, attempt: Attempt = EARLIER, limit_s: float = 3.0, *, has_secrets: bool = False
) -> OwnerPods:
    give_up = time.monotonic() + limit_s
    calls = ClusterCalls(
        api,
        logging.getLogger("x"),
        patience_s=2.0,
        is_stopped=lambda: time.monotonic() > give_up,
    )
    return OwnerPods(calls, "n", attempt, "base", has_secrets=has_secrets, poll_s=0.01)


def maker(attempt: Attempt) -> Callable[[int], k8s.V1Pod]:
    """What makes the pods to ask for."""

    def make(ordinal: int) -> k8s.V1Pod:
        name = attempt.pod_name("job", ordinal)
        return k8s.V1Pod(metadata=k8s.V1ObjectMeta(name=name, labels=attempt.labels))

    return make


def taken(api: Any, attempt: Attempt = EARLIER, *, keep_dead: bool = False) -> tuple[str, bool]:
    """The UID of the pod that a try takes, and whether it is new."""
    pod, is_new = pods_with(api, attempt).take(maker(attempt), keep_dead=keep_dead)
    return pod.metadata.uid, is_new


def refusal(status: int, reason: str, message: str = "") -> ApiException:
    error = ApiException(status=status, reason=reason)
    error.body = json.dumps({"kind": "Status", "reason": reason, "message": message})
    return error


class FakeApi:
    """Pods and Secrets by name, as the API keeps them; counts deletions.

    `after` are things that happen once, after the next call of a method.
    """

    def __init__(self) -> None:
        self.pods: dict[str, k8s.V1Pod] = {}
        self.secrets: dict[str, Any] = {}
        self.deletions: list[str] = []
        self.after: dict[str, Callable[[], Any]] = {}
        self._uids = map(str, count(1))

    def __call__(self) -> Any:
        return self

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.endswith(("_pod", "_secret")) or name not in self.after:
            return found
        happens = self.after.pop(name)

        def call(*args: Any, **options: Any) -> Any:
            answer = found(*args, **options)
            happens()
            return answer

        return call

    def add(self, phase: str = "Running", **metadata: Any) -> k8s.V1Pod:
        long_ago = datetime.now(UTC) - timedelta(hours=1)
        fields = {"name": "held", "labels": {}, "uid": next(self._uids), **metadata}
        meta = k8s.V1ObjectMeta(
            **{"creation_timestamp": long_ago, "resource_version": "1", **fields}
        )
        pod = k8s.V1Pod(metadata=meta, status=k8s.V1PodStatus(phase=phase))
        self.pods[meta.name] = pod
        return pod

    def list_namespaced_pod(self, *names: str, **options: Any) -> Any:
        return SimpleNamespace(items=list(self.pods.values()))

    def create_namespaced_pod(self, namespace: str, pod: k8s.V1Pod, **options: Any) -> Any:
        if pod.metadata.name in self.pods:
            raise refusal(409, "AlreadyExists")
        return self.add(name=pod.metadata.name, labels=pod.metadata.labels)

    def read_namespaced_pod(self, name: str, *names: str, **options: Any) -> Any:
        if name not in self.pods:
            raise refusal(404, "NotFound")
        return self.pods[name]

    def delete_namespaced_pod(self, name: str, *names: str, body: Any, **options: Any) -> None:
        if name not in self.pods:
            raise refusal(404, "NotFound")
        pod = self.pods[name]
        wanted = body.preconditions or k8s.V1Preconditions()
        if (wanted.uid or pod.metadata.uid) != pod.metadata.uid:
            raise refusal(409, "Conflict")
        version = pod.metadata.resource_version
        if (wanted.resource_version or version) != version:
            raise refusal(409, "Conflict")
        self.deletions.append(pod.metadata.uid)
        del self.pods[name]

    def patch_namespaced_pod(self, name: str, namespace: str, body: Any, **options: Any) -> Any:
        self.pods[name] = pod = copy.deepcopy(self.read_namespaced_pod(name))
        metadata, changes = pod.metadata, body["metadata"]
        if changes["resourceVersion"] != metadata.resource_version:
            raise refusal(409, "Conflict")
        metadata.labels = {**metadata.labels, **changes["labels"]}
        metadata.resource_version += "1"
        return pod

    def create_namespaced_secret(self, namespace: str, secret: Any, **options: Any) -> Any:
        if secret.metadata.name in self.secrets:
            raise refusal(409, "AlreadyExists")
        self.secrets[secret.metadata.name] = secret
        return SimpleNamespace(drain_conn=lambda: None, release_conn=lambda: None)

    def delete_namespaced_secret(self, name: str, *names: str, **options: Any) -> Any:
        del self.secrets[name]
        return SimpleNamespace(drain_conn=lambda: None, release_conn=lambda: None)


def test_a_pod_that_a_finalizer_holds_is_not_waited_for() -> None:
    """As Kueue's: deleted and ended, but there until somebody takes the finalizer away."""
    api, deleted = FakeApi(), datetime.now(UTC) - timedelta(hours=1)
    api.add("Failed", deletion_timestamp=deleted, finalizers=["kueue.x-k8s.io/managed"])
    assert taken(api) == ("2", True)  # an ended pod works no more
    assert api.deletions == []


def test_a_clock_that_is_ahead_forces_nobody_out() -> None:
    """By this machine's clock the pod's grace has been over for an hour."""
    api, deleted = FakeApi(), datetime.now(UTC) - timedelta(hours=1)
    api.add(deletion_timestamp=deleted, deletion_grace_period_seconds=330)
    with pytest.raises(StoppedError):
        pods_with(api, limit_s=0.3).take(maker(EARLIER), keep_dead=False)
    assert api.deletions == []


def test_a_conflict_over_a_quota_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pods made at once under a ResourceQuota: 409 Conflict, not 409 AlreadyExists."""
    api = FakeApi()
    create, tries = api.create_namespaced_pod, []

    def crowded(*args: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise refusal(409, "Conflict", 'cannot be fulfilled on resourcequotas "gpus"')
        return create(*args, **options)

    monkeypatch.setattr(api, "create_namespaced_pod", crowded)
    assert taken(api) == ("1", True)


@pytest.mark.parametrize("goes_on", [EARLIER, LATER])
def test_a_try_that_went_on_between_a_look_and_its_pod_makes_no_second_one(
    goes_on: Attempt,
) -> None:
    """Stopped there, as with its machine, while another try made a pod; then it goes on."""
    other = LATER if goes_on is EARLIER else EARLIER
    api = FakeApi()
    api.after["list_namespaced_pod"] = lambda: taken(api, other)
    if goes_on is LATER:
        assert taken(api, goes_on) == ("1", False)
    else:
        with pytest.raises(SupersededError):
            taken(api, goes_on)
    assert len(api.pods) == 1 and api.deletions == []


def test_a_try_takes_no_pod_of_a_later_one_and_removes_none() -> None:
    """Not even one that does other work, as after a plan that was made again."""
    api = FakeApi()
    api.add(labels=LATER.labels | {f"{LABEL}/work": "other"})
    with pytest.raises(SupersededError):
        taken(api, EARLIER)
    pods_with(api, EARLIER).delete_all(keep_dead=False)
    assert api.deletions == []
    assert taken(api, Attempt("a", "b", 3, "03")) == ("2", True)
    assert api.deletions == ["1"]


def test_a_pod_whose_create_was_answered_by_nobody_is_taken() -> None:
    api = FakeApi()

    def lose() -> None:
        raise refusal(500, "InternalError")

    api.after["create_namespaced_pod"] = lose
    assert taken(api) == ("1", True) and len(api.pods) == 1


def test_the_next_pod_has_the_name_of_the_last_unless_that_is_kept() -> None:
    api = FakeApi()
    (_, _), (first,) = taken(api), api.pods
    api.pods[first].status.phase = "Failed"
    assert taken(api, LATER, keep_dead=True) == ("2", True)
    assert api.deletions == [] and sorted(api.pods) == [first, first.removesuffix("0") + "1"]
    for pod in api.pods.values():
        pod.status.phase = "Failed"
    assert taken(api, LATER) == ("3", True)
    assert api.deletions == ["1", "2"] and list(api.pods) == [first]


def test_a_name_that_a_strangers_pod_has_is_refused() -> None:
    api = FakeApi()
    api.add(name=EARLIER.pod_name("job", 0))
    found = api.list_namespaced_pod

    def ours(*names: str, **options: Any) -> Any:
        return SimpleNamespace(items=[p for p in found().items if p.metadata.labels])

    api.list_namespaced_pod = ours  # type: ignore[method-assign]
    with pytest.raises(ApiException) as refused:
        taken(api)
    assert refused.value.status == 409


def test_a_pod_that_has_the_name_of_another_by_now_is_left_alone() -> None:
    api = FakeApi()
    api.add(name="p")
    pods_with(api).delete("p", "of-the-one-before")
    assert api.deletions == []
    pods_with(api).delete("p", "1")
    assert api.deletions == ["1"]


def killed_pods(api: Any, attempt: Attempt) -> OwnerPods:
    """As they are for the last calls of a task that is killed."""
    calls = ClusterCalls(
        api, logging.getLogger("x"), patience_s=1.0, limit_s=1.0, is_stopped=lambda: False
    )
    return OwnerPods(calls, "n", attempt, "base", has_secrets=False, poll_s=0.01)


def test_a_try_that_does_not_know_its_pod_deletes_no_later_ones() -> None:
    """It stood still just before it asked for one; all tries ask for the same name."""
    api = FakeApi()
    _, _ = taken(api, LATER)
    (name,) = api.pods
    killed_pods(api, EARLIER).delete(name, "")
    assert api.deletions == []
    killed_pods(api, LATER).delete(name, "")
    assert api.deletions == ["1"]


def test_a_pod_that_appears_after_its_create_was_broken_off_is_deleted() -> None:
    """As when a webhook of the cluster takes its time."""
    api, attempt = FakeApi(), EARLIER
    name, looks = attempt.pod_name("job", 0), count(1)
    read = api.read_namespaced_pod

    def slow(*names: str, **options: Any) -> Any:
        if next(looks) == 3:
            api.add("Pending", name=name, labels=attempt.labels)
        return read(*names, **options)

    api.read_namespaced_pod = slow  # type: ignore[method-assign, assignment]
    killed_pods(api, attempt).delete(name, "")
    assert api.deletions == ["1"]


def test_a_try_that_wakes_up_deletes_no_pod_that_a_later_one_has_taken_up() -> None:
    """It made the pod, and knows its UID."""
    api = FakeApi()
    assert taken(api, EARLIER) == ("1", True)
    assert taken(api, LATER) == ("1", False)
    (name,) = api.pods
    killed_pods(api, EARLIER).delete(name, "1")
    killed_pods(api, EARLIER).delete_all(keep_dead=False)
    with pytest.raises(SupersededError):
        taken(api, EARLIER)
    assert api.deletions == []
    killed_pods(api, LATER).delete(name, "1")
    assert api.deletions == ["1"]


def test_an_earlier_try_does_not_take_a_pod_back() -> None:
    """It looked before the later one took the pod up, and stood still."""
    api = FakeApi()
    assert taken(api, Attempt("a", "b", 0, "00")) == ("1", True)
    seen = api.list_namespaced_pod

    def look(*names: str, **options: Any) -> Any:
        api.list_namespaced_pod = seen  # type: ignore[method-assign]
        before = seen()
        assert taken(api, LATER) == ("1", False)
        return before

    api.list_namespaced_pod = look  # type: ignore[method-assign]
    with pytest.raises(SupersededError):
        taken(api, EARLIER)
    (pod,) = api.pods.values()
    assert pod.metadata.labels == LATER.labels and api.deletions == []


def test_a_pod_is_taken_up_also_where_it_may_not_be_labelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = FakeApi()
    assert taken(api, EARLIER) == ("1", True)

    def forbid(*args: Any, **options: Any) -> Any:
        raise refusal(403, "Forbidden")

    api.patch_namespaced_pod = forbid  # type: ignore[method-assign]
    assert taken(api, LATER) == ("1", False)
    assert [record for record in caplog.messages if "verb patch on pods" in record]


def test_a_pod_that_never_appears_is_not_waited_for_for_ever() -> None:
    killed_pods(FakeApi(), EARLIER).delete("p", "")


def test_a_pod_that_cannot_be_looked_at_is_deleted_all_the_same() -> None:
    """A killed task has seconds, and a look may be what the API has no answer for."""
    api = FakeApi()
    api.add(name="p")
    limits: list[float] = []

    def silent(*names: str, _request_timeout: float) -> Any:
        limits.append(_request_timeout)
        raise ReadTimeoutError(None, "/", "no answer")

    api.read_namespaced_pod = silent  # type: ignore[method-assign, assignment]
    killed_pods(api, EARLIER).delete("p", "1")
    assert api.deletions == ["1"] and len(limits) == 1 and limits[0] <= 0.25


def test_a_pod_that_a_later_try_takes_up_after_the_look_is_left_to_it() -> None:
    """The deletion is of the pod as it was seen."""
    api = FakeApi()
    _, _ = taken(api, EARLIER)
    (name,) = api.pods

    def take_up() -> None:
        api.pods[name] = pod = copy.deepcopy(api.pods[name])
        pod.metadata.labels, pod.metadata.resource_version = LATER.labels, "2"

    api.after["read_namespaced_pod"] = take_up
    pods_with(api, EARLIER).delete(name, "1")
    assert api.deletions == []


@pytest.mark.parametrize("wakes", [EARLIER, LATER])
def test_of_two_tries_with_pods_of_different_ordinals_the_later_ones_stays(
    wakes: Attempt,
) -> None:
    """The first name was taken by an ended pod when one try looked, and free for the other."""
    other = LATER if wakes is EARLIER else EARLIER
    api = FakeApi()
    held = api.add(
        "Failed",
        name=EARLIER.pod_name("job", 0),
        labels=EARLIER.labels,
        deletion_timestamp=datetime.now(UTC),
        finalizers=["held"],
    )

    def stand_still() -> None:
        del api.pods[held.metadata.name]
        api.create_namespaced_pod("n", maker(other)(0))  # which the other had looked for before

    api.after["list_namespaced_pod"] = stand_still
    if wakes is EARLIER:
        with pytest.raises(SupersededError):
            taken(api, wakes)
        assert api.deletions == ["3"]
    else:
        assert taken(api, wakes) == ("3", True)
        assert api.deletions == ["2"]
    assert len(api.pods) == 1


def test_a_secret_of_a_pod_that_had_the_name_is_replaced() -> None:
    """The cluster removes it with that pod, also if it is changed."""
    api = FakeApi()
    before, after = api.add(name="p"), api.add(name="p")
    for pod in (before, after):
        pods_with(api, has_secrets=True).put_secret(pod, {"KEY": "k"})
    (owner,) = api.secrets["p"].metadata.owner_references
    assert owner.uid == after.metadata.uid


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
    name = Attempt("0123456789abcdef", "b", 12, "12").pod_name(stem, 3)
    assert len(name) <= 63 and name.endswith("-0123456789abcdef-3")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and name[0] != "-"
