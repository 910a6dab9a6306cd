"""The trigger that watches a pod while its task is deferred."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import yaml
from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
from airflow.providers.cncf.kubernetes.triggers.pod import KubernetesPodTrigger
from airflow.providers.cncf.kubernetes.version_compat import AIRFLOW_V_3_3_PLUS
from airflow.triggers.base import TriggerEvent
from asgiref.sync import sync_to_async
from kubernetes_asyncio.client import CoreV1Api, V1DeleteOptions, V1Preconditions
from kubernetes_asyncio.client.exceptions import ApiException
from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.operators.pods.api_errors import CONFLICT, NOT_FOUND, is_passing
from batchllm_operator.operators.pods.watch import PodName, PodWatch, WatchLimits
from batchllm_operator.operators.tries import LIVE_STATES

_STATE_LIMIT_S: Final = 10.0
"""Limit for reading the task's state: a cancelled trigger has thirty seconds."""
_REQUEST_S: Final = 10.0
_REMOVAL_S: Final = 30.0
"""Limit for removing a pod before the event is fired; the worker tries again."""


_unfinished: Final[set[asyncio.Task[None]]] = set()
"""Strong references: the event loop keeps only weak ones."""


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that continues even if the waiter is cancelled.

    Airflow cancels a trigger every second until it has ended, so the second cancellation would cut
    off the clean-up that the first one began.
    """
    task = asyncio.create_task(work)
    _unfinished.add(task)
    task.add_done_callback(_unfinished.discard)
    await asyncio.shield(task)


@dataclass(frozen=True, slots=True)
class Cluster:
    """How to reach a cluster; each process reads its own credentials."""

    kubernetes_conn_id: str | None
    """This and the next two: as for the operator."""
    in_cluster: bool | None
    cluster_context: str | None
    config_file: str | None
    """Path of the kubeconfig, which the triggerer must be able to read, too."""

    def hook(self) -> AsyncKubernetesHook:
        config_dict = None
        if self.config_file is not None:
            config_dict = yaml.safe_load(Path(self.config_file).read_text(encoding="utf-8"))
        return AsyncKubernetesHook(
            conn_id=self.kubernetes_conn_id,
            in_cluster=self.in_cluster,
            cluster_context=self.cluster_context,
            config_dict=config_dict,
        )


@dataclass(frozen=True, slots=True)
class WatchedPod(Cluster):
    """The arguments of `PodWatchTrigger`, JSON-serializable."""

    pod_name: str
    pod_namespace: str
    pod_uid: str
    """The UID under which a plan's result is recorded."""
    container_name: str
    limits: dict[str, float]
    """A `WatchLimits`."""
    deadline: str | None
    """When the task's `execution_timeout` is reached, in ISO format."""
    aws_conn_id: str | None
    """Connection whose secrets are masked in the pod's texts, as in `connection_env`."""
    connection_env: dict[str, str]
    removes: bool
    """Whether to remove the pod after its end. A pod that still holds resources is removed in any
    case: the worker may come late."""
    log_ns: int = -1
    """As for `PodWatch`."""


