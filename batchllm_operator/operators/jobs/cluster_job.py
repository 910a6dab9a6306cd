"""A task's Job in the cluster: creates, adopts, scales and deletes it, from worker or triggerer."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Mapping
from typing import Any, Final

from kubernetes_asyncio.client import BatchV1Api, CoreV1Api, V1Job
from kubernetes_asyncio.client.exceptions import ApiException

from batchllm_operator.operators.jobs.api_errors import (
    ANSWERLESS,
    CONFLICT,
    is_absent,
    message_of,
    reason_of,
)
from batchllm_operator.operators.jobs.calls import FIRST_PAUSE_S, Cluster, ClusterCalls
from batchllm_operator.operators.jobs.owner import LABEL, QUEUE, Attempt

ENDING_MARGIN_S: Final = 60.0
"""Time after the grace period that a kubelet may take to report a pod's end."""
_LONGEST_WAIT_S: Final = 8.0
"""Between two looks whether a Job that is being deleted has gone; each takes three requests."""
_MAX_PODS, _MANY_PODS = 50, 500
"""Pods that one request reads: a thousand each minute would weigh on the API server."""


class SupersededError(Exception):
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

    async def read(self, **limits: float) -> Any:
        """The Job; None if there is none of this name."""
        try:
            return await self.call(
                BatchV1Api, "read_namespaced_job", self.name, self.namespace, **limits
            )
        except ApiException as error:
            if not is_absent(error):
                raise
            return None

    async def take(self, body: Mapping[str, Any]) -> tuple[V1Job, bool]:
        """Create the Job, or adopt the one that is there; returns it, and whether it is new.

        One that has ended or does other work is deleted, and one that is being deleted waited for,
        so that two sets of pods never work side by side.

        Raises:
            SupersededError: a later try has the Job.
            ApiException: the cluster refuses.
        """
        told, pause_s = False, FIRST_PAUSE_S
        while True:
            try:
                create = "create_namespaced_job"
                return await self.call(BatchV1Api, create, self.namespace, body), True
            except ApiException as error:
                if reason_of(error) != "AlreadyExists":
                    raise
            job = await self.read()
            if job is None:
                continue
            if self.attempt.is_before(job.metadata.labels):
                raise SupersededError
            if job.metadata.deletion_timestamp is None:
                does_work = self.attempt.does_work_of(job.metadata.labels)
                if does_work and not has_ended(job):
                    if (adopted := await self._adopt(job, body)) is not None:
                        return adopted, False
                    continue
                await self.delete(job.metadata.uid)
            if not told:
                told = True
                self._log.info("Waiting until Job %s and its pods have gone", self.name)
            await self.remove_stuck_pods()
            await asyncio.sleep(pause_s * random.uniform(1.0, 2.0))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)

    async def _adopt(self, job: V1Job, body: Mapping[str, Any]) -> Any:
        """Write this try's id on the Job, and the number of pods; None if it has changed.

        A Job in a queue keeps its number: Kueue refuses another, or stops all pods and queues the
        Job again.
        """
        wanted, found = body["metadata"]["labels"], job.metadata.labels
        changes: dict[str, Any] = {"resourceVersion": job.metadata.resource_version}
        patch: dict[str, Any] = {"metadata": {**changes, "labels": self.attempt.try_label}}
        num_pods = f"{LABEL}/num-pods"
        if wanted[num_pods] != found.get(num_pods) and QUEUE not in found:
            patch["spec"] = scale = {"completions": int(wanted[num_pods])}
            scale["parallelism"] = scale["completions"]
            patch["metadata"]["labels"] = {**self.attempt.try_label, num_pods: wanted[num_pods]}
        elif found.items() >= self.attempt.try_label.items():
            return job
        return await self.patch(patch)

    async def patch(self, patch: Mapping[str, Any]) -> Any:
        """Change the Job; None if it is gone, or isn't of the version that the patch names."""
        try:
            return await self.call(
                BatchV1Api, "patch_namespaced_job", self.name, self.namespace, patch
            )
        except ApiException as error:
            if error.status != CONFLICT and not is_absent(error):
                raise
            return None

    async def delete(self, uid: str = "", *, limit_s: float | None = None) -> None:
        """Delete the Job, with its pods and its Secret, unless a later try has it.

        Another Job of its name is left alone. Without a `uid` its creation may be under way: it is
        looked for until `limit_s` is over.
        """
        until = time.monotonic() + (0.0 if limit_s is None else limit_s)
        while True:
            left_s = math.inf if limit_s is None else until - time.monotonic()
            conditions = {"uid": uid} if uid else {}
            try:
                job = await self.read(patience_s=min(left_s, self._patience_s) / 4)
            except ANSWERLESS:  # there may be no time for another call
                job = None
                if not uid:
                    raise
            else:
                if job is not None:
                    if uid and job.metadata.uid != uid:
                        return
                    if self.attempt.is_before(job.metadata.labels):
                        self._log.warning("Job %s is left to a later try of this task", self.name)
                        return
                    version = job.metadata.resource_version
                    conditions = {"uid": job.metadata.uid, "resourceVersion": version}
                elif uid or time.monotonic() >= until:
                    return
            if conditions and await self._delete(conditions, left_s):
                return
            await asyncio.sleep(FIRST_PAUSE_S / 2)

    async def _delete(self, conditions: Mapping[str, str], patience_s: float) -> bool:
        """Delete the Job if it meets the conditions; returns whether it is gone."""
        options = {"propagationPolicy": "Foreground", "preconditions": conditions}
        where = (self.name, self.namespace)
        try:
            await self.call(
                BatchV1Api, "delete_namespaced_job", *where, body=options, patience_s=patience_s
            )
        except ApiException as error:
            if error.status == CONFLICT:
                return False
            if not is_absent(error):
                raise
        return True

    async def put_secret(self, job: V1Job, values: Mapping[str, str]) -> None:
        """Create or replace the Job's Secret, which has its name and is removed with it.

        The pods' containers wait for it. No answer with values is read, as the client would log it.
        """
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self.name}
        owner["uid"] = job.metadata.uid
        metadata = {"name": self.name, "labels": self.attempt.labels, "ownerReferences": [owner]}
        secret = {"metadata": metadata, "stringData": dict(values), "type": "Opaque"}
        while True:
            create = "create_namespaced_secret"
            try:
                await self.call(CoreV1Api, create, self.namespace, secret, _preload_content=False)
                return
            except ApiException as error:
                if reason_of(error) != "AlreadyExists":
                    raise
            await self.delete_secret()

    async def delete_secret(self) -> None:
        try:
            await self.call(
                CoreV1Api, "delete_namespaced_secret", self.name, self.namespace, body={}
            )
        except ApiException as error:
            if not is_absent(error):
                raise

    # Its pods

    async def pods(self, phase: str = "", limit: int = _MAX_PODS) -> list[Any]:
        """Some of the Job's pods, in this phase or in any."""
        options: dict[str, Any] = {"limit": limit}
        options["label_selector"] = f"batch.kubernetes.io/job-name={self.name}"
        if phase:
            options["field_selector"] = f"status.phase={phase}"
        listed = await self.call(CoreV1Api, "list_namespaced_pod", self.namespace, **options)
        return list(listed.items)

    async def last_lines(self, pod: str, container: str, count: int) -> list[str]:
        """The last lines of a pod's log; none if it can't be read."""
        try:
            text: str = await self.call(
                CoreV1Api,
                "read_namespaced_pod_log",
                pod,
                self.namespace,
                container=container,
                tail_lines=count,
                limit_bytes=1 << 16,
                patience_s=0.0,
            )
        except ANSWERLESS as error:
            return [f"(its log can't be read: {message_of(error)})"]
        # Of a progress bar, which overwrites itself, the last state.
        return [line.rstrip("\r").rpartition("\r")[2] for line in (text or "").split("\n") if line]

    async def events(self) -> list[str]:
        """Why the Job's pods couldn't be created, the latest reason last; none if unknown."""
        try:
            listed = await self.call(
                CoreV1Api,
                "list_namespaced_event",
                self.namespace,
                field_selector=f"involvedObject.name={self.name}",
                limit=_MAX_PODS,
                patience_s=0.0,
            )
        except ANSWERLESS:  # the Role may not allow it
            return []
        failed = [event for event in listed.items if event.reason == "FailedCreate"]
        failed.sort(key=lambda event: event.last_timestamp or event.metadata.creation_timestamp)
        return [str(event.message) for event in failed]

    async def remove_stuck_pods(self) -> None:
        """Remove by force pods that are long past their grace period: their node doesn't answer.

        The Job controller replaces a pod only once it has ended. The time counts from when this was
        first seen, because the cluster's clock may differ.
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
            try:
                await self.call(CoreV1Api, "delete_namespaced_pod", *where, body=options)
            except ApiException as error:
                if error.status != CONFLICT and not is_absent(error):
                    raise

    @property
    def has_ending_pods(self) -> bool:
        """Whether pods were being deleted at the last look."""
        return bool(self._ending_since)


def has_ended(job: V1Job) -> bool:
    return ended_condition(job) is not None


def ended_condition(job: V1Job) -> Any:
    """The condition that says how the Job has ended; None while it hasn't."""
    conditions = (job.status.conditions if job.status else None) or []
    return next(
        (c for c in conditions if c.type in ("Complete", "Failed") and c.status == "True"), None
    )
