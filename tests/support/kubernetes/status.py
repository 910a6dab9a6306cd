"""Failures of the API, each with the `Status` object that a real API server answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cause:
    """One field that makes an object invalid."""

    field: str
    reason: str
    message: str

    def body(self) -> Object:
        return {"reason": self.reason, "message": self.message, "field": self.field}


@dataclass(frozen=True)
class ApiError(Exception):
    """A request that fails: `code` is the HTTP status, `reason` the machine-readable cause."""

    code: int
    reason: str
    message: str
    details: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> Object:
        """The `Status` object of this failure."""
        body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": dict(self.metadata),
            "status": "Failure",
            "message": self.message,
            "code": self.code,
        }
        if self.reason:
            body["reason"] = self.reason
        if self.details is not None:
            body["details"] = dict(self.details)
        return body


def success(name: str, kind: str, uid: str) -> Object:
    """What a delete answers for kinds that aren't returned themselves."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": {"name": name, "kind": kind, "uid": uid},
    }


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def forbidden(resource: str, name: str, why: str) -> ApiError:
    """Refused by authorization or by an admission plugin."""
    subject = f'{resource} "{name}" is forbidden' if name else f"{resource} is forbidden"
    details = {"name": name, "kind": resource} if name else {"kind": resource}
    return ApiError(403, "Forbidden", f"{subject}: {why}", details)


def not_found(resource: str, name: str) -> ApiError:
    details = {"name": name, "kind": resource}
    return ApiError(404, "NotFound", f'{resource} "{name}" not found', details)


def no_such_path() -> ApiError:
    message = "the server could not find the requested resource"
    return ApiError(404, "NotFound", message, {})


def method_not_allowed() -> ApiError:
    message = "the server does not allow this method on the requested resource"
    return ApiError(405, "MethodNotAllowed", message, {})


def already_exists(resource: str, name: str) -> ApiError:
    details = {"name": name, "kind": resource}
    return ApiError(409, "AlreadyExists", f'{resource} "{name}" already exists', details)


def conflict(resource: str, name: str, why: str) -> ApiError:
    message = f'Operation cannot be fulfilled on {resource} "{name}": {why}'
    return ApiError(409, "Conflict", message, {"name": name, "kind": resource})


def object_modified(resource: str, name: str) -> ApiError:
    why = (
        "the object has been modified; please apply your changes to the latest version and try "
        "again"
    )
    return conflict(resource, name, why)


def expired(message: str, **metadata: str) -> ApiError:
    return ApiError(410, "Expired", message, metadata=metadata)


def too_large_version(asked: int, current: int) -> ApiError:
    """A resourceVersion that isn't there yet; a real server waits three seconds for it first."""
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    message = f"Timeout: Too large resource version: {asked}, current: {current}"
    return ApiError(504, "Timeout", message, {"causes": [cause], "retryAfterSeconds": 1})


def unsupported_media_type() -> ApiError:
    return ApiError(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})


def invalid_options(kind: str, cause: Cause) -> ApiError:
    """Query parameters, or a delete's body, that break a rule."""
    message = f'{kind}.meta.k8s.io "" is invalid: {cause.field}: {cause.message}'
    details = {"group": "meta.k8s.io", "kind": kind, "causes": [cause.body()]}
    return ApiError(422, "Invalid", message, details)


def invalid(kind: str, name: str, causes: Sequence[Cause]) -> ApiError:
    """An object that breaks rules of its kind; `causes` aren't empty."""
    parts = list(dict.fromkeys(f"{cause.field}: {cause.message}" for cause in causes))
    listed = parts[0] if len(parts) == 1 else "[" + ", ".join(parts) + "]"
    details: Object = {"kind": kind, "causes": [cause.body() for cause in causes]}
    if name:
        details["name"] = name
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {listed}', details)
