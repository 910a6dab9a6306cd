"""What goes wrong on clusters, done as the component does it that would: through the API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from support.kubernetes.agent_core import AgentCore, PodNotHereError
from support.kubernetes.node import Node
from support.kubernetes.pod_worker import End, PodWorker
from support.kubernetes.status import Object
from support.kubernetes.store import now_text

_LIMIT_S = 20.0
_UNREACHABLE = "node.kubernetes.io/unreachable"


async def evict(core: AgentCore, name: str) -> None:
    worker = core.worker(name)
    container = worker.pod["spec"]["containers"][0]["name"]
    message = (
        "The node was low on resource: memory. Threshold quantity: 100Mi, available: 52840Ki. "
        f"Container {container} was using 3145728Ki, request is 0, has larger consumption of "
        "memory. "
    )
    worker.status.disrupted("TerminationByKubelet", message)
    await _evict(core, worker, message)


async def evict_for_own_disk(core: AgentCore, name: str, volume: str, limit: str) -> None:
    message = f'Usage of EmptyDir volume "{volume}" exceeds the limit "{limit}". '
    await _evict(core, core.worker(name), message)


async def _evict(core: AgentCore, worker: PodWorker, message: str) -> None:
    uid = worker.pod["metadata"]["uid"]
    await core.record_event(worker.pod, "Warning", "Evicted", message, "kubelet")
    worker.stop(End(0, "Evicted", message))
    await _until(lambda: uid not in core.pods or core.pods[uid]["status"]["phase"] == "Failed")


async def preempt(core: AgentCore, name: str) -> None:
    await _until(lambda: _is_known(core, name))  # its creator may be ahead of the watch
    pod = core.find(name)
    message = "default-scheduler: preempting to accommodate a higher priority pod"
    with contextlib.suppress(PodNotHereError):  # it has no node yet
        core.worker(name).status.disrupted("PreemptionByScheduler", message)
    await _disrupt(core, pod, "PreemptionByScheduler", message)
    node = pod["spec"].get("nodeName", "")
    told = f"Preempted by pod 00000000-0000-0000-0000-000000000000 on node {node}"
    await core.record_event(pod, "Normal", "Preempted", told, "default-scheduler")
    await core.api.delete(core.pod_path(name), pod["metadata"]["uid"])


async def oom_kill(core: AgentCore, name: str, container: str) -> None:
    containers = core.worker(name).containers
    chosen = [containers[container]] if container else list(containers.values())
    alive = [each for each in chosen if not each.exited.done()]
    if not alive:
        raise PodNotHereError(f"no container of pod {name} runs")
    for each in alive:
        each.kill_for_memory()
        await asyncio.shield(each.exited)


async def mark_node_unreachable(core: AgentCore, node: Node) -> None:
    path, now = f"/api/v1/nodes/{node.settings.name}", now_text()
    ready = {
        "type": "Ready",
        "status": "Unknown",
        "reason": "NodeStatusUnknown",
        "message": "Kubelet stopped posting node status.",
        "lastTransitionTime": now,
    }
    await core.api.patch(f"{path}/status", {"status": {"conditions": [ready]}})
    taints = [dict(each) for each in node.settings.taints]
    taints += [{"key": _UNREACHABLE, "effect": effect} for effect in ("NoSchedule", "NoExecute")]
    await core.api.patch(path, {"spec": {"taints": taints}})
    for pod in _pods_of(core, node):
        conditions = [
            {**each, "status": "False", "lastTransitionTime": now}
            if each["type"] == "Ready"
            else each
            for each in pod["status"].get("conditions", [])
        ]
        await core.patch_status(pod, {"conditions": conditions})
        message = "Node is not ready"
        await core.record_event(pod, "Warning", "NodeNotReady", message, "node-controller")


async def delete_pods_of_lost_node(core: AgentCore, node: Node) -> None:
    for pod in _pods_of(core, node):
        metadata = pod["metadata"]
        message = "Taint manager: deleting due to NoExecute taint"
        await _disrupt(core, pod, "DeletionByTaintManager", message)
        told = f"Marking for deletion Pod {core.namespace}/{metadata['name']}"
        await core.record_event(
            pod, "Normal", "TaintManagerEviction", told, "taint-eviction-controller"
        )
        await core.api.delete(core.pod_path(metadata["name"]), metadata["uid"])


async def collect_lost_pods(core: AgentCore, node: Node) -> None:
    await core.api.delete(f"/api/v1/nodes/{node.settings.name}")
    for pod in _pods_of(core, node):
        message = "PodGC: node no longer exists"
        await _disrupt(core, pod, "DeletionByPodGC", message, phase="Failed")
        path = core.pod_path(pod["metadata"]["name"])
        await core.api.delete(path, pod["metadata"]["uid"], grace_s=0)


def _pods_of(core: AgentCore, node: Node) -> list[Object]:
    return [
        pod
        for pod in core.pods.values()
        if pod["spec"].get("nodeName") == node.settings.name
        and pod["status"].get("phase") not in ("Succeeded", "Failed")
    ]


async def _disrupt(
    core: AgentCore, pod: Object, reason: str, message: str, phase: str = ""
) -> None:
    target = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    current = await core.api.get(core.pod_path(pod["metadata"]["name"])) or pod
    others = [
        each
        for each in current["status"].get("conditions", [])
        if each["type"] != "DisruptionTarget"
    ]
    conditions = [*others, {**target, "lastTransitionTime": now_text()}]
    status: Object = {"conditions": conditions, **({"phase": phase} if phase else {})}
    await core.patch_status(pod, status)


def _is_known(core: AgentCore, name: str) -> bool:
    return any(pod["metadata"]["name"] == name for pod in core.pods.values())


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)
