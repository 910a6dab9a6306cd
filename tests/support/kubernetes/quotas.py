"""Resource quotas for `pods` and `requests.*`: what pods use, and whether a new one fits."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from support.kubernetes.quantities import (
    Amounts,
    container_amounts,
    pod_amounts,
    quantity,
    summed,
    told,
)
from support.kubernetes.status import Object, forbidden
from support.kubernetes.store import RESOURCES, Store

_MUST_BE_STATED = ("cpu", "memory")


def charge_quotas(store: Store, pod: Object) -> None:
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
        over = sorted(key for key, amount in requested.items() if used[key] + amount > hard[key])
        if over:
            parts = (("requested", requested), ("used", used), ("limited", hard))
            listed = ", ".join(f"{label}: {_listed(amounts, over)}" for label, amounts in parts)
            raise forbidden("pods", name, f"exceeded quota: {title}, {listed}")
        total = {key: told(key, used[key] + amount) for key, amount in requested.items()}
        charged.append({**quota, "status": {**status, "used": {**status.get("used", {}), **total}}})
    for quota in charged:
        store.replace(RESOURCES["resourcequotas"], quota)


def _amounts(stated: Any) -> Amounts:
    return {key: quantity(value) for key, value in (stated or {}).items()}


def _listed(amounts: Amounts, names: list[str]) -> str:
    return ",".join(f"{name}={told(name, amounts[name])}" for name in names)


def _unstated(spec: Object, hard: Amounts) -> str:
    """Amounts that a quota wants every container to state, and this pod's don't."""
    missing = []
    for name in _MUST_BE_STATED:
        without = [
            each["name"] for each in spec["containers"] if name not in container_amounts(each)
        ]
        if without and f"requests.{name}" in hard:
            missing.append(f"requests.{name} for: {','.join(without)}")
    return "; ".join(missing)


def usage(pods: list[Any], hard: Amounts) -> Amounts:
    """What pods use of a quota, but for those that have ended."""
    alive = [pod for pod in pods if pod["status"].get("phase") not in ("Succeeded", "Failed")]
    total = summed(pod_usage(pod) for pod in alive)
    return {name: total.get(name, Decimal(0)) for name in hard}


def pod_usage(pod: Object) -> Amounts:
    """A pod's part in a quota, by the quota's names of resources."""
    requests = pod_amounts(pod["spec"])
    return {"pods": Decimal(1), **{f"requests.{name}": each for name, each in requests.items()}}
