"""A task's Job in the cluster: creates, adopts, scales and deletes it, from worker or triggerer."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Mapping
from typing import Any, Final

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from kubernetes_asyncio.client import BatchV1Api, CoreV1Api, V1Job
from kubernetes_asyncio.client.exceptions import ApiException

from batchllm_operator.operators.jobs.calls import (
    ANSWERLESS,
    CONFLICT,
    FIRST_PAUSE_S,
    Cluster,
    ClusterCalls,
    is_absent,
    message_of,
    reason_of,
)
from batchllm_operator.operators.jobs.owner import LABEL, QUEUE, Attempt

_TRACKING: Final = "batch.kubernetes.io/job-tracking"
_CLUSTERS_OWN: Final = frozenset({_TRACKING, "foregroundDeletion"})
_MERGE_PATCH: Final = "application/merge-patch+json"
ENDING_MARGIN_S: Final = 60.0
"""Time after the grace period that a kubelet may take to report a pod's end."""
_LONGEST_WAIT_S: Final = 8.0
"""Between two looks whether a Job that is being deleted has gone; each takes three requests."""
MAX_PODS, _MANY_PODS = 50, 500
"""Pods that one request reads: a thousand each minute would weigh on the API server."""


class SupersededError(AirflowException):
    """A later try of the task has the Job, so this try is obsolete."""


