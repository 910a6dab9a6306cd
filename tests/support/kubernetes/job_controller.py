"""The Job controller's rules for Indexed Jobs that the operators rely on.

As in Kubernetes 1.36, but for the back-off between failures, which tests needn't wait for.
"""

import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from support.kubernetes.objects import (
    ApiError,
    Object,
    has_condition,
    has_ended,
    is_being_deleted,
    now_text,
    seconds_since,
    with_condition,
)
from support.kubernetes.store import Store

_LABEL = "batch.kubernetes.io/"
INDEX = f"{_LABEL}job-completion-index"
_TRACKING = f"{_LABEL}job-tracking"


@dataclass
class Tally:
    """What a Job's pods have come to."""

    succeeded: set[int] = field(default_factory=set)
    failures: Counter[int] = field(default_factory=Counter)
    num_failed: int = 0
    verdict: tuple[str, str] | None = None
    """Reason and message of a failure of the whole Job."""

    def failed_indexes(self, spec: Object) -> set[int]:
        limit = spec.get("backoffLimitPerIndex", 6)
        return {i for i, count in self.failures.items() if count > limit} - self.succeeded


class JobController:
    """Brings Jobs and their pods together. Called with the store's lock."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tallies: dict[str, Tally] = {}

    def sync(self) -> None:
        """Take the next steps for all Jobs."""
        pods: dict[str, list[Object]] = {}
        for pod in self._store.items("pods"):
            if _TRACKING in pod["metadata"].get("finalizers", []):
                pods.setdefault(_owner_uid(pod), []).append(pod)
        for job in self._store.items("jobs"):
            own = pods.pop(job["metadata"]["uid"], [])
            if is_being_deleted(job) or has_condition(job, "Complete", "Failed"):
                self._release(own)
                self._expire(job)
            else:
                self._sync(job, own)
        for own in pods.values():  # the Job is gone
            self._release(own)

    def _release(self, pods: list[Object]) -> None:
        for pod in pods:
            self._store.release("pods", pod, _TRACKING)

    def _expire(self, job: Object) -> None:
        ttl_s = job["spec"].get("ttlSecondsAfterFinished")
        if ttl_s is None or is_being_deleted(job):
            return
        ended_at = max(each["lastTransitionTime"] for each in job["status"]["conditions"])
        if seconds_since(ended_at) >= ttl_s:
            where = job["metadata"]["namespace"], job["metadata"]["name"]
            self._store.delete("jobs", *where, {"propagationPolicy": "Foreground"})

    def _sync(self, job: Object, pods: list[Object]) -> None:
        spec, old = job["spec"], job["status"]
        tally = self._tallies.setdefault(job["metadata"]["uid"], Tally())
        ended = [pod for pod in pods if has_ended(pod)]
        for pod in ended:
            _count(spec, pod, tally)
        self._release(ended)
        is_suspended = bool(spec.get("suspend"))
        started = None if is_suspended else old.get("startTime") or now_text()
        tally.verdict = tally.verdict or _verdict(spec, tally, started)
        alive = [pod for pod in pods if not has_ended(pod)]
        active = [pod for pod in alive if not is_being_deleted(pod)]
        surplus = active if tally.verdict or is_suspended else _surplus(spec, tally, active)
        for pod in surplus:
            self._store.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"], {})
        active = [pod for pod in active if pod not in surplus]
        num_ending = len(alive) - len(active)
        if not surplus and not tally.verdict and not is_suspended:
            active += self._create(job, tally, alive)
        status = {
            "active": len(active),
            "ready": sum(has_condition(pod, "Ready") for pod in active),
            "terminating": num_ending,
            "succeeded": len(tally.succeeded),
            "failed": tally.num_failed,
            **({"startTime": started} if started else {}),
            **({"conditions": old["conditions"]} if "conditions" in old else {}),
        }
        status = _judged(status, spec, tally, is_suspended=is_suspended)
        self._store.set_status("jobs", job, status)

    def _create(self, job: Object, tally: Tally, alive: list[Object]) -> list[Object]:
        """Create pods for indexes that have none, as many as may run."""
        spec, namespace = job["spec"], job["metadata"]["namespace"]
        busy = tally.succeeded | tally.failed_indexes(spec) | {_index(pod) for pod in alive}
        missing = [index for index in range(spec["completions"]) if index not in busy]
        made: list[Object] = []
        for index in missing[: max(0, spec["parallelism"] - len(alive))]:
            pod = _pod(job, index)
            try:
                made.append(self._store.create("pods", namespace, pod))
            except ApiError as error:
                self._tell_refusal(job, f"Error creating: {error.message}")
                break
        return made

    def _tell_refusal(self, job: Object, message: str) -> None:
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        if self._store.find("events", namespace, f"{name}.failed") is None:
            event = {
                "metadata": {"name": f"{name}.failed", "namespace": namespace},
                "involvedObject": {"kind": "Job", "name": name, "namespace": namespace},
                "type": "Warning",
                "reason": "FailedCreate",
                "message": message,
                "lastTimestamp": now_text(),
            }
            self._store.create("events", namespace, event)


def _owner_uid(pod: Object) -> str:
    return next((str(owner["uid"]) for owner in pod["metadata"].get("ownerReferences", [])), "")


def _index(pod: Object) -> int:
    return int(pod["metadata"]["labels"][INDEX])


def _surplus(spec: Object, tally: Tally, active: list[Object]) -> list[Object]:
    """Pods to remove: of indexes that are no more, then those that don't run, the last first."""
    wanted = min(spec["parallelism"], spec["completions"] - len(tally.succeeded))

    def order(pod: Object) -> tuple[bool, ...]:
        is_index = _index(pod) < spec["completions"]
        return is_index, bool(pod["spec"].get("nodeName")), has_condition(pod, "Ready")

    by_index = sorted(active, key=_index, reverse=True)
    outside = sum(_index(pod) >= spec["completions"] for pod in active)
    return sorted(by_index, key=order)[: max(outside, len(active) - wanted)]


