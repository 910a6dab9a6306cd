"""What goes wrong on the nodes of a real cluster, for tests that also run with the node agent.

The nodes must run on this machine, for a container's processes are found in /proc; and know the
image `job:1`, which sees this checkout and its environment under the same paths.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
from kubernetes import client as kube
from support.kubernetes.admission import quantity
from support.kubernetes.objects import Object
from support.kubernetes.pod_worker import Image
from support.kubernetes.proxy import Proxy

_ENVIRONMENT = {"PATH", "PYTHONPATH", "LANG"}
_EATER = "import time; eaten = [b'1' * (1 << 24) for _ in range(1 << 12)]; time.sleep(60)"
_MOST_EATEN = 4 << 30  # a pod with a higher limit, or none, would take the machine's memory
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_LIMIT_S = 400.0  # the cluster gives up the pods of a lost node after five minutes


class RealNodes:
    """The part of `NodeAgent` that can be done to real kubelets; the rest skips the test.

    What an image runs, and that its pull takes, is written into Jobs on their way through `proxy`.
    """

    def __init__(self, api: kube.CoreV1Api, namespace: str, proxy: Proxy) -> None:
        self._api = api
        self._namespace = namespace
        self._capacity: set[str] = set()
        self._images: dict[str, Image] = {}
        self._held: dict[str, str] = {}  # Secrets that don't exist yet, by image
        self._tagged: set[str] = set()
        self._lost: dict[str, int] = {}  # pids of kubelets, by node
        self.default_node = str(api.list_node().items[0].metadata.name)
        proxy.on_job = self._edit

    def __getattr__(self, name: str) -> NoReturn:
        pytest.skip(f"real nodes have no {name}")

    def close(self) -> None:
        for node, pid in self._lost.items():
            os.kill(pid, signal.SIGCONT)
            self._taint(node, [])
        self.release_scheduling()
        self.set_capacity(dict.fromkeys(self._capacity))
        for name in self._tagged:
            self._ctr("rm", f"docker.io/library/{name}")
        self._await(lambda: all(map(self._is_ready, self._nodes())), "all nodes to be ready")

    def add_image(self, name: str, image: Image | None = None) -> None:
        """Make an image known that has the content of `job:1`, and maybe a command of its own."""
        self._images[name] = image = image or Image()
        if name == "job:1" or image.command:
            return
        if image.environment.keys() - _ENVIRONMENT or " " in name:
            pytest.skip(f"real nodes have no such image {name}")
        self._tagged.add(name)
        self._ctr("tag", "docker.io/library/job:1", f"docker.io/library/{name}")

    def hold_images(self, *names: str) -> None:
        """Let pods of Jobs that are made from now on wait for a volume until these are released."""
        self._held |= {name: f"held-{uuid.uuid4().hex[:8]}" for name in names}

    def release_images(self, *names: str) -> None:
        for secret in {self._held.pop(name) for name in names if name in self._held}:
            body = {"metadata": {"name": secret}, "stringData": {"key": "value"}}
            self._api.create_namespaced_secret(self._namespace, body)

    def _edit(self, job: Object) -> None:
        spec = job["spec"]["template"]["spec"]
        container = spec["containers"][0]
        if (secret := self._held.get(container["image"])) is not None:
            spec["volumes"] = [*spec["volumes"], {"name": "held", "secret": {"secretName": secret}}]
            mount = {"name": "held", "mountPath": "/held"}
            container["volumeMounts"] = [*container["volumeMounts"], mount]
        image = self._images.get(container["image"], Image())
        given = {name: image.environment[name] for name in image.environment.keys() - _ENVIRONMENT}
        variables = [{"name": name, "value": value} for name, value in given.items()]
        container["env"] = [*variables, *(container.get("env") or [])]
        if image.command:
            container |= {"image": "job:1", "command": list(image.command), "args": []}

    def _ctr(self, *arguments: str) -> None:
        for node in self._nodes():
            raw = {"_preload_content": False}
            answer = self._api.connect_get_node_proxy_with_path(node, "configz", **raw)
            endpoint = json.loads(answer.data)["kubeletconfig"]["containerRuntimeEndpoint"]
            ctr = ["ctr", "-a", endpoint.removeprefix("unix://"), "-n", "k8s.io", "images"]
            subprocess.run([*ctr, *arguments], check=True, capture_output=True)

    def _nodes(self) -> list[str]:
        return [node.metadata.name for node in self._api.list_node().items]

    def _is_ready(self, node: str) -> bool:
        conditions = self._api.read_node(node).status.conditions
        return any((each.type, each.status) == ("Ready", "True") for each in conditions)

    def _await(self, predicate: Callable[[], Any], what: str) -> None:
        until = time.monotonic() + _LIMIT_S
        while not predicate():
            assert time.monotonic() < until, f"gave up waiting for {what}"
            time.sleep(0.5)

    def lose_node(self) -> None:
        """The node of the namespace's pods, unless it is the only one."""
        if len(self._nodes()) < 2:
            pytest.skip("needs a second node")
        pods = self._api.list_namespaced_pod(self._namespace).items
        node = next((pod.spec.node_name for pod in pods if pod.spec.node_name), self.default_node)
        kubelets = [int(pid) for pid in subprocess.check_output(["pgrep", "-x", "kubelet"]).split()]
        own = [pid for pid in kubelets if node in Path(f"/proc/{pid}/cmdline").read_text()]
        (self._lost[node],) = own  # by its --hostname-override
        os.kill(own[0], signal.SIGSTOP)
        names = [pod.metadata.name for pod in pods]
        for name in names:
            self._signal(name, signal.SIGKILL)
        self._await(lambda: not any(map(self.processes, names)), "its processes to end")

    def add_node(self, name: str) -> None:
        """There is another one already, or there would be none to lose."""

    def mark_node_unreachable(self) -> None:
        self._await(lambda: not any(map(self._is_ready, self._lost)), "its lease to end")

    def delete_pods_of_lost_node(self) -> None:
        def are_deleted() -> bool:
            pods = self._api.list_namespaced_pod(self._namespace).items
            of_node = [pod.metadata for pod in pods if pod.spec.node_name in self._lost]
            return all(metadata.deletion_timestamp for metadata in of_node)

        self._await(are_deleted, "the pods' tolerations to end")

    def collect_lost_pods(self) -> None:
        """As an administrator does who knows that the node is off."""
        taint = {"key": _OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"}
        for node in self._lost:
            self._taint(node, [taint])

    def _taint(self, node: str, added: list[dict[str, str]]) -> None:
        node_now = self._api.api_client.sanitize_for_serialization(self._api.read_node(node))
        taints = node_now["spec"].get("taints", [])
        kept = [taint for taint in taints if taint["key"] != _OUT_OF_SERVICE]
        self._api.patch_node(node, {"spec": {"taints": [*kept, *added]}})

    def processes(self, pod: str) -> list[int]:
        """Processes of a pod's containers, the first of each container first."""
        uid = self._api.read_namespaced_pod(pod, self._namespace).metadata.uid
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                isnt_its_own = (folder / "comm").read_text() in ("pause\n", "runc:[2:INIT]\n")
                if uid in (folder / "cgroup").read_text() and not isnt_its_own:
                    found.append(int(folder.name))
        return sorted(found)

    def pid(self, pod: str) -> int:
        return self.processes(pod)[0]

    def freeze(self, pod: str) -> None:
        self._signal(pod, signal.SIGSTOP)

    def thaw(self, pod: str) -> None:
        self._signal(pod, signal.SIGCONT)

    def _signal(self, pod: str, number: signal.Signals) -> None:
        for pid in self.processes(pod):
            with contextlib.suppress(ProcessLookupError):  # it has ended with the first
                os.kill(pid, number)

    def evict(self, pod: str) -> None:
        metadata = {"name": pod, "namespace": self._namespace}
        body: dict[str, Any] = {"metadata": metadata}
        self._api.create_namespaced_pod_eviction(pod, self._namespace, body)

    preempt = evict

    def oom_kill(self, pod: str) -> None:
        """Let another process use up the memory of the container, which is killed with it."""
        pids = self.processes(pod)
        lines = Path(f"/proc/{pids[0]}/cgroup").read_text().splitlines()
        (path,) = [path for _, kind, path in (it.split(":", 2) for it in lines) if kind == "memory"]
        tasks = Path("/sys/fs/cgroup/memory", path.lstrip("/"), "cgroup.procs")
        limit = int((tasks.parent / "memory.limit_in_bytes").read_text())
        assert limit <= _MOST_EATEN, f"pod {pod} has no limit of memory: its node would run out"
        with subprocess.Popen([sys.executable, "-c", f"input(); {_EATER}"], stdin=-1) as eater:
            tasks.write_text(str(eater.pid))
            eater.communicate(b"\n")
        time.sleep(1.0)  # containerd must have read the kernel's notice before the exit
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def evict_for_own_disk(self, pod: str, volume: str, limit: str) -> None:
        """Fill an emptyDir up to its limit, and wait until the kubelet has noticed."""
        process = Path("/proc", str(self.processes(pod)[0]))
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
        (folder,) = [it[4] for it in mounts if it[3].endswith(f"~empty-dir/{volume}")]
        full = process / "root" / folder.lstrip("/") / "full"
        full.write_bytes(bytes(int(quantity(limit)) + 1))

    def hold_scheduling(self) -> None:
        self._cordon(True)

    def release_scheduling(self) -> None:
        self._cordon(False)

    def _cordon(self, holds: bool) -> None:
        for node in self._api.list_node().items:
            self._api.patch_node(node.metadata.name, {"spec": {"unschedulable": holds}})

    def set_capacity(self, amounts: Mapping[str, str | None]) -> None:
        """Say what all nodes have of extended resources, until `close`."""
        self._capacity.update(amounts)
        for node in self._api.list_node().items:
            status = {"capacity": dict(amounts), "allocatable": dict(amounts)}
            self._api.patch_node_status(node.metadata.name, {"status": status})
