"""The Job controller's rules that the operators rely on, for API servers that run without it.

Of Indexed Jobs: which pods there are, which failures count, and how the Job ends. Left out are
finalizers of pods (a pod that vanishes counts as it was seen last), back-off and TTL.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from support.kubernetes.api_client import ApiClient, RequestFailedError
from support.kubernetes.status import Object
from support.kubernetes.store import now_text

INDEX = "batch.kubernetes.io/job-completion-index"
_ENDED = ("Succeeded", "Failed")


@dataclass
class Tally:
    """What a Job's pods have come to."""

    succeeded: set[int] = field(default_factory=set)
    failures: Counter[int] = field(default_factory=Counter)
    num_failed: int = 0
    verdict: tuple[str, str] | None = None
    """Reason and message of a failure of the whole Job."""
    alive: dict[int, Object] = field(default_factory=dict)
    """Pods that haven't ended, terminating ones too, by index."""


class JobController:
    """Brings the Jobs of a namespace and their pods together."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self._gone: dict[str, Object] = {}
        self._removed: set[str] = set()  # by this controller: no failures

    def note_gone(self, body: Object) -> None:
        """Keep the last state of an object that is gone, if it was a Job's pod."""
        if owner_uid(body) and INDEX in body["metadata"].get("labels", {}):
            self._gone[body["metadata"]["uid"]] = body

    async def reconcile(self, job: Object, pods: Iterable[Object]) -> None:
        """Take the next steps for a Job that isn't being deleted and hasn't ended."""
        uid, spec = job["metadata"]["uid"], job["spec"]
        own = [each for each in (*self._gone.values(), *pods) if owner_uid(each) == uid]
        by_uid = {each["metadata"]["uid"]: each for each in own}
        tally = _tally(spec, by_uid, self._gone.keys(), self._removed)
        started = job.get("status", {}).get("startTime", now_text())
        suspended = bool(spec.get("suspend"))
        verdict = tally.verdict or _verdict(spec, tally, started)
        stop = verdict is not None or suspended
        await self._remove_surplus(spec, tally, stop=stop)
        if not stop:
            await self._create_missing(job, tally)
        await self._write_status(job, tally, started, verdict, suspended=suspended)

    async def _remove_surplus(self, spec: Object, tally: Tally, *, stop: bool) -> None:
        live = {i: p for i, p in tally.alive.items() if "deletionTimestamp" not in p["metadata"]}
        surplus = [i for i in live if stop or i >= spec["completions"]]
        left = sorted(live.keys() - set(surplus), key=lambda i: (is_ready(live[i]), -i))
        surplus += left[: max(0, len(left) - spec["parallelism"])]
        for index in surplus:
            self._removed.add(live[index]["metadata"]["uid"])
            await self._api.delete(f"{self._pods}/{live[index]['metadata']['name']}")

    async def _create_missing(self, job: Object, tally: Tally) -> None:
        spec = job["spec"]
        busy = tally.succeeded | tally.alive.keys() | _failed_indexes(spec, tally)
        missing = [index for index in range(spec["completions"]) if index not in busy]
        for index in missing[: max(0, spec["parallelism"] - len(tally.alive))]:
            pod = _pod(job, index)
            try:
                tally.alive[index] = await self._api.request("POST", self._pods, pod)
            except RequestFailedError as error:
                if error.code == 403:
                    await self._tell_refusal(job, pod, str(error))
                elif error.code != 404:
                    raise
                return

    async def _tell_refusal(self, job: Object, pod: Object, message: str) -> None:
        metadata = {"name": f"{job['metadata']['name']}.failed", "namespace": self._namespace}
        involved = {"kind": "Job", "name": job["metadata"]["name"], "namespace": self._namespace}
        event = {"metadata": metadata, "involvedObject": involved, "reason": "FailedCreate"}
        with contextlib.suppress(RequestFailedError):  # it was told before
            told = {**event, "type": "Warning", "message": message, "lastTimestamp": now_text()}
            path = f"/api/v1/namespaces/{self._namespace}/events"
            await self._api.request("POST", path, told)

    async def _write_status(
        self,
        job: Object,
        tally: Tally,
        started: str,
        verdict: tuple[str, str] | None,
        *,
        suspended: bool,
    ) -> None:
        alive, spec = list(tally.alive.values()), job["spec"]
        ending = [pod for pod in alive if "deletionTimestamp" in pod["metadata"]]
        status: Object = {
            "active": len(alive) - len(ending),
            "ready": sum(is_ready(pod) for pod in alive if pod not in ending),
            "terminating": len(ending),
            "succeeded": len(tally.succeeded),
            "failed": tally.num_failed,
            "startTime": None if suspended else started,
            "conditions": [],
        }
        if suspended:
            status["conditions"] = [_condition("Suspended", "JobSuspended", "Job suspended")]
        elif not alive and verdict is not None:
            status["conditions"] = [_condition("Failed", *verdict)]
        elif len(tally.succeeded) == spec["completions"]:
            reached = "Reached expected number of succeeded pods"
            status["conditions"] = [_condition("Complete", "CompletionsReached", reached)]
        old = {**job.get("status", {})}
        if _timeless(old) != _timeless(status):
            path = f"/apis/batch/v1/namespaces/{self._namespace}/jobs/{job['metadata']['name']}"
            await self._api.patch(f"{path}/status", {"status": status})

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self._namespace}/pods"