def _count(spec: Object, pod: Object, tally: Tally) -> None:
    """Count a pod that has ended, by the pod failure policy: the first rule that matches."""
    index = _index(pod)
    if index >= spec["completions"]:
        return
    if pod["status"]["phase"] == "Succeeded":
        tally.succeeded.add(index)
        return
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for number, rule in enumerate(spec.get("podFailurePolicy", {}).get("rules", [])):
        code = _matching_code(rule.get("onExitCodes"), pod)
        if code is None and not _has_pattern(rule.get("onPodConditions", []), pod):
            continue
        if rule["action"] == "Ignore":
            return
        if rule["action"] == "FailJob":
            container = rule["onExitCodes"]["containerName"]
            why = f"Container {container} for pod {name} failed with exit code {code}"
            why += f" matching FailJob rule at index {number}"
            tally.verdict = tally.verdict or ("PodFailurePolicy", why)
        break
    tally.num_failed += 1
    tally.failures[index] += 1


def _matching_code(rule: Any, pod: Object) -> int | None:
    for container in pod["status"].get("containerStatuses", []) if rule else ():
        terminated = container.get("state", {}).get("terminated")
        is_named = rule.get("containerName", container["name"]) == container["name"]
        if terminated and is_named and terminated["exitCode"]:
            is_listed = terminated["exitCode"] in rule["values"]
            if is_listed is (rule["operator"] == "In"):
                return int(terminated["exitCode"])
    return None


def _has_pattern(patterns: list[Object], pod: Object) -> bool:
    conditions = {each["type"]: each["status"] for each in pod["status"]["conditions"]}
    return any(conditions.get(pattern["type"]) == pattern["status"] for pattern in patterns)


def _verdict(spec: Object, tally: Tally, started: str | None) -> tuple[str, str] | None:
    limit_s = spec.get("activeDeadlineSeconds")
    if started and limit_s is not None and seconds_since(started) >= limit_s:
        return "DeadlineExceeded", "Job was active longer than specified deadline"
    failed = tally.failed_indexes(spec)
    if failed and len(failed | tally.succeeded) >= spec["completions"]:
        return "FailedIndexes", "Job has failed indexes"
    return None


def _judged(status: Object, spec: Object, tally: Tally, *, is_suspended: bool) -> Object:
    """The status with the Job's conditions; it has ended once no pod is left."""
    is_idle = not status["active"] and not status["terminating"]
    if tally.verdict is not None:
        why = dict(zip(("reason", "message"), tally.verdict, strict=True))
        status = with_condition(status, "FailureTarget", **why)
        return with_condition(status, "Failed", **why) if is_idle else status
    if len(tally.succeeded) >= spec["completions"] and not status["active"]:
        why = {
            "reason": "CompletionsReached",
            "message": "Reached expected number of succeeded pods",
        }
        status = with_condition(status, "SuccessCriteriaMet", **why)
        return with_condition(status, "Complete", **why) if is_idle else status
    if is_suspended:
        return with_condition(status, "Suspended", reason="JobSuspended", message="Job suspended")
    if any(condition["type"] == "Suspended" for condition in status.get("conditions", [])):
        return with_condition(status, "Suspended", "False", reason="JobResumed")
    return status


def _pod(job: Object, index: int) -> Object:
    """The pod of an index, as the controller completes the template."""
    metadata, template = job["metadata"], job["spec"]["template"]
    name, given, spec = metadata["name"], template.get("metadata") or {}, template["spec"]
    own = {"job-name": name, "controller-uid": metadata["uid"], "job-completion-index": str(index)}
    field = {"fieldPath": f"metadata.labels['{INDEX}']"}
    variable = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": field}}
    containers = [
        {**container, "env": [*(container.get("env") or []), variable]}
        for container in spec["containers"]
    ]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": metadata["uid"]}
    return {
        "metadata": {
            "name": f"{name}-{index}-{uuid.uuid4().hex[:5]}",
            "labels": (given.get("labels") or {}) | {_LABEL + key: own[key] for key in own},
            "annotations": {**(given.get("annotations") or {}), INDEX: str(index)},
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
            "finalizers": [_TRACKING],
        },
        "spec": {**spec, "containers": containers, "hostname": f"{name}-{index}"},
    }
