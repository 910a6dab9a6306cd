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


@dataclass(frozen=True)
class ApiError(Exception):
    """A request that fails: `code` is the HTTP status, `reason` the machine-readable cause."""

    code: int
    reason: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> Object:
        """The `Status` object of this failure."""
        body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if self.details:
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
    return ApiError(405, "MethodNotAllowed", message)


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


def expired(message: str) -> ApiError:
    return ApiError(410, "Expired", message)


def unsupported_media_type(given: str, accepted: Sequence[str]) -> ApiError:
    message = (
        "the body of the request was in an unknown format - accepted media types include: "
        + ", ".join(accepted)
        + (f" (got {given})" if given else "")
    )
    return ApiError(415, "UnsupportedMediaType", message)


def invalid(kind: str, name: str, causes: Sequence[Cause]) -> ApiError:
    """An object that breaks rules of its kind; `causes` aren't empty."""
    parts = [f"{cause.field}: {cause.message}" for cause in causes]
    listed = parts[0] if len(parts) == 1 else "[" + ", ".join(parts) + "]"
    details = {
        "name": name,
        "kind": kind,
        "causes": [
            {"reason": cause.reason, "message": cause.message, "field": cause.field}
            for cause in causes
        ],
    }
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {listed}', details)
