"""The pods of one attempt: found by their labels, taken up, made, and removed."""

from __future__ import annotations

import hashlib
import logging
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kubernetes.client import CoreV1Api, V1Secret
from kubernetes.client import models as k8s
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from batchllm_operator.operators.pods.api_errors import (
    NOT_FOUND,
    is_over_quota,
    is_passing,
    message_of,
    reason_of,
)
from batchllm_operator.operators.pods.state import ENDING_MARGIN_S, PodState, Stage

LABEL: Final = "batchllm.io"
_MAX_NAME: Final = 63  # a pod's name is its host name too
_REQUEST_S: Final = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_Answer = TypeVar("_Answer")


class QuotaExceededError(Exception):
    """A ResourceQuota of the namespace has no room for another pod."""


class StoppedError(Exception):
    """The task was killed while this waited for the cluster."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Whose a pod is: one mapped task of one DAG run, whatever its try, and its work."""

    owner: str
    """Digest of output table, DAG, run, task and map index."""
    work: str
    """Digest of what the pod is to do; an owner that is cleared may get other work."""
    try_number: int

    @classmethod
    def of(cls, ti: Any, table_uri: str, work: str) -> Attempt:
        """The attempt that a task instance makes at `work`.

        The table tells Airflows apart that share a namespace, and names of DAGs and runs.
        """
        owner = (table_uri, ti.dag_id, ti.run_id, ti.task_id, str(ti.map_index))
        return cls(_digest("\0".join(owner)), _digest(work), int(ti.try_number))

    @property
    def labels(self) -> dict[str, str]:
        """That each pod and Secret of this attempt carries."""
        return {
            f"{LABEL}/attempt": self.owner,
            f"{LABEL}/work": self.work,
            f"{LABEL}/try": str(self.try_number),
        }

    @property
    def selector(self) -> str:
        """Of all pods of this owner."""
        return f"{LABEL}/attempt={self.owner}"

    def pod_name(self, stem: str, ordinal: int) -> str:
        """The same for the same try and ordinal, so that a pod can't be made twice."""
        suffix = f"-{self.owner[:8]}-{self.try_number}-{ordinal}"
        stem = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
        return stem[: _MAX_NAME - len(suffix)].rstrip("-") + suffix


