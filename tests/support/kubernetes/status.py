"""Failures of the API, each with the `Status` object that a real API server answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    def body(self) -> Object:
        """The `Status` object of this failure."""
        body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "code": self.code,
        }
        if self.reason:
            body["reason"] = self.reason
        if self.details is not None:
            body["details"] = dict(self.details)
        return body


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


def expired(message: str) -> ApiError:
    return ApiError(410, "Expired", message)


def invalid(kind: str, name: str, causes: Sequence[Cause]) -> ApiError:
    """An object that breaks rules of its kind; `causes` aren't empty."""
    parts = list(dict.fromkeys(f"{cause.field}: {cause.message}" for cause in causes))
    listed = parts[0] if len(parts) == 1 else "[" + ", ".join(parts) + "]"
    details: Object = {"kind": kind, "causes": [cause.body() for cause in causes]}
    if name:
        details["name"] = name
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {listed}', details)
