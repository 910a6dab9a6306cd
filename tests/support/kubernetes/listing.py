"""What requests are about, and lists of it: selectors and pages."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass

from support.kubernetes.selectors import field_selector, label_selector
from support.kubernetes.status import Object, bad_request, expired
from support.kubernetes.store import Resource, Store

Match = Callable[[Object], bool]
_TOO_OLD = (
    "The provided continue parameter is too old to display a consistent list result. You can start "
    "a new list without the continue parameter, or use the continue token in this response to "
    "retrieve the remainder of the results. Continuing with the provided token results in an "
    "inconsistent list - objects that were created, modified, or deleted between the time the "
    "first chunk was returned and now may show up in the list."
)


@dataclass(frozen=True, slots=True)
class Target:
    """What a request is about; an empty name means all objects."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def matcher(resource: Resource, labels: str, fields: str) -> Match:
    """A test for both selectors of a request."""
    by_labels, by_fields = label_selector(labels), field_selector(fields, resource.plural)
    return lambda each: by_labels(each["metadata"].get("labels") or {}) and by_fields(each)


def listed(store: Store, target: Target, match: Match, limit: int, token: str) -> Object:
    """A list object; `limit` 0 means all."""
    found = [each for each in store.items(target.resource, target.namespace) if match(each)]
    metadata: Object = {"resourceVersion": str(store.revision)}
    start = _continued(store, token)
    page = found[start : start + limit] if limit else found[start:]
    if limit and start + limit < len(found):
        place = json.dumps({"revision": store.revision, "start": start + limit})
        metadata["continue"] = base64.urlsafe_b64encode(place.encode()).decode()
        metadata["remainingItemCount"] = len(found) - start - limit
    plain = [{k: v for k, v in e.items() if k not in ("kind", "apiVersion")} for e in page]
    resource = target.resource
    return {
        "kind": f"{resource.kind}List",
        "apiVersion": resource.api_version,
        "metadata": metadata,
        "items": plain,
    }


def _continued(store: Store, token: str) -> int:
    if not token:
        return 0
    try:
        place = json.loads(base64.urlsafe_b64decode(token))
    except ValueError as error:
        message = f"invalid continue token: continue key is not valid: {error}"
        raise bad_request(message) from error
    if place["revision"] < store.oldest_revision:
        place["revision"] = 2**62
        rest = base64.urlsafe_b64encode(json.dumps(place).encode()).decode()
        raise expired(_TOO_OLD, **{"continue": rest})
    return int(place["start"])
