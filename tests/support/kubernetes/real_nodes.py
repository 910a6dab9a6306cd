"""What goes wrong on the nodes of a real cluster, for tests that also run with the node agent.

The nodes must run on this machine, for a container's processes are found in /proc; and know the
image `job:1`, which sees this checkout and its environment under the same paths.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
from kubernetes import client as kube
from support.kubernetes.admission import quantity
from support.kubernetes.pod_worker import Image

_ENVIRONMENT = {"PATH", "PYTHONPATH", "LANG"}
_EATER = "import time; eaten = [b'1' * (1 << 24) for _ in range(1 << 12)]; time.sleep(60)"


class RealNodes:
    """The part of `NodeAgent` that can be done to real kubelets; the rest skips the test."""

    def __init__(self, api: kube.CoreV1Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._capacity: set[str] = set()

    def __getattr__(self, name: str) -> NoReturn:
        pytest.skip(f"real nodes have no {name}")

    def close(self) -> None:
        self.release_scheduling()
        self.set_capacity(dict.fromkeys(self._capacity))

    def add_image(self, name: str, image: Image | None = None) -> None:
        """Skip the test unless the nodes have it."""
        if (
            image is None
            or name != "job:1"
            or image.command
            or image.environment.keys() - _ENVIRONMENT
        ):
            pytest.skip(f"real nodes have no such image {name}")

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
