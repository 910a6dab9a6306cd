"""The table of values in the chart's README: from the comments in values.yaml and the schema."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from helm_chart.rendering import CHART

README: Final = CHART / "README.md"
BEGIN: Final = "<!-- values: written by `make helm-readme` -->"
END: Final = "<!-- end of values -->"


@dataclass(frozen=True, slots=True)
class Value:
    """A row: a value that can be given."""

    path: str
    type: str
    default: str
    description: str


def write_table() -> None:
    """Bring README.md up to date."""
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(text: str) -> str:
    """README.md with the table as it should be.

    Raises:
        ValueError: the README has no place for it, or a value has no comment.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README}: there must be a line {BEGIN} and a line {END}")
    rows = ["| value | type | default | |", "|---|---|---|---|"]
    for each in read_values():
        default = each.default.replace("|", r"\|")
        description = each.description.replace("|", r"\|")
        rows.append(f"| `{each.path}` | {each.type} | `{default}` | {description} |")
    return "\n".join([f"{before}{BEGIN}", "", *rows, "", f"{END}{after}"])


def read_values() -> list[Value]:
    """Every value of values.yaml, in its order.

    Raises:
        ValueError: a value has no comment above it.
    """
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("values.yaml isn't a map")
    return list(_values(root, schema, schema, "", text.splitlines()))


def _values(
    node: yaml.MappingNode,
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
    prefix: str,
    lines: list[str],
) -> Iterator[Value]:
    for key, child in node.value:
        path = f"{prefix}{key.value}"
        described = _resolve(schema["properties"].get(key.value, {}), root)
        is_group = isinstance(child, yaml.MappingNode) and "properties" in described
        if is_group and key.value != "resources":  # requests and limits are one value
            yield from _values(child, described, root, f"{path}.", lines)
            continue
        comment = _comment_above(lines, key.start_mark.line)
        if not comment:
            raise ValueError(f"values.yaml: {path} has no comment above it")
        default = json.dumps(yaml.safe_load(yaml.serialize(child)))
        yield Value(path, _type_of(described, root), default, comment)


def _comment_above(lines: list[str], line: int) -> str:
    comment: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        comment.insert(0, lines[line].lstrip().removeprefix("#").strip())
    return " ".join(comment)


def _resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    resolved: Mapping[str, Any] = root["$defs"][reference.rpartition("/")[2]]
    return resolved


def _type_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    schema = _resolve(schema, root)
    if "enum" in schema:
        return " or ".join(schema["enum"])
    if "anyOf" in schema:  # the empty string, or a definition
        return _type_of(schema["anyOf"][-1], root)
    name: str = schema.get("type", "any value")
    if name == "array":
        return f"list of {_type_of(schema['items'], root)}"
    if name == "object" and "properties" not in schema:
        return f"map to {_type_of(schema['additionalProperties'], root)}"
    return name