class PodWatchTrigger(KubernetesPodTrigger):
    """Runs a `PodWatch` and fires one event, a `PodEnd`.

    When the user kills the task, the pod is deleted: in `on_kill` from Airflow 3.3 on, before that
    in `cleanup` once no try of the task lives. A restart of the triggerer leaves the pod alone.

    Args:
        arguments: those of `WatchedPod`.
    """

    def __init__(self, **arguments: Any) -> None:
        pod = self._pod = WatchedPod(**arguments)
        super().__init__(
            pod_name=pod.pod_name,
            pod_namespace=pod.pod_namespace,
            trigger_start_time=datetime.now().astimezone(),
            base_container_name=pod.container_name,
            kubernetes_conn_id=pod.kubernetes_conn_id,
            in_cluster=pod.in_cluster,
            cluster_context=pod.cluster_context,
        )
        self._limits = WatchLimits(**pod.limits)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "batchllm_operator.operators.pods.triggers.PodWatchTrigger", asdict(self._pod)

    async def on_kill(self) -> None:
        """Delete the pod when a user has killed the task (Airflow 3.3 and later).

        A triggerer that was cut off loses its triggers to another one, and calls this, too; but
        then a try of the task lives, and has the pod.
        """
        await _to_its_end(self._delete_if_killed(if_unknown=True))

    async def cleanup(self) -> None:
        """Delete the pod before Airflow 3.3, if no try of the task lives any more."""
        if not AIRFLOW_V_3_3_PLUS:
            await _to_its_end(self._delete_if_killed(if_unknown=False))

    async def _delete_if_killed(self, *, if_unknown: bool) -> None:
        if self._fired_event:
            return
        try:
            state = await asyncio.wait_for(self.get_task_state(), _STATE_LIMIT_S)  # type: ignore[no-untyped-call]
            is_killed = state not in LIVE_STATES
        # Any error: an unwatched pod costs more than one that is created again.
        except Exception as error:  # noqa: BLE001
            self.log.warning("Can't tell why the trigger was cancelled: %r", error)
            is_killed = if_unknown
        if not is_killed:
            return
        self.log.info("Removing pod %s in namespace %s", self.pod_name, self.pod_namespace)
        try:
            await self._delete(self._limits.api_s)
        # Any error ends here: the trigger has been cancelled.
        except Exception as error:  # noqa: BLE001
            self.log.error("Pod %s couldn't be removed: %r", self.pod_name, error)

    async def _delete(self, patience_s: float, *, at_once: bool = False) -> None:
        tries = AsyncRetrying(
            wait=wait_random_exponential(max=15), retry=retry_if_exception(is_passing), reraise=True
        )
        async with asyncio.timeout(patience_s):
            await tries(self._delete_once, 0 if at_once else None)

    async def _delete_once(self, grace_s: int | None) -> None:
        """Delete the pod, but not another one of its name."""
        where = (self.pod_name, self.pod_namespace)
        options = V1DeleteOptions(
            grace_period_seconds=grace_s, preconditions=V1Preconditions(uid=self._pod.pod_uid)
        )
        async with self._pod.hook().get_conn() as connection:
            api = CoreV1Api(connection)
            try:
                await api.delete_namespaced_pod(*where, body=options, _request_timeout=_REQUEST_S)
            except ApiException as error:
                if error.status == NOT_FOUND:
                    return
                if error.status != CONFLICT:
                    raise
                found = await api.read_namespaced_pod(*where, _request_timeout=_REQUEST_S)
                if found.metadata.uid == self._pod.pod_uid:
                    raise

    async def _mask(self) -> Callable[[str], str]:
        """A function that masks the connections' secrets, which this process hasn't read yet."""
        try:
            credentials = await sync_to_async(Credentials.of)(
                self._pod.aws_conn_id, self._pod.connection_env
            )
        # Any error: the pod has to be watched, but then none of its texts is passed on.
        except Exception as error:  # noqa: BLE001
            self.log.warning("Can't read the connections; the pod's lines are left out: %s", error)
            return lambda text: "(left out)"
        return credentials.masker

    async def _remove(self, *, at_once: bool) -> None:
        """Remove the pod; if that fails, the worker removes it when it resumes."""
        try:
            await self._delete(_REMOVAL_S, at_once=at_once)
        # Any error: the event has to be fired.
        except Exception as error:  # noqa: BLE001
            self.log.warning("Pod %s is left to the worker to remove: %s", self.pod_name, error)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once, when the watch has ended."""
        watch = PodWatch(
            self._pod.hook,
            PodName(self.pod_name, self.pod_namespace, self.base_container_name, self._pod.pod_uid),
            self._limits,
            lambda line: self.log.info("%s", line),
            deadline=datetime.fromisoformat(self._pod.deadline) if self._pod.deadline else None,
            masked=await self._mask(),
            log_ns=self._pod.log_ns,
        )
        end = await watch.until_end()
        if end.is_known and (self._pod.removes or not end.may_stay):
            await self._remove(at_once=end.is_unreachable)
        self._fired_event = True
        yield TriggerEvent(end.as_event())  # type: ignore[no-untyped-call]
