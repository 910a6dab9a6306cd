"""A node agent: plays the kubelets of one namespace for any API server, through its API only.

It also does what goes wrong on clusters, as the component does it that would.
"""

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.kubernetes.api_client import ApiClient
from support.kubernetes.http_server import HttpServer, Request, self_signed
from support.kubernetes.objects import ApiError, Object, has_ended, now_text, with_condition
from support.kubernetes.pod_worker import Image, PodWorker

_CAPACITY = {"cpu": "8", "memory": "16Gi", "ephemeral-storage": "100Gi", "pods": "2000"}
_HEARTBEAT_S = 5
_LIMIT_S = 90.0


class NodeAgent:
    """Runs the pods of `namespace` that are bound to its nodes, until `close`.

    Methods that inject a fault return when the API knows of it, or would if it were reported.

    Attributes:
        images: the images that its nodes have.
    """

    def __init__(self, kubeconfig: Path, namespace: str, *, serves_logs: bool) -> None:
        self.api, self.namespace = ApiClient(kubeconfig), namespace
        self.images: dict[str, Image] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="batchllm-nodes-"))
        context = self_signed(self._folder) if serves_logs else None
        self._logs = HttpServer(self._answer_log, context)
        self._held: set[str] = set()
        self._is_vanishing = False
        self._nodes: dict[str, dict[str, str]] = {}  # capacity by name
        self._lost: set[str] = set()
        self._workers: dict[str, PodWorker] = {}  # by the pod's uid
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # no pod is started once it is closed
        self._is_closed = False
        self._failure: BaseException | None = None
        self.default_node = f"node-{namespace}"
        self.add_node(self.default_node)
        self._thread = threading.Thread(target=self._run, name="node-agent", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End everything; raise what went wrong inside."""
        with self._lock:
            self._is_closed = True
        for worker in list(self._workers.values()):
            worker.abandon()
        for thread in self._threads:
            thread.join()
        for name in self._nodes:
            self.api.ask("DELETE", _node_path(name))
        self._logs.close()
        self.api.close()
        shutil.rmtree(self._folder)
        if self._failure is not None:
            raise self._failure

    # What the nodes are and know

    def add_image(self, name: str, image: Image | None = None) -> None:
        """Make an image known; pods that wait for it go on."""
        self.images[name] = image or Image()

    def hold_images(self, *names: str) -> None:
        """Let pulls of these images take until they are released."""
        self._held.update(names)

    def release_images(self, *names: str) -> None:
        self._held.difference_update(names)

    def is_held(self, image: str) -> bool:
        return image in self._held

    def hold_scheduling(self) -> None:
        """Let no pod get a node from now on."""
        for name in self._nodes:
            self.api.patch(_node_path(name), {"spec": {"unschedulable": True}})

    def add_node(self, name: str) -> None:
        self._nodes[name] = dict(_CAPACITY)
        node = {"apiVersion": "v1", "kind": "Node", "spec": {}, "status": self._status(name)}
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        node["metadata"] = {"name": name, "labels": labels}
        self.api.must("POST", "/api/v1/nodes", node)

    def set_capacity(self, amounts: Mapping[str, str]) -> None:
        """Change resources of the first node, such as `{"nvidia.com/gpu": "1"}`; others stay."""
        self._nodes[self.default_node].update(amounts)
        self._beat(self.default_node)

    def _status(self, name: str) -> Object:
        amounts = {"capacity": self._nodes[name], "allocatable": self._nodes[name]}
        address = {"type": "InternalIP", "address": "127.0.0.1"}
        status: Object = {**amounts, "addresses": [address]}
        status["daemonEndpoints"] = {"kubeletEndpoint": {"Port": self._logs.server_port}}
        status = with_condition(status, "Ready", reason="KubeletReady", message="ready")
        status["conditions"][0]["lastHeartbeatTime"] = now_text()
        return status

    def _beat(self, name: str) -> None:
        self.api.patch(_node_path(name, "status"), {"status": self._status(name)})

    def worker(self, pod: str) -> PodWorker:
        """What runs a pod.

        Raises:
            LookupError: no node does.
        """
        for worker in list(self._workers.values()):
            if worker.name == pod:
                return worker
        raise LookupError(f"no node runs pod {pod}")

    def pid(self, pod: str) -> int:
        """The first process of a pod that runs."""
        process = self.worker(pod).process
        assert process is not None
        return process.pid

    def freeze(self, pod: str) -> None:
        """Let a pod's processes stand still: it is `Running`, and no signal to end is heard."""
        self.worker(pod).signal(signal.SIGSTOP)

    def thaw(self, pod: str) -> None:
        self.worker(pod).signal(signal.SIGCONT)

    def read_log(self, pod: str, query: Mapping[str, str]) -> bytes:
        """A pod's log, or its end.

        Raises:
            ApiError: 404, no node has it; 400, its container hasn't begun.
        """
        try:
            worker = self.worker(pod)
        except LookupError as error:
            raise ApiError(404, "NotFound", f'pod "{pod}" not found') from error
        if worker.process is None:
            raise ApiError(400, "BadRequest", f'container in pod "{pod}" is waiting to start')
        data = worker.log.read_bytes()
        if "tailLines" in query:
            data = b"".join(data.splitlines(keepends=True)[-int(query["tailLines"]) :])
        return data[: int(query["limitBytes"])] if "limitBytes" in query else data

    def _answer_log(self, request: Request) -> None:
        """What a real API server asks for: `/containerLogs/NAMESPACE/POD/CONTAINER`."""
        pod = request.path.partition("?")[0].split("/")[3]
        request.send_bytes(200, self.read_log(pod, request.query), "text/plain")

    # Faults

    def evict(self, pod: str) -> None:
        """End a pod as a kubelet does whose memory runs out: phase Failed, reason Evicted."""
        message = "The node was low on resource: memory. Threshold quantity: 100Mi. "
        self.worker(pod).evict(message, is_disrupted=True)
        self._await_end(pod)

    def evict_for_own_disk(self, pod: str, volume: str, limit: str) -> None:
        """As `evict`, for a volume that has outgrown its limit: without `DisruptionTarget`."""
        message = f'Usage of EmptyDir volume "{volume}" exceeds the limit "{limit}". '
        self.worker(pod).evict(message, is_disrupted=False)
        self._await_end(pod)

    def preempt(self, pod: str) -> None:
        """Delete a pod as the scheduler does for a more important one."""
        self._disrupt(pod, "PreemptionByScheduler", "preempting for a higher priority pod")

    def oom_kill(self, pod: str) -> None:
        """Kill a pod's container as the kernel does: 137, OOMKilled."""
        worker = self.worker(pod)
        worker.is_out_of_memory = True
        worker.signal(signal.SIGKILL)
        self._await_end(pod)

    def vanish_after_finish(self) -> None:
        """Remove the next pod that exits 0, before anyone has seen that."""
        self._is_vanishing = True

    def lose_node(self) -> None:
        """First step: the node dies. Its pods look as before, and their logs can't be read."""
        self._lost.add(self.default_node)
        for uid, worker in list(self._workers.items()):
            if self._is_lost(worker.pod):
                self._workers.pop(uid, worker).abandon()
                worker.thread.join()

    def mark_node_unreachable(self) -> None:
        """Second step, 40 s later in real: the node isn't ready any more."""
        unknown = {"type": "Ready", "status": "Unknown", "lastTransitionTime": now_text()}
        path = _node_path(self.default_node, "status")
        self.api.patch(path, {"status": {"conditions": [unknown]}})

    def delete_pods_of_lost_node(self) -> None:
        """Third step, 300 s later: its pods are deleted, and stay Terminating."""
        for pod in self._list()["items"]:
            if self._is_lost(pod) and not has_ended(pod):
                message = "Taint manager: deleting due to NoExecute taint"
                self._disrupt(pod["metadata"]["name"], "DeletionByTaintManager", message)

    def collect_lost_pods(self) -> None:
        """Last step: the Node object goes, and the cluster collects its pods."""
        self.api.must("DELETE", _node_path(self.default_node))

    def _disrupt(self, name: str, reason: str, message: str) -> None:
        pod = self.api.must("GET", self.path("pods", name))
        why = {"reason": reason, "message": message}
        conditions = with_condition(pod["status"], "DisruptionTarget", **why)["conditions"]
        self.api.patch(self.path("pods", name, "status"), {"status": {"conditions": conditions}})
        self.api.must("DELETE", self.path("pods", name))

    def _await_end(self, name: str) -> None:
        until = time.monotonic() + _LIMIT_S
        while (pod := self.read("pods", name)) is not None and not has_ended(pod):
            assert time.monotonic() < until, f"pod {name} doesn't end"
            time.sleep(0.01)

    def _is_lost(self, pod: Object) -> bool:
        return pod["spec"].get("nodeName") in self._lost

    # What its pods need of the API

    def path(self, plural: str, name: str = "", subresource: str = "") -> str:
        parts = ["/api/v1/namespaces", self.namespace, plural, name, subresource]
        return "/".join(filter(None, parts))

    def read(self, plural: str, name: str) -> Object | None:
        """An object of the namespace, if it is there."""
        code, body = self.api.ask("GET", self.path(plural, name))
        return body if code == 200 else None

    def remove(self, pod: Object) -> None:
        """Delete the object of a pod that has ended."""
        metadata = pod["metadata"]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        self.api.ask("DELETE", self.path("pods", metadata["name"]), options)

    def is_to_vanish(self) -> bool:
        """Whether the pod is to vanish that has exited 0 just now."""
        vanishes, self._is_vanishing = self._is_vanishing, False
        return vanishes

    def _run(self) -> None:
        """Follow the namespace's pods; between two watches, tell the API that the nodes live."""
        try:
            while not self._is_closed:
                listed = self._list()
                for pod in listed["items"]:
                    self._note(pod)
                self._forget({pod["metadata"]["uid"] for pod in listed["items"]})
                revision = listed["metadata"]["resourceVersion"]
                for kind, pod in self.api.watch(self.path("pods"), revision, _HEARTBEAT_S):
                    if kind == "DELETED":
                        self._forget(self._workers.keys() - {pod["metadata"]["uid"]})
                    elif kind != "ERROR":
                        self._note(pod)
                for name in self._nodes.keys() - self._lost:
                    self._beat(name)
        except BaseException as error:
            if not self._is_closed:
                self._failure = error
                raise

    def _list(self) -> Any:
        return self.api.must("GET", self.path("pods"))

    def _note(self, pod: Object) -> None:
        with self._lock:
            if not self._is_closed:
                self._sync(pod)

    def _sync(self, pod: Object) -> None:
        """Begin to run a pod, or end it, as its object says."""
        metadata, node = pod["metadata"], pod["spec"].get("nodeName")
        worker = self._workers.get(metadata["uid"])
        if worker is None:
            if node not in self._nodes.keys() - self._lost or has_ended(pod):
                return
            worker = PodWorker(self, pod, self._folder / metadata["uid"])
            self._workers[metadata["uid"]] = worker
            self._threads.append(worker.thread)
            worker.thread.start()
        if "deletionTimestamp" in metadata:
            worker.stop(metadata.get("deletionGracePeriodSeconds", 0))
            if has_ended(pod):
                self.remove(pod)

    def _forget(self, there: set[str]) -> None:
        """End what runs of pods that are there no more."""
        for uid in self._workers.keys() - there:
            if (worker := self._workers.pop(uid, None)) is not None:
                worker.abandon()


def _node_path(name: str, subresource: str = "") -> str:
    return "/".join(filter(None, ["/api/v1/nodes", name, subresource]))
