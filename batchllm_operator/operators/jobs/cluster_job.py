"""A task's Job in the cluster: creates, adopts, scales and deletes it, from worker or triggerer."""

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from kubernetes_asyncio.client import BatchV1Api, CoreV1Api, V1Job
from kubernetes_asyncio.client.exceptions import ApiException

from batchllm_operator.operators.jobs import calls
from batchllm_operator.operators.jobs.owner import LABEL, NUM_PODS, QUEUE, WatchedJob

_TRACKING: Final = "batch.kubernetes.io/job-tracking"
_CLUSTERS_OWN: Final = frozenset({_TRACKING, "foregroundDeletion"})
_MERGE_PATCH: Final = "application/merge-patch+json"
ENDING_MARGIN_S: Final = 60.0  # after its grace period, for a kubelet to report a pod's end
_LONGEST_WAIT_S: Final = 8.0  # between two looks whether a deleted Job has gone: three requests
MAX_PODS, _MANY_PODS = 50, 500  # that one request reads: a thousand each minute would weigh


class ClusterJob(calls.ClusterCalls):
    """A try's Job, whose UID is known once the try has it, and its pods."""

    def __init__(self, of: WatchedJob, log: Any) -> None:
        super().__init__(of, log)
        # UIDs of pods that were being deleted at the last look, and when that was first seen
        self.ending_since: dict[str, float] = {}
        self.may_appear = False  # its creation was broken off, so it may be under way

    async def call_job(self, verb: str, *args: Any, **options: Any) -> Any:
        """Read, patch or delete the Job; None if it is gone, or isn't of the version named."""
        call, where = f"{verb}_namespaced_job", (self.of.name, self.of.namespace)
        return await self.call_if_there(BatchV1Api, call, *where, *args, **options)

    async def take(self, body: Mapping[str, Any], secret: Mapping[str, str]) -> Any:
        """Create the Job, or adopt the one that is there, with a Secret of these values.

        One of this task that has ended or does other work is deleted, and one that is being deleted
        waited for, so that two sets of pods never work side by side. Raises `ApiException` if the
        cluster refuses, `AirflowException` if a later try has the Job, it isn't this task's, or it
        stays though it is deleted.
        """
        job = None
        while job is None:
            self.may_appear = True
            try:
                create = "create_namespaced_job"
                job = await self.call(BatchV1Api, create, self.of.namespace, body)
                self.log.info("Made Job %s in namespace %s", self.of.name, self.of.namespace)
            except ApiException as error:
                self.may_appear = False
                if calls.reason_of(error) != "AlreadyExists":
                    raise
                job = await self._adopted(body)
        self.of, self.may_appear = replace(self.of, uid=str(job.metadata.uid)), False
        if secret:
            await self._put_secret(secret)
        return job

    async def _adopted(self, body: Mapping[str, Any]) -> Any:
        """The Job that is there, with this try's id; None once there is none, or another version.

        One that is of no use is deleted, and waited for.
        """
        waits_since: float | None = None
        pause_s = calls.FIRST_PAUSE_S
        while (job := await self.call_job("read")) is not None:
            labels = job.metadata.labels or {}
            if not self.of.owns(labels):
                raise AirflowFailException(
                    f"Job {self.of.name} in namespace {self.of.namespace} isn't this task's (its"
                    f" label {LABEL}/attempt says so): remove it, or use another namespace"
                )
            if self.of.is_before(labels):
                raise AirflowException(
                    f"a later try of this task has Job {self.of.name}: this one ends"
                )
            if job.metadata.deletion_timestamp is None:
                if labels.items() >= self.of.labels.items() and not ended_condition(job):
                    return await self._adopt(job, body)
                await self.delete(job.metadata.uid)
            if waits_since is None:
                waits_since = time.monotonic()
                self.log.info("Waiting until Job %s and its pods have gone", self.of.name)
            await self.remove_stuck_pods()
            grace_s = job.spec.template.spec.termination_grace_period_seconds or 0
            if time.monotonic() - waits_since > grace_s + 2 * ENDING_MARGIN_S + self.patience_s:
                kept = (job, *await self.pods())
                names = {name for each in kept for name in each.metadata.finalizers or ()}
                raise AirflowException(
                    f"Job {self.of.name} in namespace {self.of.namespace} is being deleted, and"
                    f" stays: finalizers {', '.join(sorted(names - _CLUSTERS_OWN))} keep it or its"
                    " pods; remove them"
                )
            await asyncio.sleep(pause_s * random.uniform(1.0, 2.0))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
        return None

    async def _adopt(self, job: V1Job, body: Mapping[str, Any]) -> Any:
        """Write this try's id on the Job, and the number of pods; None if it has changed."""
        labels, own = job.metadata.labels, dict(self.of.try_label)
        wanted, patch = body["metadata"]["labels"][NUM_PODS], dict[str, Any]()
        # Kueue refuses another number of pods, or stops all of them and queues the Job again.
        if wanted != labels.get(NUM_PODS) and QUEUE not in labels:
            patch["spec"] = {"completions": int(wanted), "parallelism": int(wanted)}
            own[NUM_PODS] = wanted
        patch["metadata"] = {"resourceVersion": job.metadata.resource_version, "labels": own}
        adopted = await self.call_job("patch", patch)
        if adopted is not None:
            self.log.info("Adopted Job %s in namespace %s", self.of.name, self.of.namespace)
        return adopted

    async def delete(self, uid: str = "", *, keeps_ended: bool = False) -> None:
        """Delete the Job, with its pods and its Secret, unless a later try has it.

        Another Job of its name is left alone, and with `keeps_ended` one that has ended. One that
        may appear is looked for while there is patience.
        """
        uid, until = uid or self.of.uid, time.monotonic() + self.patience_s
        while True:
            left_s, conditions = until - time.monotonic(), {"uid": uid} if uid else {}
            try:
                job = await self.call_job("read", patience_s=left_s / 4)
            except calls.ANSWERLESS:  # there may be no time for another call
                if not uid:
                    raise
            else:
                if job is None and (uid or not self.may_appear or left_s <= 0):
                    return
                if job is not None:
                    if await self._stays(job, uid, keeps_ended):
                        return
                    version = job.metadata.resource_version
                    conditions = {"uid": job.metadata.uid, "resourceVersion": version}
            if conditions:
                options = {"propagationPolicy": "Foreground", "preconditions": conditions}
                left_s = until - time.monotonic()
                if await self.call_job("delete", body=options, patience_s=left_s) is not None:
                    return
            await asyncio.sleep(calls.FIRST_PAUSE_S / 2)

    async def _stays(self, job: V1Job, uid: str, keeps_ended: bool) -> bool:
        labels = job.metadata.labels
        if (uid and job.metadata.uid != uid) or not self.of.owns(labels):
            return True
        if self.of.is_before(labels):
            self.log.warning("Job %s is left to a later try of this task", self.of.name)
            return True
        if not (keeps_ended and ended_condition(job)):
            return False
        self.log.info("Keeping Job %s (on_finish_action)", self.of.name)
        if self.of.lake_conn_id is not None or self.of.connection_env:
            await self._delete_secret()
        return True

    async def _put_secret(self, values: Mapping[str, str]) -> None:
        """Create or replace the Job's Secret, which has its name and is removed with it.

        The pods' containers wait for it, so the Job is deleted if it is refused.
        """
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self.of.name, "uid": self.of.uid}
        metadata = {"name": self.of.name, "labels": self.of.labels, "ownerReferences": [owner]}
        secret = {"metadata": metadata, "stringData": dict(values), "type": "Opaque"}
        while True:
            try:
                await self.call(CoreV1Api, "create_namespaced_secret", self.of.namespace, secret)
                return
            except ApiException as error:
                if calls.reason_of(error) != "AlreadyExists":
                    await self.delete()
                    raise
            await self._delete_secret()

    async def _delete_secret(self) -> None:
        where = (self.of.name, self.of.namespace)
        await self.call_if_there(CoreV1Api, "delete_namespaced_secret", *where, body={})

    async def pods(self, phase: str = "", limit: int = MAX_PODS) -> list[Any]:
        """Some of the Job's pods, in this phase or in any."""
        select: dict[str, Any] = {"label_selector": f"batch.kubernetes.io/job-name={self.of.name}"}
        select |= {"field_selector": f"status.phase={phase}"} if phase else {}
        call, where = "list_namespaced_pod", self.of.namespace
        return list((await self.call(CoreV1Api, call, where, limit=limit, **select)).items)

    async def last_lines(self, pod: str, container: str, count: int) -> list[str]:
        """The last lines of a pod's log; none if it can't be read."""
        options = {"container": container, "tail_lines": count, "limit_bytes": 1 << 16}
        call, where = "read_namespaced_pod_log", (pod, self.of.namespace)
        try:
            text = await self.call(CoreV1Api, call, *where, patience_s=0.0, **options)
        except calls.ANSWERLESS as error:
            return [f"(its log can't be read: {calls.message_of(error)})"]
        # Of a progress bar, which overwrites itself, the last state.
        return [line.rstrip("\r").rpartition("\r")[2] for line in (text or "").split("\n") if line]

    async def events(self) -> list[str]:
        """Why the Job's pods couldn't be created, the latest reason last; none if unknown."""
        options = {"field_selector": f"involvedObject.name={self.of.name}", "limit": MAX_PODS}
        call, where = "list_namespaced_event", self.of.namespace
        try:
            listed = await self.call(CoreV1Api, call, where, patience_s=0.0, **options)
        except calls.ANSWERLESS:  # the Role may not allow it
            return []
        failed = [event for event in listed.items if event.reason == "FailedCreate"]
        failed.sort(key=lambda event: event.last_timestamp or event.metadata.creation_timestamp)
        return [str(event.message) for event in failed]

    async def remove_stuck_pods(self) -> None:
        """Remove by force pods that are long past their grace period: their node doesn't answer.

        The Job controller replaces a pod once it has ended or is gone, and its finalizer keeps one
        whose end is never reported. The cluster's clock may differ, so only ours counts.
        """
        now, since = time.monotonic(), self.ending_since
        self.ending_since = {}
        for pod in await self.pods(limit=_MANY_PODS):
            metadata = pod.metadata
            if metadata.deletion_timestamp is None or pod.status.phase in ("Succeeded", "Failed"):
                continue
            seen_at = self.ending_since[metadata.uid] = since.get(metadata.uid, now)
            if now - seen_at < (metadata.deletion_grace_period_seconds or 0) + ENDING_MARGIN_S:
                continue
            self.log.warning("Pod %s doesn't stop; removing it by force", metadata.name)
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata.uid}}
            where = (metadata.name, self.of.namespace)
            await self.call_if_there(CoreV1Api, "delete_namespaced_pod", *where, body=options)
            others = [name for name in metadata.finalizers or () if name != _TRACKING]
            patch, call = {"metadata": {"finalizers": others}}, "patch_namespaced_pod"
            await self.call_if_there(CoreV1Api, call, *where, patch, _content_type=_MERGE_PATCH)


def ended_condition(job: V1Job) -> Any:
    """The condition that says how the Job has ended; None while it hasn't."""
    conditions = (job.status.conditions if job.status else None) or []
    ends = (c for c in conditions if c.type in ("Complete", "Failed") and c.status == "True")
    return next(ends, None)
