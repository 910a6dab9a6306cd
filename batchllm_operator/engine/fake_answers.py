"""The fake engine's answers to a `response_format`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from batchllm_operator.spec import ChoiceFormat, JsonSchemaFormat, ResponseFormat


def digest_of(prompt_token_ids: list[int]) -> int:
    """A number that a prompt determines."""
    return int(hashlib.sha256(repr(prompt_token_ids).encode()).hexdigest()[:12], 16)


def fake_answer(form: ResponseFormat, prompt_token_ids: list[int]) -> str:
    """An answer in the form, as far as it is simple; of a regex, digits."""
    digest = digest_of(prompt_token_ids)
    if isinstance(form, JsonSchemaFormat):
        schema = form.schema_fields
        return json.dumps(_value(schema, schema, digest))
    if isinstance(form, ChoiceFormat):
        return form.choices[digest % len(form.choices)]
    return str(digest)


def _value(schema: Mapping[str, Any], root: Mapping[str, Any], digest: int) -> Any:
    """A value by types, `$ref`s into `$defs`, `anyOf`, `enum` and the two formats of time."""
    if "$ref" in schema:
        return _value(root["$defs"][schema["$ref"].rpartition("/")[2]], root, digest)
    if "anyOf" in schema:
        return _value(schema["anyOf"][digest % len(schema["anyOf"])], root, digest)
    if "enum" in schema:
        return schema["enum"][digest % len(schema["enum"])]
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = kind[digest % len(kind)]
    if kind == "object":
        fields = schema.get("properties", {})
        return {name: _value(each, root, digest) for name, each in fields.items()}
    if kind == "array":
        return [_value(schema["items"], root, digest + idx) for idx in range(digest % 3)]
    if kind == "string":
        day = f"2026-01-{digest % 28 + 1:02d}"
        times = {"date": day, "date-time": f"{day}T12:30:00.25+02:00"}
        return times.get(schema.get("format", ""), f"text {digest % 1000}")
    numbers = {"integer": digest % 1000, "number": digest % 1000 / 8, "boolean": digest % 2 == 0}
    return numbers.get(kind)
