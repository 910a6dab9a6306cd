"""The pods of one owner: finds them by label, takes them up, creates and removes them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Final

from kubernetes.client import CoreV1Api, V1Secret
from kubernetes.client import models as k8s
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from batchllm_operator.operators.pods.api_errors import (
    CONFLICT,
    FORBIDDEN,
    NOT_FOUND,
    is_over_quota,
    message_of,
    reason_of,
)
from batchllm_operator.operators.pods.calls import ClusterCalls
from batchllm_operator.operators.pods.owner import LABEL, Attempt
from batchllm_operator.operators.pods.state import ENDING_MARGIN_S, PodState, Stage

_LOOK: Final = 0.25
"""Share of a deletion's time for reading the pod's labels."""
_UNSEEN_POLL_S: Final = 0.5
"""Pause before looking again for a pod whose creation may be under way."""


class QuotaExceededError(Exception):
    """A ResourceQuota of the namespace has no room for another pod."""


class SupersededError(Exception):
    """A later try of the task has a pod, so this try is obsolete."""


@dataclass
class OwnerPods:
    """Manages the pods of one owner."""

    calls: ClusterCalls
    namespace: str
    attempt: Attempt
    container_name: str
    _: KW_ONLY
    has_secrets: bool
    """Whether each pod has a Secret of its own, with the pod's name."""
    poll_s: float = 2.0
    """Pause between two reads of the pods."""
    _ending_since: dict[str, float] = field(default_factory=dict, init=False)

    def take(self, make: Callable[[int], k8s.V1Pod], *, keep_dead: bool) -> tuple[k8s.V1Pod, bool]:
        """The live pod that does this work, or a new one; and whether it is new.

        `make` returns the new pod for an ordinal (see `Attempt.pod_name`): the first whose name is
        free.

        Raises:
            QuotaExceededError: a quota has no room for the pod.
            SupersededError: a later try has begun.
            ApiException: the cluster refuses.
            StoppedError: the task was killed, or its supervisor has died.
        """
        while True:
            found, names = self._find(keep_dead=keep_dead)
            if found is not None:
                stamped = self._stamp(found)
                if stamped is None:
                    continue
                return stamped, False
            for ordinal in itertools.count():
                request = make(ordinal)
                if request.metadata.name not in names:
                    break
            made = self._create(request)
            if made is not None:
                self._clear_beside(made)
                return made, True
            self.calls.pause(self.poll_s)  # just created elsewhere, or terminating

    def _find(self, *, keep_dead: bool) -> tuple[k8s.V1Pod | None, set[str]]:
        """The live pod that does this work, if any, and the names of all pods that stay.

        Waits for terminating pods, so that two never work side by side; removes those that have
        ended (unless `keep_dead`), those that do other work, and all but the oldest of several.
        """
        said = ""
        while True:
            pods = self._list()
            ending = [pod for pod in pods if self._is_ending(pod)]
            live = [pod for pod in pods if self._state(pod).is_live]
            work = f"{LABEL}/work"
            ours = [p for p in live if (p.metadata.labels or {}).get(work) == self.attempt.work]
            for pod in [*live, *ending]:
                if self.attempt.is_before(pod.metadata.labels or {}):
                    raise SupersededError(pod.metadata.name)
            names = {pod.metadata.name for pod in pods}
            for pod in pods:
                dead = pod not in live and pod.metadata.deletion_timestamp is None
                if (dead and not keep_dead) or (pod in live and pod not in ours[:1]):
                    self.calls.log.info("Removing pod %s (%s)", pod.metadata.name, self._state(pod))
                    self.delete(pod.metadata.name, pod.metadata.uid)
                    names.discard(pod.metadata.name)
            if len(ours) == len(live) <= 1 and not ending:
                return ours[0] if ours else None, names
            waits_for = ", ".join(pod.metadata.name for pod in ending)
            if waits_for and waits_for != said:
                said = waits_for
                self.calls.log.info("Waiting until pod %s, which was asked to stop, has gone", said)
            self.calls.pause(self.poll_s)

    def _stamp(self, pod: k8s.V1Pod) -> k8s.V1Pod | None:
        """Label a pod as this try's, so that no earlier one deletes it; None if it has changed."""
        metadata = pod.metadata
        if (metadata.labels or {}).items() >= self.attempt.labels.items():
            return pod
        changes = {"resourceVersion": metadata.resource_version, "labels": self.attempt.labels}

        def stamp(api: CoreV1Api, **limits: Any) -> Any:
            try:
                return api.patch_namespaced_pod(
                    metadata.name, self.namespace, {"metadata": changes}, **limits
                )
            except ApiException as error:
                if error.status in (CONFLICT, NOT_FOUND):
                    return None
                if error.status != FORBIDDEN:
                    raise
                self.calls.log.warning(
                    "Pod %s can't be labelled as this try's (%s): an earlier try that wakes up late"
                    " might delete it. The Role needs the verb patch on pods",
                    metadata.name,
                    message_of(error),
                )
                return pod

        return self.calls.retried(stamp)

    def _clear_beside(self, made: k8s.V1Pod) -> None:
        """Look for other tries' pods again: with different ordinals, the API refuses neither.

        Each try does so after creating its pod, so that one of two sees the other's. Earlier tries'
        pods are removed; for a later try's, `made` is removed and `SupersededError` raised.
        """
        try:
            pods = self._list()
        except (ApiException, HTTPError) as error:  # the new pod still has to be watched
            self.calls.log.warning("Can't look for pods of other tries: %s", message_of(error))
            return
        others = [
            pod
            for pod in pods
            if pod.metadata.uid != made.metadata.uid and self._state(pod).stage is not Stage.ENDED
        ]
        for pod in others:
            if self.attempt.is_before(pod.metadata.labels or {}):
                self.calls.log.info("Removing pod %s", made.metadata.name)
                self.delete(made.metadata.name, made.metadata.uid)
                raise SupersededError(pod.metadata.name)
        for pod in others:
            self.calls.log.info("Removing pod %s of an earlier try", pod.metadata.name)
            self.delete(pod.metadata.name, pod.metadata.uid)

    def _create(self, pod: k8s.V1Pod) -> k8s.V1Pod | None:
        """Create a pod; None if another try's pod has that name.

        If the answer to a creation was lost, this try's pod is there already, and is returned.
        """
        try:
            made, is_new = self.calls.retried(
                lambda api, **limits: self._create_or_read(api, pod, limits)
            )
        except ApiException as error:
            if is_over_quota(error):
                raise QuotaExceededError(message_of(error)) from error
            raise
        labels = made.metadata.labels or {}
        is_ours = is_new or labels.items() >= self.attempt.labels.items()
        return made if is_ours and self._state(made).is_live else None

    def put_secret(self, pod: k8s.V1Pod, variables: Mapping[str, str]) -> None:
        """Create or replace the pod's Secret, which has the pod's name.

        The pod owns it, so that the cluster removes both; the pod's container waits for it.
        An existing one may belong to an earlier pod of that name, and vanish with it.

        Raises:
            QuotaExceededError: a quota has no room for it.
        """
        name, uid = pod.metadata.name, pod.metadata.uid
        owner = k8s.V1OwnerReference(api_version="v1", kind="Pod", name=name, uid=uid)
        metadata = k8s.V1ObjectMeta(name=name, labels=self.attempt.labels, owner_references=[owner])
        secret = V1Secret(metadata=metadata, string_data=dict(variables), type="Opaque")
        while True:
            try:
                self.calls.call_unlogged("create_namespaced_secret", self.namespace, secret)
                return
            except ApiException as error:
                if is_over_quota(error):
                    raise QuotaExceededError(message_of(error)) from error
                if reason_of(error) != "AlreadyExists":
                    raise
            self.delete_secret(name)
            self.calls.pause(self.poll_s)

    def delete(self, name: str, uid: str, *, at_once: bool = False) -> None:
        """Delete a pod, within its grace period or `at_once`; its Secret goes with it.

        Another pod of that name, and one that a later try has, is left alone. Without a `uid` the
        pod's creation may be under way: it is looked for until the time for all calls is over.
        """
        while True:
            try:
                self.calls.retried(partial(self._delete_once, name, uid, at_once))
                return
            except ApiException as error:
                if error.status != NOT_FOUND:
                    raise
            if uid or self.calls.is_over:
                return
            self.calls.pause(min(self.poll_s, _UNSEEN_POLL_S))

    def _delete_once(
        self, name: str, uid: str, at_once: bool, api: CoreV1Api, *, _request_timeout: float
    ) -> None:
        """Read the pod, and delete that version of it, as a later try may take it up meanwhile.

        If reading fails, it is deleted anyway: there may be no time for another attempt.
        """
        expected = k8s.V1Preconditions(uid=uid) if uid else None
        try:
            found = api.read_namespaced_pod(
                name, self.namespace, _request_timeout=_request_timeout * _LOOK
            )
        except (ApiException, HTTPError) as error:
            if isinstance(error, ApiException) and error.status == NOT_FOUND:
                raise
        else:
            metadata = found.metadata
            if uid and metadata.uid != uid:
                return
            if self.attempt.is_before(metadata.labels or {}):
                self.calls.log.warning("Pod %s is left to a later try of this task", name)
                return
            expected = k8s.V1Preconditions(
                uid=metadata.uid, resource_version=metadata.resource_version
            )
        options = k8s.V1DeleteOptions(
            grace_period_seconds=0 if at_once else None, preconditions=expected
        )
        api.delete_namespaced_pod(
            name, self.namespace, body=options, _request_timeout=_request_timeout * (1 - _LOOK)
        )

    def delete_all(self, *, keep_dead: bool) -> None:
        """Delete the owner's pods, except a later try's and, with `keep_dead`, those that ended."""
        for pod in self._list():
            if self.attempt.is_before(pod.metadata.labels or {}):
                continue
            if keep_dead and self._state(pod).is_over:
                self.delete_secret(pod.metadata.name)
            elif pod.metadata.deletion_timestamp is None:
                self.calls.log.info("Removing pod %s", pod.metadata.name)
                self.delete(pod.metadata.name, pod.metadata.uid)

    def delete_secret(self, name: str) -> None:
        if not self.has_secrets:
            return
        try:
            self.calls.call_unlogged("delete_namespaced_secret", name, self.namespace)
        except ApiException as error:
            if error.status != NOT_FOUND:
                raise

    def _list(self) -> list[k8s.V1Pod]:
        listed = self.calls.call(
            "list_namespaced_pod", self.namespace, label_selector=self.attempt.selector
        )
        return sorted(listed.items, key=lambda pod: pod.metadata.creation_timestamp)

    def _state(self, pod: k8s.V1Pod) -> PodState:
        return PodState.of(pod, self.container_name)

    def _is_ending(self, pod: k8s.V1Pod) -> bool:
        """Whether the pod is terminating; past its grace period it is removed by force.

        The time counts from when this was first seen, because the cluster's clock may differ.
        """
        uid, metadata = pod.metadata.uid, pod.metadata
        if metadata.deletion_timestamp is None or self._state(pod).stage is Stage.ENDED:
            return False
        since = self._ending_since.setdefault(uid, time.monotonic())
        allowed_s = (metadata.deletion_grace_period_seconds or 0) + ENDING_MARGIN_S
        if time.monotonic() - since > allowed_s and not self.attempt.is_before(metadata.labels):
            self._ending_since[uid] = time.monotonic()
            self.calls.log.warning("Pod %s doesn't stop; removing it by force", metadata.name)
            self.delete(metadata.name, uid, at_once=True)
        return True

    def _create_or_read(
        self, api: CoreV1Api, pod: k8s.V1Pod, limits: Mapping[str, Any]
    ) -> tuple[k8s.V1Pod, bool]:
        """The new pod, or the owner's existing one of that name; and whether it is new."""
        while True:
            try:
                return api.create_namespaced_pod(self.namespace, pod, **limits), True
            except ApiException as error:
                if reason_of(error) != "AlreadyExists":
                    raise
                taken = error
            try:
                found = api.read_namespaced_pod(pod.metadata.name, self.namespace, **limits)
            except ApiException as error:
                if error.status != NOT_FOUND:
                    raise
                self.calls.pause(self.poll_s)  # its namesake has just vanished
                continue
            if (found.metadata.labels or {}).get(f"{LABEL}/attempt") != self.attempt.owner:
                raise taken  # not the owner's pod
            return found, False
