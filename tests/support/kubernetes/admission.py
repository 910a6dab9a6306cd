"""What an API server's admission plugins do to a new pod: accounts, priorities and quotas."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from support.kubernetes.defaults import add_service_account, add_tolerations
from support.kubernetes.quantities import Amounts, container_amounts, pod_amounts, quantity, told
from support.kubernetes.status import Object, forbidden
from support.kubernetes.store import RESOURCES, Store

_NOT_READY = "node.kubernetes.io/not-ready"
_MUST_BE_STATED = {
    "cpu",
    "memory",
    "requests.cpu",
    "requests.memory",
    "limits.cpu",
    "limits.memory",
}


def admit_pod(store: Store, pod: Object) -> None:
    """Complete a new pod in place.

    Raises:
        ApiError: 403, no such service account, priority class or runtime class.
    """
    name, spec = pod["metadata"].get("name", ""), pod["spec"]
    if class_name := spec.get("runtimeClassName"):  # there are none
        raise forbidden("pods", name, f'pod rejected: RuntimeClass "{class_name}" not found')
    account_name = spec.get("serviceAccountName", "default")
    namespace = pod["metadata"]["namespace"]
    account = store.find(RESOURCES["serviceaccounts"], namespace, account_name)
    if account is None:
        why = (
            f"error looking up service account {namespace}/{account_name}: "
            f'serviceaccount "{account_name}" not found'
        )
        raise forbidden("pods", name, why)
    add_service_account(spec, account.get("automountServiceAccountToken", True))
    add_tolerations(spec)
    spec["priority"], policy = 0, "PreemptLowerPriority"
    if class_name := spec.get("priorityClassName"):
        found = store.find(RESOURCES["priorityclasses"], "", class_name)
        if found is None:
            raise forbidden("pods", name, f"no PriorityClass with name {class_name} was found")
        spec["priority"], policy = found["value"], found["preemptionPolicy"]
    spec.setdefault("preemptionPolicy", policy)


def taint_node(node: Object) -> None:
    """Keep pods from a new node, until a controller has seen that it is ready."""
    taints = node.setdefault("spec", {}).setdefault("taints", None) or []
    node["spec"]["taints"] = [*taints, {"key": _NOT_READY, "effect": "NoSchedule"}]


def charge_quotas(store: Store, pod: Object, dry_run: bool) -> None:
    """Check that a new pod fits its namespace's quotas, and count it in their status.

    The status alone decides: until a controller has written it, a quota limits nothing, and what a
    pod used is free only when a controller says so. It is charged before the name is found taken.

    Raises:
        ApiError: 403, in the words of the ResourceQuota plugin.
    """
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    charged = []
    for quota in store.items(RESOURCES["resourcequotas"], namespace):
        status, title = quota.get("status", {}), quota["metadata"]["name"]
        hard, used = _amounts(status.get("hard")), _amounts(status.get("used"))
        if missing := _unstated(pod["spec"], hard):
            raise forbidden("pods", name, f"failed quota: {title}: must specify {missing}")
        requested = {
            key: amount for key, amount in pod_usage(pod).items() if key in hard and amount
        }
        if unknown := sorted(requested.keys() - used.keys()):
            why = f"status unknown for quota: {title}, resources: {','.join(unknown)}"
            raise forbidden("pods", name, why)
        over = sorted(key for key, amount in requested.items() if used[key] + amount > hard[key])
        if over:
            parts = (("requested", requested), ("used", used), ("limited", hard))
            listed = ", ".join(f"{label}: {_listed(amounts, over)}" for label, amounts in parts)
            raise forbidden("pods", name, f"exceeded quota: {title}, {listed}")
        total = {key: told(key, used[key] + amount) for key, amount in requested.items()}
        charged.append({**quota, "status": {**status, "used": {**status.get("used", {}), **total}}})
    for quota in charged if not dry_run else []:
        store.replace(RESOURCES["resourcequotas"], quota)


def _amounts(stated: Any) -> Amounts:
    return {key: quantity(value) for key, value in (stated or {}).items()}


def _listed(amounts: Amounts, names: list[str]) -> str:
    return ",".join(f"{name}={told(name, amounts[name])}" for name in names)


def _unstated(spec: Object, hard: Amounts) -> str:
    """Amounts that a quota wants every container to state, and this pod's don't."""
    missing = []
    for name in sorted(_MUST_BE_STATED & hard.keys()):
        which, _, plain = name.rpartition(".")
        without = [
            each["name"]
            for each in spec["containers"]
            if plain not in container_amounts(each, which or "requests")
        ]
        if without:
            missing.append(f"{name} for: {','.join(without)}")
    return "; ".join(missing)


def usage(pods: list[Any], hard: Amounts) -> Amounts:
    """What pods use of a quota. Pods that have ended count as objects only."""
    total = dict.fromkeys(hard, Decimal(0))
    for pod in pods:
        ended = pod["status"].get("phase") in ("Succeeded", "Failed")
        for name, amount in pod_usage(pod).items():
            if name in total and (not ended or name == "count/pods"):
                total[name] += amount
    return total


def pod_usage(pod: Object) -> Amounts:
    """A pod's part in a quota, by the quota's names of resources."""
    found: Amounts = {"pods": Decimal(1), "count/pods": Decimal(1)}
    for name, amount in pod_amounts(pod["spec"], "requests").items():
        found[f"requests.{name}"] = amount
        if "/" not in name:
            found[name] = amount
    for name, amount in pod_amounts(pod["spec"], "limits").items():
        found[f"limits.{name}"] = amount
    return found
