"""Types of objects in the API, addresses of requests, and errors in a real server's words."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self
from urllib.parse import urlsplit

Object = dict[str, Any]

_PATH = re.compile(
    r"^/(?:api|apis/(?P<group>[^/]+))/[^/]+(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]+))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<subresource>[a-z]+))?)?$"
)
_TERM = re.compile(r"(!?)([\w./-]+)(?:(==|=|!=)([\w./-]*))?")
_VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


class ApiError(Exception):
    """A request that fails: `code` is the HTTP status, `reason` the machine-readable cause."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code, self.reason, self.message = code, reason, message

    def body(self) -> Object:
        """The `Status` object of this failure."""
        about = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return about | {"code": self.code, "reason": self.reason, "message": self.message}


def forbidden(resource: str, name: str, why: str) -> ApiError:
    """Refused by authorization or by an admission plugin."""
    subject = f'{resource} "{name}" is forbidden' if name else f"{resource} is forbidden"
    return ApiError(403, "Forbidden", f"{subject}: {why}")


def not_found(resource: str, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{resource} "{name}" not found')


def conflict(resource: str, name: str, why: str) -> ApiError:
    subject = f'Operation cannot be fulfilled on {resource} "{name}"'
    return ApiError(409, "Conflict", f"{subject}: {why}")


def invalid(kind: str, name: str, why: str) -> ApiError:
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {why}')


@dataclass(frozen=True, slots=True)
class Resource:
    """A type of object that the double has."""

    plural: str
    kind: str
    namespaced: bool = True
    version: str = "v1"

    @property
    def qualified(self) -> str:
        """As the API's messages name it."""
        group = self.version.rpartition("/")[0]
        return f"{self.plural}.{group}" if group else self.plural


RESOURCES = {
    resource.plural: resource
    for resource in (
        Resource("configmaps", "ConfigMap"),
        Resource("events", "Event"),
        Resource("jobs", "Job", version="batch/v1"),
        Resource("namespaces", "Namespace", namespaced=False),
        Resource("nodes", "Node", namespaced=False),
        Resource("pods", "Pod"),
        Resource("resourcequotas", "ResourceQuota"),
        Resource("secrets", "Secret"),
    )
}


@dataclass(frozen=True, slots=True)
class Target:
    """What a request is about; an empty name means all objects."""

    verb: str
    group: str
    plural: str
    namespace: str
    name: str
    subresource: str

    @classmethod
    def of(cls, method: str, path: str) -> Self | None:
        """The target of a request; None if its path isn't one of objects."""
        parts = urlsplit(path)
        match = _PATH.match(parts.path)
        if match is None:
            return None
        names = {key: value or "" for key, value in match.groupdict().items()}
        verb = "get" if names["name"] else "watch" if "watch=" in parts.query else "list"
        return cls(_VERBS.get(method, verb), **names)

    @property
    def resource(self) -> str:
        """As rules of RBAC name it."""
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural


def now_text() -> str:
    """The time as the API writes it: whole seconds, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(text: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds()


def has_ended(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def is_being_deleted(body: Object) -> bool:
    return "deletionTimestamp" in body["metadata"]


def with_condition(status: Object, kind: str, value: str = "True", **why: str) -> Object:
    """A status with this condition, whose time is that of its last change."""
    conditions = status.get("conditions", [])
    old: Object = next((condition for condition in conditions if condition["type"] == kind), {})
    new = {"type": kind, "status": value, **why}
    new["lastTransitionTime"] = (
        old["lastTransitionTime"] if old.get("status") == value else now_text()
    )
    others = [condition for condition in conditions if condition["type"] != kind]
    return {**status, "conditions": [*others, new]}


def has_condition(body: Object, *kinds: str) -> bool:
    conditions = body.get("status", {}).get("conditions", [])
    return any(found["type"] in kinds and found["status"] == "True" for found in conditions)


def selects(labels: str, fields: str) -> Callable[[Object], bool]:
    """A test for the selectors of a request: lists of `key=value`, `key!=value`, `key`, `!key`.

    Raises:
        ApiError: 400, a selector has another operator.
    """
    tests = [_test_of("metadata.labels", term) for term in labels.split(",") if term]
    tests += [_test_of("", term) for term in fields.split(",") if term]
    return lambda body: all(test(body) for test in tests)


def _test_of(parent: str, term: str) -> Callable[[Object], bool]:
    match = _TERM.fullmatch(term.strip())
    if match is None:
        raise ApiError(400, "BadRequest", f"unable to parse requirement: {term}")
    is_negated, key, sign, value = match.groups()
    is_negated = bool(is_negated) or sign == "!="
    if not parent:
        parent, _, key = key.rpartition(".")

    def test(body: Object) -> bool:
        for step in parent.split("."):
            body = body.get(step) or {}
        found = body.get(key)
        return ((found == value) if sign else (found is not None)) is not is_negated

    return test
