"""The scheduler of the double: the first node that fits, or the words why none does."""

from collections import Counter
from decimal import Decimal

from support.kubernetes.admission import quantity, requests_of
from support.kubernetes.objects import (
    Object,
    has_condition,
    has_ended,
    is_being_deleted,
    with_condition,
)
from support.kubernetes.store import Store


def schedule(store: Store) -> None:
    """Bind the pods that have no node, the oldest first, or note in their status why not."""
    pods = store.items("pods")
    used: dict[str, Counter[str]] = {}
    for pod in pods:
        if not has_ended(pod):
            used.setdefault(pod["spec"].get("nodeName", ""), Counter()).update(requests_of(pod))
    waiting = [pod for pod in pods if not pod["spec"].get("nodeName") and not is_being_deleted(pod)]
    for pod in sorted(waiting, key=lambda pod: pod["metadata"]["creationTimestamp"]):
        reasons: Counter[str] = Counter()
        nodes = store.items("nodes")
        for node in nodes:
            name = node["metadata"]["name"]
            obstacles = _obstacles(pod, node, used.setdefault(name, Counter()))
            if not obstacles:
                store.bind(pod["metadata"]["namespace"], pod["metadata"]["name"], name)
                used[name].update(requests_of(pod))
                break
            reasons.update(obstacles)
        else:
            _note(store, pod, _message(reasons, len(nodes)))


def _note(store: Store, pod: Object, message: str) -> None:
    conditions = pod["status"]["conditions"]
    if not any(condition.get("message") == message for condition in conditions):
        why = {"reason": "Unschedulable", "message": message}
        status = with_condition(pod["status"], "PodScheduled", "False", **why)
        store.set_status("pods", pod, status)


def _obstacles(pod: Object, node: Object, used: Counter[str]) -> list[str]:
    """Why a pod can't run on a node."""
    if node["spec"].get("unschedulable"):
        return ["node(s) were unschedulable"]
    if not has_condition(node, "Ready"):
        return ["node(s) had untolerated taint(s)"]
    wanted = pod["spec"].get("nodeSelector", {})
    if not wanted.items() <= node["metadata"]["labels"].items():
        return ["node(s) didn't match Pod's node affinity/selector"]
    free = {name: quantity(amount) for name, amount in node["status"]["allocatable"].items()}
    requests = requests_of(pod)
    short = [name for name in requests if requests[name] + used[name] > free.get(name, Decimal(0))]
    return [f"Insufficient {name}" for name in short]


def _message(reasons: Counter[str], num_nodes: int) -> str:
    if not num_nodes:
        return "no nodes available to schedule pods"
    listed = ", ".join(sorted(f"{number} {reason}" for reason, number in reasons.items()))
    return f"0/{num_nodes} nodes are available: {listed}."
