"""What happens in the node agent's event loop: scheduling, and being the nodes' link to the API."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import aiohttp
from support.kubernetes.api_client import ApiClient, RequestFailedError
from support.kubernetes.certificates import make_identity
from support.kubernetes.image_pull import POLL_S
from support.kubernetes.images import Image, PullFailure, pull_failure
from support.kubernetes.node import Node, NodeSettings
from support.kubernetes.pod_worker import PodWorker
from support.kubernetes.scheduler import place
from support.kubernetes.status import Object
from support.kubernetes.store import now_text

T = TypeVar("T")
_HEARTBEAT_S = 10.0


class PodNotHereError(LookupError):
    """No node of this agent runs the pod."""


class AgentCore:
    """Schedules the pods of one namespace onto its nodes, and speaks to the API for these.

    Made, used and closed in an event loop; tests use `NodeAgent`.
    """

    def __init__(self, kubeconfig: Path, namespace: str, folder: Path) -> None:
        self.namespace = namespace
        self.folder = folder
        self.images: dict[str, Image] = {}
        self.held_images: set[str] = set()
        self.holds_scheduling = False
        self.start_delay_s = 0.0
        self.nodes: dict[str, Node] = {}
        self.pods: dict[str, Object] = {}  # by uid: what the API said last
        self.vanishing: set[str] = set()  # names of pods; "*" is the next one
        self.failures: list[BaseException] = []
        self.changed = asyncio.Event()
        self.api = ApiClient(kubeconfig)
        self._context = make_identity(folder / "kubelet", "kubelet").server_context()
        self._tasks: list[asyncio.Task[None]] = []

    def pod_path(self, name: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{name}"

    def start(self) -> None:
        for work in (self._watch_pods(), self._schedule(), self._beat()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._note_end)
            self._tasks.append(task)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()):
            self.failures.append(failure)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self.nodes.values():
            if not node.lost:
                await node.close()
            self.failures += node.failures
            with contextlib.suppress(aiohttp.ClientError, RequestFailedError, OSError):
                await self.api.delete(f"/api/v1/nodes/{node.settings.name}")
        await self.api.close()

    async def add_node(self, settings: NodeSettings) -> None:
        """Register a node, and start its kubelet."""
        node = Node(settings, self, self.folder / "nodes" / settings.name)
        await node.start(self._context)
        body = node.as_object()
        await self.api.request("POST", "/api/v1/nodes", body)
        # An API server of its own accord taints new nodes, and controllers take that away.
        path = f"/api/v1/nodes/{settings.name}"
        await self.api.patch(path, {"spec": {"taints": body["spec"]["taints"] or None}})
        await self.api.patch(f"{path}/status", node.status())
        self.nodes[settings.name] = node
        self.changed.set()

    async def set_capacity(self, node: Node, amounts: Mapping[str, str]) -> None:
        node.capacity.update(amounts)
        await self.api.patch(f"/api/v1/nodes/{node.settings.name}/status", node.status())
        self.changed.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            for node in self.nodes.values():
                if not node.lost:
                    with contextlib.suppress(aiohttp.ClientError, RequestFailedError, OSError):
                        path = f"/api/v1/nodes/{node.settings.name}/status"
                        await self.api.patch(path, node.status())

    async def _watch_pods(self) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        async for kind, body in self.api.follow(path):
            if kind == "LISTED":
                listed = {each["metadata"]["uid"] for each in body["items"]}
                for uid in self.pods.keys() - listed:
                    self._gone(uid)
            elif kind == "DELETED":
                self._gone(body["metadata"]["uid"])
            else:
                self._seen(body)
            self.changed.set()

    def _seen(self, pod: Object) -> None:
        self.pods[pod["metadata"]["uid"]] = pod
        node = self.nodes.get(pod["spec"].get("nodeName", ""))
        if node is not None:
            node.sync(pod)

    def _gone(self, uid: str) -> None:
        self.pods.pop(uid, None)
        for node in self.nodes.values():
            node.forget(uid)

    async def _schedule(self) -> None:
        """Bind pods, whenever something has changed."""
        while True:
            await self.changed.wait()
            self.changed.clear()
            if self.holds_scheduling:
                continue
            await self._until_answered(self._schedule_once)

    async def _schedule_once(self) -> None:
        waiting = [each for each in self.pods.values() if _wants_node(each)]
        if not waiting:
            return
        nodes = [await self.api.get(f"/api/v1/nodes/{name}") for name in self.nodes]
        usable = [node for node in nodes if node is not None]
        for pod in sorted(waiting, key=_order):
            placement = place(pod, usable, self.pods.values())
            if placement.node:
                await self._bind(pod, placement.node)
            else:
                await self._tell_unschedulable(pod, placement.message)

    async def _bind(self, pod: Object, node: str) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        metadata = {"name": name, "namespace": self.namespace, "uid": uid}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        try:
            await self.api.request("POST", f"{self.pod_path(name)}/binding", body)
        except RequestFailedError as error:
            if error.code not in (404, 409):
                raise
            return
        if uid in self.pods:  # until the watch says so, so that no other pod gets its place
            spec = {**self.pods[uid]["spec"], "nodeName": node}
            self.pods[uid] = {**self.pods[uid], "spec": spec}
        message = f"Successfully assigned {self.namespace}/{name} to {node}"
        await self.record_event(pod, "Normal", "Scheduled", message, "default-scheduler")

    async def _tell_unschedulable(self, pod: Object, message: str) -> None:
        conditions = pod["status"].get("conditions", [])
        told: Object = next((each for each in conditions if each["type"] == "PodScheduled"), {})
        if told.get("message") == message:
            return
        unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        condition = {**unschedulable, "message": message, "lastTransitionTime": now_text()}
        others = [each for each in conditions if each["type"] != "PodScheduled"]
        await self.patch_status(pod, {"conditions": [*others, condition]})
        await self.record_event(pod, "Warning", "FailedScheduling", message, "default-scheduler")

    async def patch_status(self, pod: Object, status: Object) -> None:
        """Merge into a pod's status, if it still is this pod."""
        metadata = pod["metadata"]
        body = {"metadata": {"uid": metadata["uid"]}, "status": status}
        try:
            await self.api.patch(f"{self.pod_path(metadata['name'])}/status", body)
        except RequestFailedError as error:
            if error.code not in (404, 409, 422):  # gone, or another pod of that name
                raise

    async def record_event(
        self,
        pod: Object,
        kind: str,
        reason: str,
        message: str,
        component: str,
        field: str = "",
    ) -> None:
        """Create an Event about a pod, if it can be created."""
        metadata, now = pod["metadata"], now_text()
        name = f"{metadata['name'][:200]}.{uuid.uuid4().hex[:16]}"
        about = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": metadata["name"],
            "namespace": self.namespace,
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
            **({"fieldPath": field} if field else {}),
        }
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": self.namespace},
            "involvedObject": about,
            "type": kind,
            "reason": reason,
            "message": message,
            "source": {"component": component},
            "reportingComponent": component,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        with contextlib.suppress(RequestFailedError, aiohttp.ClientError, OSError):
            await self.api.request("POST", f"/api/v1/namespaces/{self.namespace}/events", body)

    # What pods ask of their node (pod_worker.Host).

    def image(self, name: str, policy: str) -> Image | PullFailure | None:
        if name in self.held_images:
            return None
        return self.images.get(name) or pull_failure(name, policy)

    async def read(self, plural: str, name: str) -> Object | None:
        path = f"/api/v1/namespaces/{self.namespace}/{plural}/{name}"
        return await self._until_answered(lambda: self.api.get(path))

    async def report(self, pod: Object, patch: Object) -> None:
        await self._until_answered(lambda: self.patch_status(pod, patch["status"]))

    async def remove(self, pod: Object) -> None:
        metadata = pod["metadata"]
        path, uid = self.pod_path(metadata["name"]), metadata["uid"]
        await self._until_answered(lambda: self.api.delete(path, uid, grace_s=0))

    async def record(
        self, pod: Object, kind: str, reason: str, message: str, container: str
    ) -> None:
        group = "containers"
        if container in [each["name"] for each in pod["spec"].get("initContainers", [])]:
            group = "initContainers"
        field = f"spec.{group}{{{container}}}" if container else ""
        await self.record_event(pod, kind, reason, message, "kubelet", field)

    def takes_before_saying(self, pod: Object) -> bool:
        for name in (pod["metadata"]["name"], "*"):
            if name in self.vanishing:
                self.vanishing.discard(name)
                return True
        return False

    def start_delay(self) -> float:
        return self.start_delay_s

    async def _until_answered(self, send: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await send()
            except (aiohttp.ClientError, OSError):
                pass
            except RequestFailedError as error:
                if error.code < 500 and error.code != 429:
                    raise
            await asyncio.sleep(POLL_S)

    def worker(self, name: str) -> PodWorker:
        """What runs a pod.

        Raises:
            PodNotHereError: No node does.
        """
        for node in self.nodes.values():
            for worker in node.workers.values():
                if worker.pod["metadata"]["name"] == name:
                    return worker
        raise PodNotHereError(f"no node runs pod {name}")

    def find(self, name: str) -> Object:
        """The newest pod of this name, as the API knows it."""
        for pod in self.pods.values():
            if pod["metadata"]["name"] == name:
                return pod
        raise PodNotHereError(f"there is no pod {name}")


def _wants_node(pod: Object) -> bool:
    spec, metadata = pod["spec"], pod["metadata"]
    mine = spec.get("schedulerName") == "default-scheduler" and not spec.get("schedulingGates")
    return mine and not spec.get("nodeName") and "deletionTimestamp" not in metadata


def _order(pod: Object) -> tuple[int, str, int]:
    metadata = pod["metadata"]
    created = metadata["creationTimestamp"]
    return -pod["spec"].get("priority", 0), created, int(metadata["resourceVersion"])
