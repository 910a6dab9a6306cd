"""The form that answers must have: JSON by a schema, one of some texts, or a pattern."""

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import SchemaError, SchemaValidator, core_schema

from batchllm_operator.spec.fields import NonEmpty, OfOutput, OfPlan, Section, distinct


def _as_json(value: object) -> object:
    """A schema as JSON text, which keeps the order of its properties; a stored spec's is one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(
                "must be a mapping (a JSON schema), or in a spec file the path of a .json or .yaml"
                " file with one"
            ) from None
    if not isinstance(value, dict):
        raise ValueError("must be a mapping: a JSON schema")
    wrapped = value.get("schema")
    if isinstance(wrapped, dict) and "properties" not in value:  # OpenAI's form
        value = wrapped
    properties = value.get("properties")
    if value.get("type") != "object" or not isinstance(properties, dict) or not properties:
        raise ValueError("must be of type object at its top level, with properties")
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError("holds a value that isn't JSON (put a date in quotes)") from None


def matcher(pattern: str, *, whole: bool = False) -> Callable[[str], bool]:
    r"""Whether a text, or a part of it, matches `pattern`.

    Its syntax is Python's, or else Rust's, by pydantic: that knows `\p{L}`, as JSON schemas do. A
    ValueError refuses what isn't a regular expression, or is too large.
    """
    try:
        known = re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        rust = f"^(?:{pattern})$" if whole else pattern
        schema = core_schema.str_schema(pattern=rust, regex_engine="rust-regex", strict=True)
        try:
            return SchemaValidator(schema).isinstance_python
        except SchemaError:
            raise ValueError("isn't a regular expression, or one too large") from None
    find = known.fullmatch if whole else known.search
    return lambda text: find(text) is not None


def _check_regex(pattern: str) -> str:
    matcher(pattern)
    return pattern


JsonSchema = Annotated[str, BeforeValidator(_as_json, json_schema_input_type=dict[str, Any] | str)]


class JsonSchemaFormat(Section):
    """Each answer is a JSON object by a schema, whose properties become columns."""

    type: OfOutput[Literal["json_schema"]]
    """JSON objects, whose properties become columns."""
    json_schema: OfOutput[JsonSchema]
    """The JSON schema of an answer: a mapping, or the path of a `.json` or `.yaml` file (relative
    to the spec file), which is read with the spec. It is of type `object`; each of its `properties`
    becomes a column: string, int64, double, bool, timestamp (format `date-time`), date, list or
    struct; anything else is JSON text. OpenAI's form (`name`, `schema`) is taken, too."""
    prefix_columns: OfPlan[str] = ""
    """Put before the names of the properties to name their columns, where other columns have the
    same names."""

    @property
    def schema_fields(self) -> dict[str, Any]:
        """The schema, parsed."""
        fields: dict[str, Any] = json.loads(self.json_schema)
        return fields

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the properties' columns, in the schema's order."""
        return tuple(f"{self.prefix_columns}{name}" for name in self.schema_fields["properties"])


class ChoiceFormat(Section):
    """Each answer is one of some texts."""

    type: OfOutput[Literal["choice"]]
    """One of some texts."""
    choices: OfOutput[Annotated[tuple[NonEmpty, ...], Field(min_length=1), distinct("choice")]]
    """The texts, of which each answer is one."""


class RegexFormat(Section):
    """Each answer matches a regular expression."""

    type: OfOutput[Literal["regex"]]
    """Texts that a regular expression describes."""
    regex: OfOutput[Annotated[NonEmpty, AfterValidator(_check_regex)]]
    r"""What the whole answer matches, in a syntax that vLLM's backend shares with Python or with
    Rust's library, which has `\p{L}`."""


def _type_of(value: object) -> object:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


ResponseFormat = Annotated[
    Annotated[JsonSchemaFormat, Tag("json_schema")]
    | Annotated[ChoiceFormat, Tag("choice")]
    | Annotated[RegexFormat, Tag("regex")],
    Discriminator(_type_of),
]