def owner_uid(pod: Object) -> str:
    owners = pod["metadata"].get("ownerReferences", [])
    return next((str(each["uid"]) for each in owners if each["kind"] == "Job"), "")


def has_finished(job: Object) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(each["type"] in ("Complete", "Failed") for each in conditions)


def is_ready(pod: Object) -> bool:
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True"


def _tally(
    spec: Object, pods: Mapping[str, Object], gone: Container[str], removed: Container[str]
) -> Tally:
    tally = Tally()
    for uid, pod in pods.items():
        index, phase = int(pod["metadata"]["labels"][INDEX]), pod["status"].get("phase")
        if phase not in _ENDED and uid not in gone:
            tally.alive[index] = pod
        elif phase == "Succeeded":
            tally.succeeded.add(index)
        elif uid not in removed:
            tally.num_failed += 1
            _judge(spec, pod, index, tally)
    return tally


def _judge(spec: Object, pod: Object, index: int, tally: Tally) -> None:
    """Apply the pod failure policy to a pod that has failed: the first rule that matches counts."""
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for number, rule in enumerate(spec.get("podFailurePolicy", {}).get("rules", [])):
        code = _matching_code(rule.get("onExitCodes"), pod)
        if code is None and not _has_condition(rule.get("onPodConditions", []), pod):
            continue
        if rule["action"] == "FailJob":
            container = rule["onExitCodes"]["containerName"]
            why = f"Container {container} for pod {name} failed with exit code {code}"
            tally.verdict = "PodFailurePolicy", f"{why} matching FailJob rule at index {number}"
        if rule["action"] in ("FailJob", "Ignore"):
            return
        break
    tally.failures[index] += 1


def _matching_code(rule: Any, pod: Object) -> int | None:
    for each in pod["status"].get("containerStatuses", []) if rule else ():
        ended = each.get("state", {}).get("terminated")
        is_named = rule.get("containerName", each["name"]) == each["name"]
        if ended and is_named and ended["exitCode"]:
            found = ended["exitCode"] in rule["values"]
            if found is (rule["operator"] == "In"):
                return int(ended["exitCode"])
    return None


def _has_condition(patterns: list[Any], pod: Object) -> bool:
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
    return any(conditions.get(each["type"]) == each["status"] for each in patterns)


def _failed_indexes(spec: Object, tally: Tally) -> set[int]:
    limit = spec.get("backoffLimitPerIndex", 6)
    return {index for index, count in tally.failures.items() if count > limit} - tally.succeeded


def _verdict(spec: Object, tally: Tally, started: str) -> tuple[str, str] | None:
    began = datetime.strptime(started, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    limit_s = spec.get("activeDeadlineSeconds")
    if limit_s is not None and (datetime.now(UTC) - began).total_seconds() > limit_s:
        return "DeadlineExceeded", "Job was active longer than specified deadline"
    failed = _failed_indexes(spec, tally)
    if failed and len(failed | tally.succeeded) >= spec["completions"]:
        return "FailedIndexes", "Job has failed indexes"
    return None


def _condition(kind: str, reason: str, message: str) -> Object:
    told = {"type": kind, "status": "True", "reason": reason, "message": message}
    return {**told, "lastTransitionTime": now_text()}


def _timeless(status: Object) -> Object:
    kinds = [each["type"] for each in status.get("conditions", [])]
    return {**{n: v for n, v in status.items() if v is not None}, "conditions": kinds}


def _pod(job: Object, index: int) -> Object:
    """The pod of an index, as the controller completes the template."""
    metadata, template = job["metadata"], job["spec"]["template"]
    name, uid = metadata["name"], metadata["uid"]
    own = {"job-name": name, "controller-uid": uid, "job-completion-index": str(index)}
    labels = {f"batch.kubernetes.io/{key}": value for key, value in own.items()}
    given = template.get("metadata", {})
    variable = {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
    spec = {**template["spec"]}
    spec["containers"] = [
        {**each, "env": [*each.get("env", []), variable]} for each in spec["containers"]
    ]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid, "controller": True}
    return {
        "metadata": {
            "name": f"{name}-{index}-{uuid.uuid4().hex[:5]}",
            "labels": {**(given.get("labels") or {}), **labels},
            "annotations": {**(given.get("annotations") or {}), INDEX: str(index)},
            "ownerReferences": [{**owner, "blockOwnerDeletion": True}],
        },
        "spec": {**spec, "hostname": f"{name}-{index}"},
    }
