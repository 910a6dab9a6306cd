"""A node of the cluster: its object, its kubelet's endpoint, and the pods that run on it."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.kubernetes.container_log import ContainerLog
from support.kubernetes.kubelet_server import KubeletServer
from support.kubernetes.pod_worker import End, Host, PodWorker
from support.kubernetes.status import Object
from support.kubernetes.store import now_text

CAPACITY = {"cpu": "8", "memory": "16Gi", "ephemeral-storage": "100Gi", "pods": "110"}
_ADDRESSES = itertools.count(2)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What a test wants of a node; `capacity` adds to, or overrides, a plain machine's."""

    name: str
    capacity: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()


class Node:
    """Runs pods that are bound to it, until it is lost or closed."""

    def __init__(self, settings: NodeSettings, host: Host, folder: Path) -> None:
        self.settings = settings
        self.capacity = {**CAPACITY, **settings.capacity}
        self.lost = False
        self.workers: dict[str, PodWorker] = {}  # by the pod's uid
        self.failures: list[BaseException] = []
        self._host = host
        self._folder = folder
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._seen: set[str] = set()
        self._server = KubeletServer(self._find_log)

    async def start(self, context: ssl.SSLContext) -> None:
        """Open the kubelet's endpoint."""
        await self._server.start(context)

    async def close(self) -> None:
        """End everything that runs here, unreported."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._server.close()

    async def lose(self) -> None:
        """Die: processes, endpoint and all."""
        self.lost = True
        await self.close()

    def as_object(self) -> Object:
        """The Node object, with its status."""
        name = self.settings.name
        labels = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
            **self.settings.labels,
        }
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "spec": {"taints": [dict(each) for each in self.settings.taints]},
            **self.status(),
        }

    def status(self) -> dict[str, Any]:
        """The body of a merge patch of the node's status."""
        now = now_text()
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "kubelet is posting ready status",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        return {
            "status": {
                "capacity": self.capacity,
                "allocatable": self.capacity,
                "addresses": [
                    {"type": "InternalIP", "address": "127.0.0.1"},
                    {"type": "Hostname", "address": self.settings.name},
                ],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": self._server.port}},
                "conditions": [ready],
            }
        }

    def sync(self, pod: Object) -> None:
        """Take note of a pod that is bound here."""
        metadata = pod["metadata"]
        uid, worker = metadata["uid"], self.workers.get(metadata["uid"])
        if self.lost:
            return
        if worker is None:
            if uid not in self._seen and pod["status"].get("phase") not in ("Succeeded", "Failed"):
                self._seen.add(uid)
                self._take(pod)
                self.sync(pod)
            return
        worker.pod = pod
        if "deletionTimestamp" in metadata:
            grace_s = metadata.get("deletionGracePeriodSeconds", 0)
            worker.stop(End(grace_s, removes=True, forgets=True))

    def _take(self, pod: Object) -> None:
        uid, number = pod["metadata"]["uid"], next(_ADDRESSES)
        folder = self._folder / "pods" / uid
        folder.mkdir(parents=True)
        address = f"10.244.{number // 250 % 250}.{number % 250 + 1}"
        worker = PodWorker(pod, self._host, folder, self._folder.parent / "claims", address)
        self.workers[uid] = worker
        task = self._tasks[uid] = asyncio.create_task(worker.run())
        task.add_done_callback(lambda done: self._note_end(uid, done))

    def _note_end(self, uid: str, task: asyncio.Task[None]) -> None:
        self.workers.pop(uid, None)
        self._tasks.pop(uid, None)
        if not task.cancelled() and (failure := task.exception()):
            self.failures.append(failure)

    def forget(self, uid: str) -> None:
        """The pod's object is gone: end what is left of it."""
        if uid in self.workers:
            self.workers[uid].stop(End(0, silent=True, forgets=True))

    def _find_log(self, namespace: str, pod: str, container: str) -> ContainerLog | tuple[int, str]:
        for worker in self.workers.values():
            metadata = worker.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, pod):
                break
        else:
            return 404, f'pod "{pod}" not found'
        if container in worker.logs:
            return worker.logs[container]
        waiting = worker.status.of(container).state.get("waiting", {})
        reason = waiting.get("reason", "ContainerCreating")
        why = f"is waiting to start: {reason}"
        if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName"):
            why = "is waiting to start: trying and failing to pull image"
        return 400, f'container "{container}" in pod "{pod}" {why}'
