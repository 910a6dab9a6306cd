"""Label selectors and field selectors of lists and watches."""

from __future__ import annotations

import re
from collections.abc import Callable

from support.kubernetes.status import Object, bad_request

Match = Callable[[Object], bool]

_EQUALITY = re.compile(r"([\w./-]+)(==|=|!=)([\w.-]*)")
_FIELD = re.compile(r"([\w.]+)(==|=|!=)(.*)")
_EXISTENCE = re.compile(r"(!?)([\w./-]+)")


def matcher(labels: str, fields: str) -> Match:
    """A test for both selectors of a request.

    Raises:
        ApiError: 400, one of them can't be parsed, or names a field that there is no index of.
    """
    terms = [_label_term(term.strip()) for term in labels.split(",") if term]
    terms += [_field_term(term.strip()) for term in fields.split(",") if term]
    return lambda each: all(term(each) for term in terms)


def _label_term(term: str) -> Match:
    if found := _EQUALITY.fullmatch(term):
        name, value, equal = found[1], found[3], found[2] != "!="
        return lambda each: (_labels(each).get(name) == value) is equal
    if found := _EXISTENCE.fullmatch(term):
        name, present = found[2], not found[1]
        return lambda each: (name in _labels(each)) is present
    raise bad_request(f"unable to parse requirement: {term}")


def _labels(each: Object) -> dict[str, str]:
    labels: dict[str, str] = each["metadata"].get("labels") or {}
    return labels


def _field_term(term: str) -> Match:
    found = _FIELD.fullmatch(term)
    path = found[1] if found else term
    if found is None or path not in ("metadata.name", "involvedObject.name", "status.phase"):
        raise bad_request(f"field label not supported: {path}")
    value, equal = found[3], found[2] != "!="
    parent, _, name = path.partition(".")
    return lambda each: (each.get(parent, {}).get(name) == value) is equal
