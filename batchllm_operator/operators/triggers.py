"""The trigger that watches a pod while its task is deferred."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import yaml
from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
from airflow.providers.cncf.kubernetes.triggers.pod import KubernetesPodTrigger
from airflow.triggers.base import TriggerEvent

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
    connection_extras: dict[str, Any] | None = None,
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
        connection_extras=connection_extras,
    )


class PodWatchTrigger(KubernetesPodTrigger):
    """Runs a `PodWatch` and fires one event, a `PodEnd`.

    When the user kills the task, the pod is deleted, by what Airflow's own trigger does: in
    `on_kill` from Airflow 3.3 on, before that in `cleanup` once the task isn't deferred any more.
    A restart of the triggerer leaves the pod alone.

    Args:
        pod_name: the pod.
        pod_namespace: its namespace.
        container_name: its main container.
        limits: a `WatchLimits`, as a dictionary.
        kubernetes_conn_id: as for the operator, which also explains the next three.
        in_cluster: ...
        cluster_context: ...
        config_file: read by the triggerer.
        deadline: when the task's `execution_timeout` is reached, in ISO format.
        log_since: where the log is to be taken up.
        grace_s: what the pod gets to stop in.
    """

    def __init__(
        self,
        *,
        pod_name: str,
        pod_namespace: str,
        container_name: str,
        limits: dict[str, float],
        kubernetes_conn_id: str | None,
        in_cluster: bool | None,
        cluster_context: str | None,
        config_file: str | None,
        deadline: str | None,
        log_since: str | None,
        grace_s: int,
    ) -> None:
        super().__init__(
            pod_name=pod_name,
            pod_namespace=pod_namespace,
            trigger_start_time=datetime.now().astimezone(),
            base_container_name=container_name,
            kubernetes_conn_id=kubernetes_conn_id,
            in_cluster=in_cluster,
            cluster_context=cluster_context,
            termination_grace_period=grace_s,
        )
        self._limits = WatchLimits(**limits)
        self._config_file = config_file
        self._deadline, self._log_since = deadline, log_since

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and arguments that make this trigger again."""
        return (
            "batchllm_operator.operators.triggers.PodWatchTrigger",
            {
                "pod_name": self.pod_name,
                "pod_namespace": self.pod_namespace,
                "container_name": self.base_container_name,
                "limits": asdict(self._limits),
                "kubernetes_conn_id": self.kubernetes_conn_id,
                "in_cluster": self.in_cluster,
                "cluster_context": self.cluster_context,
                "config_file": self._config_file,
                "deadline": self._deadline,
                "log_since": self._log_since,
                "grace_s": self.termination_grace_period,
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

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once, when the pod has ended in whatever way."""
        watch = PodWatch(
            self._make_hook,
            PodName(self.pod_name, self.pod_namespace, self.base_container_name),
            self._limits,
            lambda line: self.log.info("%s", line),
            deadline=datetime.fromisoformat(self._deadline) if self._deadline else None,
            log_since=self._log_since,
        )
        end = await watch.until_end()
        self._fired_event = True
        yield TriggerEvent(end.as_event())  # type: ignore[no-untyped-call]
