"""What the API server does to objects before it stores them: defaults, checks, quotas."""

import base64
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal

import kubernetes_validate
from support.kubernetes.objects import (
    RESOURCES,
    ApiError,
    Object,
    Resource,
    forbidden,
    has_ended,
    invalid,
)

_VERSION = "1.36"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_QUANTITY = re.compile(r"([+-]?\d*\.?\d+)([num]|[kMGTPE]|[KMGTPE]i)?")
_POWERS: dict[str | None, Decimal] = {None: Decimal(1)}
_POWERS |= {letter: Decimal(1000) ** -power for power, letter in enumerate("mun", 1)}
_POWERS |= {letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)}
_POWERS |= {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)}
_LONGEST_NAME = {"Job": 63}  # a label of its pods
_IMMUTABLE = ("completionMode", "template", "podFailurePolicy", "backoffLimitPerIndex")

_CHARGED = {RESOURCES[plural].kind: RESOURCES[plural] for plural in ("pods", "jobs", "secrets")}

Items = Callable[[str, str], list[Object]]
"""All objects of a resource in a namespace."""


def quantity(text: str | float) -> Decimal:
    """An amount such as `500m` or `2Gi`.

    Raises:
        ApiError: 400, it isn't a quantity.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise ApiError(400, "BadRequest", f"quantities must match {_QUANTITY.pattern}: {text}")
    return Decimal(match[1]) * _POWERS[match[2]]


def requests_of(pod: Object) -> Counter[str]:
    """What a pod's containers request together; limits count where requests are left out."""
    total: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        stated = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        for name, amount in stated.items():
            total[name] += quantity(amount)  # type: ignore[assignment]
    return total


def admit(body: Object, items: Items) -> None:
    """Complete a new object, in place, and check it.

    Raises:
        ApiError: 400, its fields are wrong; 403, a quota is full; 422, its name or a label is.
    """
    kind, metadata = body["kind"], body["metadata"]
    if kind != "Pod":  # those of Jobs are checked with these
        try:
            kubernetes_validate.validate(body, _VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(map(str, error.path))
            raise ApiError(400, "BadRequest", f"{kind}: {path}: {error.message}") from error
    if kind != "Event":
        _check_metadata(kind, metadata["name"], metadata)
    if kind == "Pod":
        body["status"] = {"phase": "Pending", "conditions": []}
        body["spec"].setdefault("terminationGracePeriodSeconds", 30)
        requests_of(body)
    elif kind == "Job":
        body["status"] = {}
        body["spec"] = {"completions": 1, "parallelism": 1, **body["spec"]}
        template = body["spec"]["template"]
        requests_of(template)
        _check_metadata(kind, metadata["name"], template.get("metadata") or {})
    elif kind == "Secret":
        for key, value in body.pop("stringData", {}).items():
            body.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()
    elif kind == "ResourceQuota":
        used = dict.fromkeys(body["spec"]["hard"], "0")
        body["status"] = {"hard": body["spec"]["hard"], "used": used}
    _check_quotas(body, items)


def check_update(before: Object, after: Object) -> None:
    """Check a change of an object.

    Raises:
        ApiError: 422, it may not be changed in this way.
    """
    _check_metadata(after["kind"], after["metadata"]["name"], after["metadata"])
    if after["kind"] != "Job":
        return
    old, new = before["spec"], after["spec"]
    for field in _IMMUTABLE:
        if old.get(field) != new.get(field):
            raise invalid("Job", after["metadata"]["name"], f"spec.{field}: field is immutable")
    is_elastic = new.get("completionMode") == "Indexed" and new["completions"] == new["parallelism"]
    if old["completions"] != new["completions"] and not is_elastic:
        why = "spec.completions: can only be modified in tandem with spec.parallelism"
        raise invalid("Job", after["metadata"]["name"], why)


def _check_metadata(kind: str, name: str, metadata: Object) -> None:
    own = metadata.get("name", name)
    if not _NAME.fullmatch(own) or len(own) > _LONGEST_NAME.get(kind, 253):
        raise invalid(kind, name, f"metadata.name: {own!r} isn't a lowercase RFC 1123 subdomain")
    for key, value in (metadata.get("labels") or {}).items():
        if len(value) > 63 or not _LABEL_VALUE.fullmatch(value):
            raise invalid(kind, name, f"metadata.labels: {key}: {value!r} isn't a valid label")


def _check_quotas(body: Object, items: Items) -> None:
    resource, metadata = _CHARGED.get(body["kind"]), body["metadata"]
    if resource is None:
        return
    namespace, requested = metadata["namespace"], _usage(resource, [body])
    for quota in items("resourcequotas", namespace):
        hard = {name: quantity(amount) for name, amount in quota["spec"]["hard"].items()}
        used = _usage(resource, items(resource.plural, namespace))
        charged = [name for name in sorted(hard) if requested[name]]
        over = [name for name in charged if requested[name] + used[name] > hard[name]]
        if over:
            columns = (("requested", requested), ("used", used), ("limited", hard))
            listed = [
                f"{label}: " + ",".join(f"{name}={amounts[name]}" for name in over)
                for label, amounts in columns
            ]
            why = f"exceeded quota: {quota['metadata']['name']}, {', '.join(listed)}"
            raise forbidden(resource.qualified, metadata["name"], why)


def _usage(resource: Resource, bodies: list[Object]) -> Counter[str]:
    """What objects use, by the names of quotas; pods that have ended use nothing."""
    total: Counter[str] = Counter()
    for body in bodies:
        if body["kind"] != "Pod":
            total.update((resource.plural, f"count/{resource.qualified}"))
        elif not has_ended(body):
            total.update(("pods", "count/pods"))
            total.update({f"requests.{name}": n for name, n in requests_of(body).items()})
    return total
