"""Label selectors and field selectors of list, watch and deletecollection."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from support.kubernetes.status import ApiError, Object, bad_request

LabelMatch = Callable[[Mapping[str, str]], bool]

_SET_TERM = re.compile(r"^(?P<key>\S+)\s+(?P<operator>in|notin)\s*\((?P<values>[^)]*)\)$")
_EQUALITY_TERM = re.compile(r"^(?P<key>[^=!\s]+)\s*(?P<operator>==|=|!=)\s*(?P<value>[\w./-]*)$")
_EXISTS_TERM = re.compile(r"^(?P<negated>!?)\s*(?P<key>[A-Za-z0-9][\w./-]*)$")
_COMMA_OUTSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")

FIELDS = {
    "pods": {
        "metadata.name",
        "metadata.namespace",
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    },
    "events": {
        "metadata.name",
        "metadata.namespace",
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "reason",
        "reportingComponent",
        "source",
        "type",
    },
    "nodes": {"metadata.name", "spec.unschedulable"},
    "namespaces": {"metadata.name", "status.phase"},
    "secrets": {"metadata.name", "metadata.namespace", "type"},
}
_COMMON_FIELDS = {"metadata.name", "metadata.namespace"}


def label_selector(text: str) -> LabelMatch:
    """A test of labels.

    Raises:
        ApiError: 400, the selector can't be parsed.
    """
    terms = [_label_term(term.strip()) for term in _COMMA_OUTSIDE_PARENTHESES.split(text) if term]
    return lambda labels: all(term(labels) for term in terms)


def _label_term(term: str) -> LabelMatch:
    if found := _SET_TERM.match(term):
        key, wanted = found["key"], found["operator"] == "in"
        values = {value.strip() for value in found["values"].split(",")}
        return lambda labels: (key in labels and labels[key] in values) is wanted
    if found := _EQUALITY_TERM.match(term):
        key, value, equal = found["key"], found["value"], found["operator"] != "!="
        return lambda labels: (labels.get(key) == value) is equal
    if found := _EXISTS_TERM.match(term):
        key, present = found["key"], not found["negated"]
        return lambda labels: (key in labels) is present
    raise bad_request(
        f"unable to parse requirement: found '{term}', expected: a key, an operator and values"
    )


def field_selector(text: str, resource: str) -> Callable[[Object], bool]:
    """A test of an object's fields; which ones there are depends on the resource.

    Raises:
        ApiError: 400, the selector can't be parsed or the resource has no such field.
    """
    terms: list[tuple[str, str, bool]] = []
    for term in filter(None, text.split(",")):
        found = re.match(r"^\s*([\w.]+)\s*(==|=|!=)\s*(.*?)\s*$", term)
        if not found:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{term}'")
        name, operator, value = found.groups()
        if name not in FIELDS.get(resource, _COMMON_FIELDS):
            raise _unknown_field(name)
        terms.append((name, value, operator != "!="))
    return lambda each: all((field_value(each, name) == value) is eq for name, value, eq in terms)


def _unknown_field(name: str) -> ApiError:
    return bad_request(f"field label not supported: {name}")


def field_value(each: Object, path: str) -> str:
    """The field as selectors see it: a text, empty where there is none."""
    if path == "source":
        path = "source.component"
    value: Any = each
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "false" if path == "spec.unschedulable" else ""
    return str(value)
