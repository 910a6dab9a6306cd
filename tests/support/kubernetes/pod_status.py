"""The status that a kubelet keeps of one of its pods, as the API stores it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from support.kubernetes.images import full_name
from support.kubernetes.status import Object
from support.kubernetes.store import now_text

_CONDITIONS = (
    "PodReadyToStartContainers",
    "Initialized",
    "Ready",
    "ContainersReady",
    "PodScheduled",
)


@dataclass(slots=True)
class ContainerState:
    """One container's part; `state` has one key: waiting, running or terminated."""

    name: str
    image: str
    state: Object = field(default_factory=dict)
    container_id: str = ""

    def waits(self, reason: str, message: str = "") -> bool:
        """Note why it waits; return whether that is news."""
        waiting = {"reason": reason, **({"message": message} if message else {})}
        changed = self.state != {"waiting": waiting}
        self.state = {"waiting": waiting}
        return changed

    def runs(self) -> None:
        self.container_id = f"containerd://{uuid.uuid4().hex * 2}"
        self.state = {"running": {"startedAt": now_text()}}

    def ends(self, exit_code: int, reason: str, message: str = "") -> None:
        now = now_text()
        started = self.state.get("running", {}).get("startedAt", now)
        terminated: dict[str, Any] = {
            "exitCode": exit_code,
            "reason": reason,
            "startedAt": started,
            "finishedAt": now,
        }
        if message:
            terminated["message"] = message
        if self.container_id:
            terminated["containerID"] = self.container_id
        self.state = {"terminated": terminated}

    @property
    def exit_code(self) -> int | None:
        """How it ended, if it has."""
        code: int | None = self.state.get("terminated", {}).get("exitCode")
        return code

    def as_object(self) -> Object:
        running = "running" in self.state
        known = bool(self.container_id)
        full = full_name(self.image)
        return {
            "name": self.name,
            "image": full if known else self.image,
            "imageID": f"{full.partition('@')[0]}@sha256:{'0' * 64}" if known else "",
            "containerID": self.container_id,
            "state": self.state,
            "lastState": {},
            "ready": running or self.exit_code == 0,
            "started": running,
            "restartCount": 0,
        }


class PodStatus:
    """Everything that the kubelet reports of a pod; `as_patch` is what it sends."""

    def __init__(self, pod: Object, host_ip: str, pod_ip: str) -> None:
        spec = pod["spec"]
        self.init = [ContainerState(c["name"], c["image"]) for c in spec.get("initContainers", [])]
        self.main = [ContainerState(c["name"], c["image"]) for c in spec["containers"]]
        for each in [*self.init, *self.main]:
            each.waits("PodInitializing" if self.init else "ContainerCreating")
        self.phase = "Pending"
        self.reason = ""
        self.message = ""
        self.added_conditions: list[Object] = []
        self._start_time = now_text()
        self._host_ip = host_ip
        self._pod_ip = pod_ip
        self._sent_conditions: dict[str, Object] = {}

    def of(self, name: str) -> ContainerState:
        """A container's state by its name."""
        return next(each for each in [*self.init, *self.main] if each.name == name)

    def is_over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    def disrupted(self, reason: str, message: str) -> None:
        """Note that it is the cluster that ends the pod."""
        target = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": reason,
            "message": message,
        }
        self.added_conditions = [{**target, "lastTransitionTime": now_text()}]

    def as_patch(self) -> Object:
        """The body of a merge patch of the pod's status."""
        status: Object = {
            "phase": self.phase,
            "conditions": self._conditions(),
            "hostIP": self._host_ip,
            "hostIPs": [{"ip": self._host_ip}],
            "podIP": self._pod_ip,
            "podIPs": [{"ip": self._pod_ip}],
            "startTime": self._start_time,
            "containerStatuses": [each.as_object() for each in self.main],
        }
        if self.init:
            status["initContainerStatuses"] = [each.as_object() for each in self.init]
        if self.reason:
            status["reason"] = self.reason
        if self.message:
            status["message"] = self.message
        return {"status": status}

    def _conditions(self) -> list[Object]:
        initialized = all(each.exit_code == 0 for each in self.init)
        ready = self.phase == "Running" and all("running" in each.state for each in self.main)
        over = {"reason": f"Pod{'Completed' if self.phase == 'Succeeded' else 'Failed'}"}
        unready = over if self.is_over() else {"reason": "ContainersNotReady"}
        truths: dict[str, tuple[bool, Mapping[str, str]]] = {
            "PodReadyToStartContainers": (not self.is_over(), {}),
            "Initialized": (
                initialized,
                {} if initialized else {"reason": "ContainersNotInitialized"},
            ),
            "Ready": (ready, {} if ready else unready),
            "ContainersReady": (ready, {} if ready else unready),
            "PodScheduled": (True, {}),
        }
        conditions = []
        for name in _CONDITIONS:
            true, why = truths[name]
            condition = {"type": name, "status": "True" if true else "False", **why}
            sent = self._sent_conditions.get(name, {})
            same = {k: v for k, v in sent.items() if k != "lastTransitionTime"} == condition
            condition["lastTransitionTime"] = sent["lastTransitionTime"] if same else now_text()
            self._sent_conditions[name] = condition
            conditions.append(condition)
        return [*conditions, *self.added_conditions]
