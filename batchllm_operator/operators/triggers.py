"""The trigger that watches a pod while its task is deferred."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import yaml
from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
from airflow.providers.cncf.kubernetes.triggers.pod import KubernetesPodTrigger
from airflow.triggers.base import TriggerEvent
from asgiref.sync import sync_to_async

from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.operators.pods.watch import PodName, PodWatch, WatchLimits

_STATE_LIMIT_S: Final = 10.0
"""For asking Airflow for the task's state; it gives a cancelled trigger thirty seconds."""


_unfinished: Final[set[asyncio.Task[None]]] = set()
"""The event loop itself would forget them."""


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that goes on even if whoever waits is cancelled.

    Airflow cancels a trigger again and again, each second until it has ended: what it does about
    the first time would be cut off by the second.
    """
    task = asyncio.create_task(work)
    _unfinished.add(task)
    task.add_done_callback(_unfinished.discard)
    await asyncio.shield(task)


def make_hook(
    kubernetes_conn_id: str | None,
    in_cluster: bool | None,
    cluster_context: str | None,
    config_file: str | None,
) -> AsyncKubernetesHook:
    """A hook that reads its configuration where it is used; no credential is handed on."""
    config_dict = None
    if config_file is not None:
        config_dict = yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
    return AsyncKubernetesHook(
        conn_id=kubernetes_conn_id,
        in_cluster=in_cluster,
        cluster_context=cluster_context,
        config_dict=config_dict,
    )


class PodWatchTrigger(KubernetesPodTrigger):
    """Runs a `PodWatch` and fires one event, a `PodEnd`.

    When the user kills the task, the pod is deleted, by what Airflow's own trigger does: in
    `on_kill` from Airflow 3.3 on, before that in `cleanup` once the task isn't deferred any more.
    A restart of the triggerer leaves the pod alone.

    Args:
        pod_name: the pod.
        pod_namespace: its namespace.
        pod_uid: its UID, under which a plan's result is recorded.
        container_name: its main container.
        limits: a `WatchLimits`, as a dictionary.
        kubernetes_conn_id: as for the operator, and so are the next two.
        in_cluster: whether the triggerer's own service account is used.
        cluster_context: of the kubeconfig.
        config_file: the kubeconfig's path; the triggerer reads it, so it has to be there too.
        deadline: when the task's `execution_timeout` is reached, in ISO format.
        aws_conn_id: connection whose secrets are to be masked in what the pod says.
        connection_env: likewise.
        removes: whether the pod is to be removed when it has ended. One that hasn't, and that
            nobody watches from then on, is removed in any case: the worker may come late.
    """

    def __init__(
        self,
        *,
        pod_name: str,
        pod_namespace: str,
        pod_uid: str,
        container_name: str,
        limits: dict[str, float],
        kubernetes_conn_id: str | None,
        in_cluster: bool | None,
        cluster_context: str | None,
        config_file: str | None,
        deadline: str | None,
        aws_conn_id: str | None,
        connection_env: dict[str, str],
        removes: bool,
    ) -> None:
        super().__init__(
            pod_name=pod_name,
            pod_namespace=pod_namespace,
            trigger_start_time=datetime.now().astimezone(),
            base_container_name=container_name,
            kubernetes_conn_id=kubernetes_conn_id,
            in_cluster=in_cluster,
            cluster_context=cluster_context,
        )
        self._limits = WatchLimits(**limits)
        self._pod_uid, self._config_file, self._deadline = pod_uid, config_file, deadline
        self._aws_conn_id, self._connection_env = aws_conn_id, connection_env
        self._removes = removes

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and arguments that make this trigger again."""
        return (
            "batchllm_operator.operators.triggers.PodWatchTrigger",
            {
                "pod_name": self.pod_name,
                "pod_namespace": self.pod_namespace,
                "pod_uid": self._pod_uid,
                "container_name": self.base_container_name,
                "limits": asdict(self._limits),
                "kubernetes_conn_id": self.kubernetes_conn_id,
                "in_cluster": self.in_cluster,
                "cluster_context": self.cluster_context,
                "config_file": self._config_file,
                "deadline": self._deadline,
                "aws_conn_id": self._aws_conn_id,
                "connection_env": self._connection_env,
                "removes": self._removes,
            },
        )

    def _make_hook(self) -> AsyncKubernetesHook:
        return make_hook(
            self.kubernetes_conn_id, self.in_cluster, self.cluster_context, self._config_file
        )

    @property
    def hook(self) -> AsyncKubernetesHook:
        """A new one, for `on_kill` and `cleanup`."""
        return self._make_hook()

    async def on_kill(self) -> None:
        """Delete the pod when a user has killed the task (Airflow 3.3 and later).

        A triggerer that was cut off for a while has lost its triggers to another one, and takes
        that for a user's doing; then the task is still deferred, and the pod is left alone.
        """
        await _to_its_end(self._delete_if_killed())

    async def cleanup(self) -> None:
        """Delete the pod before Airflow 3.3, if the task isn't deferred any more."""
        await _to_its_end(super().cleanup())

    async def _delete_if_killed(self) -> None:
        try:
            is_killed = await asyncio.wait_for(self.safe_to_cancel(), _STATE_LIMIT_S)
        # Whatever it is: a pod that nobody watches costs more than one that is made again.
        except Exception as error:  # noqa: BLE001
            self.log.warning("Can't tell why the trigger was cancelled: %r", error)
            is_killed = True
        if is_killed:
            await super().on_kill()

    async def _mask(self) -> Callable[[str], str]:
        """Takes the connections' secrets out of a text: this process doesn't know them yet."""
        try:
            credentials = await sync_to_async(Credentials.of)(
                self._aws_conn_id, self._connection_env
            )
        # Whatever it is: the pod has to be watched, and then nothing that it says is passed on.
        except Exception as error:  # noqa: BLE001
            self.log.warning("Can't read the connections; the pod's lines are left out: %s", error)
            return lambda text: "(left out)"
        return credentials.masker

    async def _remove(self, *, at_once: bool) -> None:
        """Remove the pod; if that fails, the worker will when it goes on."""
        try:
            await self.hook.delete_pod(
                name=self.pod_name,
                namespace=self.pod_namespace,
                grace_period_seconds=0 if at_once else None,
            )
        # Whatever it is, the event has to be fired.
        except Exception as error:  # noqa: BLE001
            self.log.warning("Pod %s is left to the worker to remove: %s", self.pod_name, error)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once, when the pod has ended in whatever way."""
        watch = PodWatch(
            self._make_hook,
            PodName(self.pod_name, self.pod_namespace, self.base_container_name, self._pod_uid),
            self._limits,
            lambda line: self.log.info("%s", line),
            deadline=datetime.fromisoformat(self._deadline) if self._deadline else None,
            masked=await self._mask(),
        )
        end = await watch.until_end()
        if not end.is_unseen and (self._removes or not end.may_stay):
            await self._remove(at_once=end.is_unreachable)
        self._fired_event = True
        yield TriggerEvent(end.as_event())  # type: ignore[no-untyped-call]
