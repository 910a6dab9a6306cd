"""The pods of one attempt: found by their labels, taken up, made, and removed."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from kubernetes.client import CoreV1Api, V1Secret
from kubernetes.client import models as k8s
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from batchllm_operator.operators.pods.state import PodState

LABEL: Final = "batchllm.io"
_MAX_NAME: Final = 63  # a pod's name is its host name too
_CONFLICT, _NOT_FOUND, _FORBIDDEN, _TOO_MANY = 409, 404, 403, 429
_REQUEST_S: Final = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_ENDING_MARGIN: Final = timedelta(seconds=60)
_Answer = TypeVar("_Answer")


class QuotaExceededError(Exception):
    """A ResourceQuota of the namespace has no room for another pod."""


class StoppedError(Exception):
    """The task was killed while this waited for the cluster."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Whose a pod is: one mapped task of one DAG run, whatever its try, and its work."""

    owner: str
    """Digest of DAG, run, task and map index."""
    work: str
    """Digest of what the pod is to do; an owner that is cleared may get other work."""
    try_number: int

    @classmethod
    def of(cls, ti: Any, work: str) -> Attempt:
        """The attempt that a task instance makes at `work`."""
        owner = (ti.dag_id, ti.run_id, ti.task_id, str(ti.map_index))
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

    Calls that fail for a passing reason (no connection, 429, 5xx, an expired token) are made
    again for `patience_s`; a restart of the API server goes unnoticed.

    Args:
        connect: makes a client; called again when it isn't let in.
        namespace: where the pods are.
        attempt: whose.
        container_name: of the main container.
        log: tells the user what happens.
        has_secrets: whether its pods have Secrets of their own, named as they are.
        patience_s: see above.
        is_stopped: whether the task was killed meanwhile.
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

    def find(self, *, keep_dead: bool) -> k8s.V1Pod | None:
        """The live pod that does this work, once every other pod of the owner is out of the way.

        Waits for pods that are on their way out, so that two never work side by side; removes
        those that have ended (unless `keep_dead`), those that do other work, and all but the
        oldest of several.

        Raises:
            ApiException: the cluster refuses.
            StoppedError: the task was killed.
        """
        told = ""
        while True:
            pods = self._list()
            ending = [pod for pod in pods if self._is_ending(pod)]
            live = [pod for pod in pods if self._state(pod).is_live]
            ours = [pod for pod in live if self._does_our_work(pod)]
            for pod in pods:
                dead = pod not in live and pod not in ending
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

    def create(self, pod: k8s.V1Pod, variables: Mapping[str, str]) -> k8s.V1Pod:
        """Make a pod; `variables` go into a Secret that is removed with it.

        A pod of that name that is there already is what a lost answer has left, and is taken.

        Raises:
            QuotaExceededError: a quota has no room for it.
            ApiException: the cluster refuses the pod for another reason.
            StoppedError: the task was killed.
        """
        name = pod.metadata.name
        if self._has_secrets:
            self._put_secret(name, pod.metadata.labels, variables)
        try:
            made = self._call(self._create_or_read, pod)
        except ApiException as error:
            self._delete_secret(name)
            if error.status == _FORBIDDEN and "exceeded quota" in (error.body or ""):
                # A refusal by policy has the same status and reason; only the text tells.
                raise QuotaExceededError(message_of(error)) from error
            raise
        if self._has_secrets:
            self._give_secret_to(made)
        return made

    def delete(self, name: str, *, at_once: bool = False) -> None:
        """Ask a pod to stop, within its grace period or at once; its Secret goes too."""
        options = {"grace_period_seconds": 0} if at_once else {}
        try:
            self._call(self._api_call("delete_namespaced_pod"), name, self._namespace, **options)
        except ApiException as error:
            if error.status != _NOT_FOUND:
                raise
        self._delete_secret(name)

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
        """Told to stop and still there; one whose node doesn't answer is removed by force."""
        if pod.metadata.deletion_timestamp is None:
            return False
        if datetime.now(UTC) > pod.metadata.deletion_timestamp + _ENDING_MARGIN:
            self._log.warning("Pod %s doesn't stop; removing it by force", pod.metadata.name)
            self.delete(pod.metadata.name, at_once=True)
        return True

    def _create_or_read(self, pod: k8s.V1Pod, **options: Any) -> k8s.V1Pod:
        try:
            return self._api.create_namespaced_pod(self._namespace, pod, **options)
        except ApiException as error:
            if error.status != _CONFLICT:
                raise
            return self._api.read_namespaced_pod(pod.metadata.name, self._namespace, **options)

    # Secrets

    def _put_secret(
        self, name: str, labels: Mapping[str, str], variables: Mapping[str, str]
    ) -> None:
        secret = V1Secret(
            metadata=k8s.V1ObjectMeta(name=name, labels=dict(labels)),
            string_data=dict(variables),
            type="Opaque",
        )
        try:
            self._call(self._api_call("create_namespaced_secret"), self._namespace, secret)
        except ApiException as error:
            if error.status != _CONFLICT:
                raise
            self._call(self._api_call("patch_namespaced_secret"), name, self._namespace, secret)

    def _give_secret_to(self, pod: k8s.V1Pod) -> None:
        """Let the cluster remove the Secret with its pod, should we not come to it."""
        owner = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": pod.metadata.name,
            "uid": pod.metadata.uid,
        }
        body = {"metadata": {"ownerReferences": [owner]}}
        self._call(
            self._api_call("patch_namespaced_secret"), pod.metadata.name, self._namespace, body
        )

    def _delete_secret(self, name: str) -> None:
        if not self._has_secrets:
            return
        try:
            self._call(self._api_call("delete_namespaced_secret"), name, self._namespace)
        except ApiException as error:
            if error.status != _NOT_FOUND:
                raise

    # Calls

    def _api_call(self, name: str) -> Callable[..., Any]:
        """A method of whatever client is current when it is called."""
        return lambda *args, **options: getattr(self._api, name)(*args, **options)

    def _call(self, function: Callable[..., _Answer], *args: Any, **options: Any) -> _Answer:
        give_up_at, pause_s = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return function(*args, _request_timeout=_REQUEST_S, **options)
            except (ApiException, HTTPError) as error:
                if not _is_passing(error) or time.monotonic() > give_up_at:
                    raise
                self._log.warning("The cluster's API: %s; trying again", message_of(error))
                self._pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self._api = self._connect()

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if self._is_stopped():
                raise StoppedError
            time.sleep(min(left_s, 0.5))


def _is_passing(error: Exception) -> bool:
    """Whether the same call may be answered later."""
    if not isinstance(error, ApiException):
        return True
    return error.status in (0, 401, _TOO_MANY) or (error.status or 0) >= 500


def message_of(error: Exception) -> str:
    """What the API said, on one line."""
    if isinstance(error, ApiException):
        try:
            text = json.loads(error.body or "")["message"]
        except (ValueError, TypeError, KeyError):  # not a Status: a proxy's page, say
            text = error.reason
        return f"{error.status} {text}"
    return f"{type(error).__name__}: {error}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
