"""Which node a pod goes to, and a real scheduler's words when there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from support.kubernetes.quantities import Amounts, pod_amounts, quantity, summed
from support.kubernetes.status import Object

_NO_AFFINITY = "node(s) didn't match Pod's node affinity/selector"
_CORDONED = "node(s) were unschedulable"
# What preempting other pods could change.
_HELPED_BY_PREEMPTION = ("Insufficient ", "Too many pods")


@dataclass(frozen=True, slots=True)
class Placement:
    """A node's name, or (when that is empty) why there is none."""

    node: str
    message: str = ""


def place(pod: Object, nodes: Iterable[Object], pods: Iterable[Object]) -> Placement:
    """Choose the first node that fits: by name, so that tests can tell."""
    listed, running = list(nodes), list(pods)
    if not listed:
        return Placement("", "no nodes available to schedule pods")
    reasons: Counter[str] = Counter()
    for node in sorted(listed, key=lambda each: str(each["metadata"]["name"])):
        found = obstacles(pod, node, running)
        if not found:
            return Placement(node["metadata"]["name"])
        reasons.update(found)
    return Placement("", _message(reasons, len(listed)))


def _message(reasons: Counter[str], count: int) -> str:
    listed = ", ".join(sorted(f"{number} {reason}" for reason, number in reasons.items()))
    none = f"0/{count} nodes are available:"
    helped = sum(n for reason, n in reasons.items() if reason.startswith(_HELPED_BY_PREEMPTION))
    helped = min(helped, count)
    outcomes = []
    if helped:
        outcomes.append(f"{helped} No preemption victims found for incoming pod")
    if count - helped:
        outcomes.append(f"{count - helped} Preemption is not helpful for scheduling")
    return f"{none} {listed}. preemption: {none} {', '.join(outcomes)}."


def obstacles(pod: Object, node: Object, pods: Iterable[Object]) -> list[str]:
    """Why a pod can't run on a node; the first kind of reason only, but every missing resource."""
    spec, node_spec = pod["spec"], node.get("spec", {})
    tolerations = spec.get("tolerations", [])
    if node_spec.get("unschedulable"):
        return [_CORDONED]
    for taint in node_spec.get("taints", []):
        hard = taint["effect"] in ("NoSchedule", "NoExecute")
        if hard and not any(tolerates(each, taint) for each in tolerations):
            return [f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"]
    if not matches_selector(spec, node):
        return [_NO_AFFINITY]
    return _missing(spec, node, pods)


def _missing(spec: Object, node: Object, pods: Iterable[Object]) -> list[str]:
    allocatable = node.get("status", {}).get("allocatable", {})
    free = {name: quantity(value) for name, value in allocatable.items()}
    here = [each for each in pods if _occupies(each, node["metadata"]["name"])]
    found = []
    if "pods" in free and free["pods"] < len(here) + 1:
        found.append("Too many pods")
    used: Amounts = summed(pod_amounts(each["spec"]) for each in here)
    for name, amount in sorted(pod_amounts(spec).items()):
        left = free.get(name, Decimal(0)) - used.get(name, Decimal(0))
        if amount > left:
            found.append(f"Insufficient {name}")
    return found


def _occupies(pod: Object, node: str) -> bool:
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return pod["spec"].get("nodeName") == node and not ended


def tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    same_key = toleration.get("key") == taint["key"]
    return bool(same_key and toleration.get("value", "") == taint.get("value", ""))


def matches_selector(spec: Mapping[str, Any], node: Object) -> bool:
    """Whether a node has the labels of the pod's nodeSelector and required node affinity."""
    labels = node["metadata"].get("labels", {})
    if any(labels.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    terms = required.get("nodeSelectorTerms", [])
    return any(
        all(_expression(each, labels) for each in term.get("matchExpressions", []))
        for term in terms
    )


def _expression(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values", [])
    operator = expression["operator"]
    if operator == "In":
        return labels.get(key) in values
    if operator == "NotIn":
        return labels.get(key) not in values
    if operator == "Exists":
        return key in labels
    if operator == "DoesNotExist":
        return key not in labels
    if key not in labels or not labels[key].lstrip("-").isdigit():
        return False
    number, limit = int(labels[key]), int(values[0])
    return number > limit if operator == "Gt" else number < limit
