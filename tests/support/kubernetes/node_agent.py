"""A node agent: plays kube-scheduler and the kubelets for any API server, through its API only.

Containers are processes of this machine (see `containers` and `volumes` for what that can't be).
The pods of one namespace are its own: it schedules them onto the nodes that it brings, and leaves
all others alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from support.kubernetes import faults
from support.kubernetes.agent_core import AgentCore
from support.kubernetes.images import Image
from support.kubernetes.loop_thread import LoopThread
from support.kubernetes.node import Node, NodeSettings


class NodeAgent:
    """Schedules and runs the pods of `namespace` from construction until `close`.

    All methods are for the test's thread. Those that inject a fault return when the API knows of
    it, or would if it were reported. After `close` no process, thread or folder of it is left.

    Raises:
        RequestFailedError: The API server refuses the node.
    """

    def __init__(self, kubeconfig: Path, namespace: str, node: NodeSettings) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="batchllm-nodes-"))
        self._thread = LoopThread("node-agent")
        self._core = self._thread.run(self._open(kubeconfig, namespace))
        self.default_node = node.name
        try:
            self.add_node(node)
        except BaseException:
            self.close()
            raise

    async def _open(self, kubeconfig: Path, namespace: str) -> AgentCore:
        core = AgentCore(kubeconfig, namespace, self._folder)
        core.start()
        return core

    def close(self) -> None:
        """End everything; raise what went wrong inside. May be called twice."""
        if not self._folder.exists():
            return
        try:
            self._thread.run(self._core.close(), limit_s=60)
        finally:
            self._thread.close()
            shutil.rmtree(self._folder)
        if self._core.failures:
            raise ExceptionGroup("the node agent failed", _exceptions(self._core.failures))

    @property
    def folder(self) -> Path:
        """Where containers' files are while the agent lives; claims are in `nodes/claims`."""
        return self._folder

    # What the nodes are and know.

    def add_image(self, name: str, image: Image | None = None) -> None:
        """Make an image known; pods that wait for it go on."""
        self._core.images[name] = image or Image()

    def remove_image(self, name: str) -> None:
        """Make an image unknown to pods that start from now on."""
        self._core.images.pop(name, None)

    def hold_images(self, *names: str) -> None:
        """Let pulls of these images take until they are released."""
        self._core.held_images.update(names)

    def release_images(self, *names: str) -> None:
        """Finish the pulls of these images; of all that are held when none is named."""
        self._core.held_images.difference_update(names or set(self._core.held_images))

    def hold_scheduling(self) -> None:
        """Leave pods without a node, without saying why: a scheduler that is busy."""
        self._core.holds_scheduling = True

    def release_scheduling(self) -> None:
        self._core.holds_scheduling = False
        self._kick()

    def delay_starts(self, seconds: float) -> None:
        """Let each pod be `ContainerCreating` so long."""
        self._core.start_delay_s = seconds

    def add_node(self, node: NodeSettings) -> None:
        """Add another node."""
        self._thread.run(self._core.add_node(node))

    def set_capacity(self, amounts: Mapping[str, str], node: str = "") -> None:
        """Change a node's resources, such as `{"nvidia.com/gpu": "1"}`; others stay."""
        self._thread.run(self._core.set_capacity(self._node(node), amounts))

    def processes(self, pod: str) -> list[int]:
        """Processes of a pod's containers that are alive.

        Raises:
            PodNotHereError: No node runs it.
        """
        containers = self._core.worker(pod).containers.values()
        return [pid for container in list(containers) for pid in container.processes()]

    def freeze(self, pod: str) -> None:
        """Let a pod's processes stand still, as a container runtime's `pause` does.

        It is `Running` all the time, and a signal to end waits until `thaw`.

        Raises:
            PodNotHereError: No node runs it.
        """
        self._signal(pod, signal.SIGSTOP)

    def thaw(self, pod: str) -> None:
        """Let them go on."""
        self._signal(pod, signal.SIGCONT)

    def _signal(self, pod: str, number: signal.Signals) -> None:
        for pid in self.processes(pod):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _node(self, name: str) -> Node:
        return self._core.nodes[name or self.default_node]

    def _kick(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._core.changed.set)

    # Faults. Each raises PodNotHereError for a pod that isn't where the fault could happen.

    def evict(self, pod: str) -> None:
        """Kill a pod as a kubelet does that runs out of memory: phase Failed, reason Evicted."""
        self._thread.run(faults.evict(self._core, pod))

    def evict_for_own_disk(self, pod: str, volume: str, limit: str) -> None:
        """As `evict`, for a volume that has outgrown its limit: without `DisruptionTarget`."""
        self._thread.run(faults.evict_for_own_disk(self._core, pod, volume, limit))

    def preempt(self, pod: str) -> None:
        """Delete a pod as the scheduler does for a more important one, with or without a node."""
        self._thread.run(faults.preempt(self._core, pod))

    def oom_kill(self, pod: str, container: str = "") -> None:
        """Kill a container (all of them when none is named) as the kernel does: 137, OOMKilled."""
        self._thread.run(faults.oom_kill(self._core, pod, container))

    def vanish_after_finish(self, pod: str = "*") -> None:
        """Force-delete a pod (`*`: the next one) once it has exited 0, before that is reported."""
        self._core.vanishing.add(pod)

    def lose_node(self, node: str = "") -> None:
        """First step: a node dies. Its pods look as before, and their logs can't be read."""
        self._thread.run(self._node(node).lose())

    def mark_node_unreachable(self, node: str = "") -> None:
        """Second step, 40 s later in real: node and pods aren't ready, the node is tainted."""
        self._thread.run(faults.mark_node_unreachable(self._core, self._node(node)))

    def delete_pods_of_lost_node(self, node: str = "") -> None:
        """Third step, 300 s later: its pods are deleted, and stay Terminating."""
        self._thread.run(faults.delete_pods_of_lost_node(self._core, self._node(node)))

    def collect_lost_pods(self, node: str = "") -> None:
        """Last step: the Node object goes, and its pods with it."""
        self._thread.run(faults.collect_lost_pods(self._core, self._node(node)))


def _exceptions(failures: list[BaseException]) -> list[Exception]:
    return [each if isinstance(each, Exception) else RuntimeError(repr(each)) for each in failures]