class AttemptPods:
    """Talks to the cluster about the pods of one attempt.

    Calls that fail for a passing reason (no connection, 429, 5xx, an expired token, a conflict
    over a quota) are made again for `patience_s`; a restart of the API server goes unnoticed.

    Args:
        connect: makes a client; called again when it isn't let in.
        namespace: where the pods are.
        attempt: whose.
        container_name: of the main container.
        log: tells the user what happens.
        has_secrets: whether its pods have Secrets of their own, named as they are.
        patience_s: see above.
        is_stopped: whether the task was killed meanwhile.
        poll_s: between two looks at a pod that is waited for.
    """

    def __init__(
        self,
        connect: Callable[[], CoreV1Api],
        namespace: str,
        attempt: Attempt,
        container_name: str,
        log: logging.Logger | Any,
        *,
        has_secrets: bool,
        patience_s: float,
        is_stopped: Callable[[], bool],
        poll_s: float = 2.0,
    ) -> None:
        self._connect, self._api = connect, connect()
        self._namespace, self._attempt = namespace, attempt
        self._container_name, self._log = container_name, log
        self._has_secrets, self._patience_s = has_secrets, patience_s
        self._is_stopped, self._poll_s = is_stopped, poll_s
        self._ending_since: dict[str, float] = {}

    def find(self, *, keep_dead: bool) -> k8s.V1Pod | None:
        """The live pod that does this work, once every other pod of the owner is out of the way.

        Waits for pods that are on their way out, so that two never work side by side; removes
        those that have ended (unless `keep_dead`), those that do other work, and all but the
        oldest of several.

        Raises:
            ApiException: the cluster refuses.
            StoppedError: the task was killed, or its supervisor has died.
        """
        told = ""
        while True:
            pods = self._list()
            ending = [pod for pod in pods if self._is_ending(pod)]
            live = [pod for pod in pods if self._state(pod).is_live]
            ours = [pod for pod in live if self._does_our_work(pod)]
            for pod in pods:
                dead = pod not in live and pod.metadata.deletion_timestamp is None
                if (dead and not keep_dead) or (pod in live and pod not in ours[:1]):
                    self._log.info("Removing pod %s (%s)", pod.metadata.name, self._state(pod))
                    self.delete(pod.metadata.name)
            if len(ours) == len(live) <= 1 and not ending:
                return ours[0] if ours else None
            names = ", ".join(pod.metadata.name for pod in ending)
            if names and names != told:
                told = names
                self._log.info("Waiting until pod %s, which was told to stop, has gone", names)
            self._pause(self._poll_s)

    def create(self, pod: k8s.V1Pod) -> k8s.V1Pod | None:
        """Make a pod; a live one of that name is what a lost answer has left, and is taken.

        Returns:
            None if a pod of that name is there that has ended: choose another name.

        Raises:
            QuotaExceededError: a quota has no room for it.
            ApiException: the cluster refuses the pod for another reason.
            StoppedError: the task was killed.
        """
        if self._is_stopped():
            raise StoppedError
        try:
            made = self._call(self._create_or_read, pod)
        except ApiException as error:
            if is_over_quota(error):
                raise QuotaExceededError(message_of(error)) from error
            raise
        return made if self._state(made).is_live else None

    def put_secret(self, pod: k8s.V1Pod, variables: Mapping[str, str]) -> None:
        """Make or renew the Secret that a pod of ours refers to, which has the pod's name.

        It belongs to the pod from the beginning, so that the cluster removes it with the pod
        whatever happens here; until it is there, the pod's container waits for it.

        Raises:
            QuotaExceededError: a quota has no room for it.
            ApiException: the cluster refuses it for another reason.
            StoppedError: the task was killed.
        """
        name, owner = pod.metadata.name, pod.metadata
        secret = V1Secret(
            metadata=k8s.V1ObjectMeta(
                name=name,
                labels=self._attempt.labels,
                owner_references=[
                    k8s.V1OwnerReference(
                        api_version="v1", kind="Pod", name=owner.name, uid=owner.uid
                    )
                ],
            ),
            string_data=dict(variables),
            type="Opaque",
        )
        try:
            self._call(self._unlogged("create_namespaced_secret"), self._namespace, secret)
        except ApiException as error:
            if is_over_quota(error):
                raise QuotaExceededError(message_of(error)) from error
            if reason_of(error) != "AlreadyExists":
                raise
            self._call(self._unlogged("patch_namespaced_secret"), name, self._namespace, secret)

    def delete(self, name: str, *, at_once: bool = False) -> None:
        """Ask a pod to stop, within its grace period or at once; its Secret goes too."""
        options = {"grace_period_seconds": 0} if at_once else {}
        try:
            self._call(self._api_call("delete_namespaced_pod"), name, self._namespace, **options)
        except ApiException as error:
            if error.status != NOT_FOUND:
                raise
        self.delete_secret(name)

    def delete_all(self, *, keep_dead: bool) -> None:
        """Ask every pod of the owner to stop, and remove those that have (unless `keep_dead`)."""
        for pod in self._list():
            if keep_dead and self._state(pod).is_over:
                self.delete_secret(pod.metadata.name)
            elif pod.metadata.deletion_timestamp is None:
                self._log.info("Removing pod %s", pod.metadata.name)
                self.delete(pod.metadata.name)

    def delete_secret(self, name: str) -> None:
        """Remove the Secret of a pod, if it has one."""
        if not self._has_secrets:
            return
        try:
            self._call(self._unlogged("delete_namespaced_secret"), name, self._namespace)
        except ApiException as error:
            if error.status != NOT_FOUND:
                raise

    def _list(self) -> list[k8s.V1Pod]:
        listed = self._call(
            self._api_call("list_namespaced_pod"),
            self._namespace,
            label_selector=self._attempt.selector,
        )
        return sorted(listed.items, key=lambda pod: pod.metadata.creation_timestamp)

    def _state(self, pod: k8s.V1Pod) -> PodState:
        return PodState.of(pod, self._container_name)

    def _does_our_work(self, pod: k8s.V1Pod) -> bool:
        return bool(pod.metadata.labels.get(f"{LABEL}/work") == self._attempt.work)

    def _is_ending(self, pod: k8s.V1Pod) -> bool:
        """Told to stop and still at work; one whose node doesn't answer is removed by force.

        Its time is taken from when it was first seen so: the cluster's clock may be another.
        """
        name, metadata = pod.metadata.name, pod.metadata
        if metadata.deletion_timestamp is None or self._state(pod).stage is Stage.ENDED:
            return False
        since = self._ending_since.setdefault(name, time.monotonic())
        allowed_s = (metadata.deletion_grace_period_seconds or 0) + ENDING_MARGIN_S
        if time.monotonic() - since > allowed_s:
            self._ending_since[name] = time.monotonic()
            self._log.warning("Pod %s doesn't stop; removing it by force", name)
            self.delete(name, at_once=True)
        return True

    def _create_or_read(self, pod: k8s.V1Pod, **options: Any) -> k8s.V1Pod:
        while True:
            try:
                return self._api.create_namespaced_pod(self._namespace, pod, **options)
            except ApiException as error:
                if reason_of(error) != "AlreadyExists":
                    raise
            try:
                return self._api.read_namespaced_pod(pod.metadata.name, self._namespace, **options)
            except ApiException as error:
                if error.status != NOT_FOUND:
                    raise
            self._pause(self._poll_s)  # its namesake has just gone

    # Calls

    def _api_call(self, name: str) -> Callable[..., Any]:
        """A method of whatever client is current when it is called."""
        return lambda *args, **options: getattr(self._api, name)(*args, **options)

    def _unlogged(self, name: str) -> Callable[..., Any]:
        """The same without a body in the answer, which the client would log when debugging."""

        def call(*args: Any, **options: Any) -> None:
            answer = getattr(self._api, name)(*args, _preload_content=False, **options)
            answer.release_conn()

        return call

    def _call(self, function: Callable[..., _Answer], *args: Any, **options: Any) -> _Answer:
        give_up_at, pause_s = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return function(*args, _request_timeout=_REQUEST_S, **options)
            except (ApiException, HTTPError) as error:
                if not is_passing(error) or time.monotonic() > give_up_at:
                    raise
                self._log.warning("The cluster's API: %s; trying again", message_of(error))
                self._pause(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self._api = self._connect()

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if self._is_stopped():
                raise StoppedError
            time.sleep(min(left_s, 0.5))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