class ClusterJob(ClusterCalls):
    """The Job of one name, and its pods."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        namespace: str,
        attempt: Attempt,
        *,
        log: logging.Logger | Any,
        patience_s: float,
    ) -> None:
        super().__init__(cluster, log=log, patience_s=patience_s)
        self.name, self.namespace, self.attempt = name, namespace, attempt
        self._ending_since: dict[str, float] = {}

    # The Job

    async def _call_if_there(self, api: type[Any], method: str, *args: Any, **options: Any) -> Any:
        """The answer; None if the object is gone, or isn't of the version that the call names."""
        try:
            return await self.call(api, method, *args, **options)
        except ApiException as error:
            if error.status != CONFLICT and not is_absent(error):
                raise
            return None

    async def _call_job(self, verb: str, *args: Any, **options: Any) -> Any:
        where = (self.name, self.namespace)
        return await self._call_if_there(
            BatchV1Api, f"{verb}_namespaced_job", *where, *args, **options
        )

    async def read(self, **limits: float) -> Any:
        """The Job; None if there is none of this name."""
        return await self._call_job("read", **limits)

    async def patch(self, patch: Mapping[str, Any]) -> Any:
        """Change the Job; None if it is gone, or isn't of the version that the patch names."""
        return await self._call_job("patch", patch)

    async def take(self, body: Mapping[str, Any]) -> tuple[V1Job, bool]:
        """Create the Job, or adopt the one that is there; returns it, and whether it is new.

        One of this task that has ended or does other work is deleted, and one that is being deleted
        waited for, so that two sets of pods never work side by side.

        Raises:
            SupersededError: a later try has the Job.
            AirflowException: the Job of this name isn't this task's, or stays though it is deleted.
            ApiException: the cluster refuses.
        """
        waits_since: float | None = None
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                create = "create_namespaced_job"
                return await self.call(BatchV1Api, create, self.namespace, body), True
            except ApiException as error:
                if reason_of(error) != "AlreadyExists":
                    raise
            if (job := await self.read()) is None:
                continue
            labels = job.metadata.labels or {}
            if not self.attempt.owns(labels):
                raise AirflowFailException(
                    f"Job {self.name} in namespace {self.namespace} isn't this task's (its label"
                    f" {LABEL}/attempt says so): remove it, or use another namespace"
                )
            if self.attempt.is_before(labels):
                raise SupersededError(
                    f"a later try of this task has Job {self.name}: this one ends"
                )
            if job.metadata.deletion_timestamp is None:
                if labels.items() >= self.attempt.labels.items() and not ended_condition(job):
                    if (adopted := await self._adopt(job, body)) is not None:
                        return adopted, False
                    continue
                await self.delete(job.metadata.uid)
            if waits_since is None:
                waits_since = time.monotonic()
                self._log.info("Waiting until Job %s and its pods have gone", self.name)
            await self.remove_stuck_pods()
            grace_s = job.spec.template.spec.termination_grace_period_seconds or 0
            if time.monotonic() - waits_since > grace_s + 2 * ENDING_MARGIN_S + self.patience_s:
                await self._raise_stays(job)
            await asyncio.sleep(pause_s * random.uniform(1.0, 2.0))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)

    async def _raise_stays(self, job: V1Job) -> None:
        kept = {
            f"{what.metadata.name} ({name})"
            for what in (job, *await self.pods())
            for name in what.metadata.finalizers or ()
            if name not in _CLUSTERS_OWN
        }
        raise AirflowException(
            f"Job {self.name} in namespace {self.namespace} is being deleted, and stays: finalizers"
            f" of {', '.join(sorted(kept)) or 'its pods'} keep it; remove them"
        )

    async def _adopt(self, job: V1Job, body: Mapping[str, Any]) -> Any:
        """Write this try's id on the Job, and the number of pods; None if it has changed."""
        num_pods, labels = f"{LABEL}/num-pods", job.metadata.labels
        wanted, own = body["metadata"]["labels"][num_pods], dict(self.attempt.try_label)
        patch: dict[str, Any] = {}
        # Kueue refuses another number of pods, or stops all of them and queues the Job again.
        if wanted != labels.get(num_pods) and QUEUE not in labels:
            patch["spec"] = {"completions": int(wanted), "parallelism": int(wanted)}
            own[num_pods] = wanted
        elif labels.items() >= own.items():
            return job
        version = job.metadata.resource_version
        return await self.patch(patch | {"metadata": {"resourceVersion": version, "labels": own}})

    async def delete(
        self, uid: str = "", *, limit_s: float | None = None, keeps_ended: bool = False
    ) -> bool:
        """Delete the Job, with its pods and its Secret, unless a later try has it.

        Another Job of its name is left alone. Without a `uid` its creation may be under way: it is
        looked for until `limit_s` is over. True if it has ended and is kept for that.
        """
        until = time.monotonic() + (0.0 if limit_s is None else limit_s)
        while True:
            left_s = math.inf if limit_s is None else until - time.monotonic()
            conditions = {"uid": uid} if uid else {}
            try:
                job = await self.read(patience_s=min(left_s, self.patience_s) / 4)
            except ANSWERLESS:  # there may be no time for another call
                if not uid:
                    raise
            else:
                if job is None and (uid or time.monotonic() >= until):
                    return False
                if job is not None:
                    if not self._may_delete(job, uid):
                        return False
                    if keeps_ended and ended_condition(job):
                        return True
                    version = job.metadata.resource_version
                    conditions = {"uid": job.metadata.uid, "resourceVersion": version}
            if conditions:
                options = {"propagationPolicy": "Foreground", "preconditions": conditions}
                if await self._call_job("delete", body=options, patience_s=left_s) is not None:
                    return False
            await asyncio.sleep(FIRST_PAUSE_S / 2)

    def _may_delete(self, job: V1Job, uid: str) -> bool:
        labels = job.metadata.labels
        if (uid and job.metadata.uid != uid) or not self.attempt.owns(labels):
            return False
        if self.attempt.is_before(labels):
            self._log.warning("Job %s is left to a later try of this task", self.name)
            return False
        return True

    async def put_secret(self, job: V1Job, values: Mapping[str, str]) -> None:
        """Create or replace the Job's Secret, which has its name and is removed with it.

        The pods' containers wait for it, so the Job is deleted if it is refused.
        """
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self.name}
        owner["uid"] = job.metadata.uid
        metadata = {"name": self.name, "labels": self.attempt.labels, "ownerReferences": [owner]}
        secret = {"metadata": metadata, "stringData": dict(values), "type": "Opaque"}
        while True:
            create = "create_namespaced_secret"
            try:
                await self.call(CoreV1Api, create, self.namespace, secret)
                return
            except ApiException as error:
                if reason_of(error) != "AlreadyExists":
                    await self.delete(job.metadata.uid)
                    raise
            await self.delete_secret()

    async def delete_secret(self) -> None:
        where = (self.name, self.namespace)
        await self._call_if_there(CoreV1Api, "delete_namespaced_secret", *where, body={})

    # Its pods

    async def pods(self, phase: str = "", limit: int = MAX_PODS) -> list[Any]:
        """Some of the Job's pods, in this phase or in any."""
        options: dict[str, Any] = {"limit": limit}
        options["label_selector"] = f"batch.kubernetes.io/job-name={self.name}"
        if phase:
            options["field_selector"] = f"status.phase={phase}"
        listed = await self.call(CoreV1Api, "list_namespaced_pod", self.namespace, **options)
        return list(listed.items)

    async def last_lines(self, pod: str, container: str, count: int) -> list[str]:
        """The last lines of a pod's log; none if it can't be read."""
        options = {"container": container, "tail_lines": count, "limit_bytes": 1 << 16}
        where = (pod, self.namespace)
        try:
            text: str = await self.call(
                CoreV1Api, "read_namespaced_pod_log", *where, patience_s=0.0, **options
            )
        except ANSWERLESS as error:
            return [f"(its log can't be read: {message_of(error)})"]
        # Of a progress bar, which overwrites itself, the last state.
        return [line.rstrip("\r").rpartition("\r")[2] for line in (text or "").split("\n") if line]

    async def events(self) -> list[str]:
        """Why the Job's pods couldn't be created, the latest reason last; none if unknown."""
        options = {"field_selector": f"involvedObject.name={self.name}", "limit": MAX_PODS}
        try:
            listed = await self.call(
                CoreV1Api, "list_namespaced_event", self.namespace, patience_s=0.0, **options
            )
        except ANSWERLESS:  # the Role may not allow it
            return []
        failed = [event for event in listed.items if event.reason == "FailedCreate"]
        failed.sort(key=lambda event: event.last_timestamp or event.metadata.creation_timestamp)
        return [str(event.message) for event in failed]

    async def remove_stuck_pods(self) -> None:
        """Remove by force pods that are long past their grace period: their node doesn't answer.

        The Job controller replaces a pod once it has ended or is gone, and its finalizer keeps one
        whose end is never reported. The time counts from when this was first seen, because the
        cluster's clock may differ.
        """
        now, since = time.monotonic(), self._ending_since
        self._ending_since = {}
        for pod in await self.pods(limit=_MANY_PODS):
            metadata = pod.metadata
            if metadata.deletion_timestamp is None or pod.status.phase in ("Succeeded", "Failed"):
                continue
            seen_at = self._ending_since[metadata.uid] = since.get(metadata.uid, now)
            if now - seen_at < (metadata.deletion_grace_period_seconds or 0) + ENDING_MARGIN_S:
                continue
            self._log.warning("Pod %s doesn't stop; removing it by force", metadata.name)
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata.uid}}
            where = (metadata.name, self.namespace)
            await self._call_if_there(CoreV1Api, "delete_namespaced_pod", *where, body=options)
            others = [name for name in metadata.finalizers or () if name != _TRACKING]
            patch = {"metadata": {"finalizers": others}}
            call = "patch_namespaced_pod"
            await self._call_if_there(CoreV1Api, call, *where, patch, _content_type=_MERGE_PATCH)

    @property
    def has_ending_pods(self) -> bool:
        """Whether pods were being deleted at the last look."""
        return bool(self._ending_since)


def ended_condition(job: V1Job) -> Any:
    """The condition that says how the Job has ended; None while it hasn't."""
    conditions = (job.status.conditions if job.status else None) or []
    ends = (c for c in conditions if c.type in ("Complete", "Failed") and c.status == "True")
    return next(ends, None)
