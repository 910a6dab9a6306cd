"""Answers that are JSON objects of a schema, whose properties become columns."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.answers import fakes
from batchllm_operator.answers.kind import AnswerKind, FakePrompt, PlannedAnswers
from batchllm_operator.answers.subschemas import parts, refused, resolved
from batchllm_operator.errors import SpecError
from batchllm_operator.row_error import INVALID_OUTPUT, RowError
from batchllm_operator.spec import JobSpec, JsonSchemaFormat, matcher
from batchllm_operator.spec.limits import shown

MAX_COLUMNS: Final = 2_000
"""Columns of a schema, with those inside structs and lists."""
_INT64: Final = 1 << 63
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_MAX_NAME: Final = 100


class ValueFaultError(ValueError):
    """A value that its column can't hold; the message doesn't repeat it."""


class JsonColumn(NamedTuple):
    """The column of a property."""

    type: pa.DataType
    convert: Callable[[Any], Any]
    """From a JSON value that isn't null to what Arrow takes; raises `ValueFaultError`."""

    def value(self, value: Any) -> Any:
        """What Arrow takes for a JSON value, null included."""
        return None if value is None else self.convert(value)


class TypedAnswers(AnswerKind):
    """The properties of JSON objects. Parts keep no more of them than the text.

    A SpecError refuses what isn't a JSON schema, or has no columns; see `property_columns`.
    """

    def __init__(self, spec: JobSpec, planned: PlannedAnswers) -> None:
        super().__init__(spec, planned)
        form = spec.response_format
        assert isinstance(form, JsonSchemaFormat)
        self._schema, self._columns, self._validator = _compiled(form.json_schema)
        self.fields = tuple(
            pa.field(name, column.type)
            for name, column in zip(form.columns, self._columns.values(), strict=True)
        )

    @classmethod
    def is_asked(cls, spec: JobSpec) -> bool:
        return isinstance(spec.response_format, JsonSchemaFormat)

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        answered = pc.if_else(pc.is_null(outputs["error"]), outputs["generated_text"], None)
        texts = answered.to_pylist()
        rows = [None if text is None else self._values(_parsed(text)) for text in texts]
        return {
            field.name: pa.array([row and row[place] for row in rows], field.type)
            for place, field in enumerate(self.fields)
        }

    def fault(self, text: str, raw: Mapping[str, Any]) -> RowError | None:
        try:
            answer = _parsed(text)
            if (error := next(self._validator.iter_errors(answer), None)) is not None:
                where = shown(".".join(map(str, error.absolute_path)) or "the answer", _MAX_NAME)
                raise ValueFaultError(f"{where} doesn't meet the schema's {error.validator!r}")
            self._values(answer)
        except ValueFaultError as error:
            return RowError(INVALID_OUTPUT, str(error))
        except RecursionError:
            return RowError(INVALID_OUTPUT, "is nested too deeply")
        return None

    def fake_text(self, prompt: FakePrompt) -> str:
        digest = fakes.digest_of(prompt.token_ids)
        text = json.dumps(fakes.json_value(self._schema, digest))
        return fakes.cut(text) if prompt.is_invalid else text

    def _values(self, answer: Mapping[str, Any]) -> list[Any]:
        """The columns' values of a row."""
        values = []
        for name, column in self._columns.items():
            try:
                values.append(column.value(answer.get(name)))
            except ValueFaultError as error:
                raise ValueFaultError(f"{name} {error}") from None
        return values


@lru_cache(maxsize=8)  # a commit asks for the same schema often
def _compiled(schema_text: str) -> tuple[dict[str, Any], dict[str, JsonColumn], Any]:
    """A schema without references, the columns of its properties, and its validator."""
    from jsonschema import validators

    schema = json.loads(schema_text)
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    _check_schema(schema, kind)
    validator = validators.extend(kind, {"pattern": _pattern_faults})(schema)
    whole = resolved(schema)
    return whole, property_columns(whole), validator


def _check_schema(schema: Mapping[str, Any], kind: Any) -> None:
    """Raise SpecError if it isn't a JSON schema, or has a pattern that can't be checked."""
    from jsonschema import FormatChecker, SchemaError

    def is_pattern(value: object) -> bool:
        return not isinstance(value, str) or bool(matcher(value))

    checker = FormatChecker(formats=())
    checker.checkers = {**kind.FORMAT_CHECKER.checkers, "regex": (is_pattern, ValueError)}
    try:
        kind.check_schema(schema, format_checker=checker)
    except SchemaError as error:
        where = shown(".".join(map(str, error.absolute_path)))
        fault = f"isn't a JSON schema: {where}: {shown(error.message)}"
        if error.validator == "format" and error.validator_value == "regex":
            pattern = shown(repr(error.instance))
            fault = f"{where}: {pattern} isn't a regular expression, or one too large to be checked"
        raise SpecError(f"response_format.json_schema: {fault}") from None
    _check_names(schema)


def _check_names(schema: Any, where: str = "") -> None:
    """Raise SpecError if `patternProperties` has a pattern that Python lacks.

    Keywords such as `additionalProperties` search for these patterns, too.
    """
    for step, part in parts(schema, definitions=True):
        _check_names(part, f"{where}.{step}" if where else step)
    for pattern in schema.get("patternProperties", ()):
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError):
            raise SpecError(
                f"response_format.json_schema: {where or 'the schema'}: patternProperties:"
                f" {shown(repr(pattern))} can't be checked: it isn't in Python's syntax"
            ) from None


def _pattern_faults(
    validator: object, pattern: str, instance: object, schema: object
) -> Iterator[Any]:
    from jsonschema import ValidationError

    if isinstance(instance, str) and not _matcher(pattern)(instance):
        yield ValidationError("doesn't match")


_matcher = lru_cache(maxsize=256)(matcher)


def _parsed(text: str) -> Any:
    """The value of a JSON text, or a ValueFaultError."""
    try:
        # Grammars of vLLM's backends let tabs and other control characters into strings.
        return json.loads(text, parse_constant=_refuse, strict=False)
    except json.JSONDecodeError as error:
        raise ValueFaultError(f"isn't JSON: {error.msg} at character {error.pos + 1}") from None
    except ValueFaultError:
        raise
    except ValueError:  # a number of thousands of digits
        raise ValueFaultError("isn't JSON: a number is too long") from None


def _refuse(name: str) -> NoReturn:
    raise ValueFaultError(f"isn't JSON: {name} isn't a number in it")


def property_columns(schema: Mapping[str, Any]) -> dict[str, JsonColumn]:
    """The columns of a schema's top-level properties, by name, in its order.

    The schema has no references; see `resolved`. A SpecError refuses too many columns.
    """
    num_columns = 0

    def column(schema: Any, where: str) -> JsonColumn:
        nonlocal num_columns
        num_columns += 1
        if num_columns > MAX_COLUMNS:
            raise refused(where, f"is one of more than {MAX_COLUMNS:,} columns")
        schema = _plain(schema)
        kind = _kind(schema)
        if kind == "object" and isinstance(fields := schema.get("properties"), dict) and fields:
            parts = {name: column(part, f"{where}.{name}") for name, part in fields.items()}
            struct = pa.struct([(name, part.type) for name, part in parts.items()])
            return JsonColumn(
                struct, lambda value: {k: part.value(value.get(k)) for k, part in parts.items()}
            )
        is_list = isinstance(schema.get("items"), dict) and "prefixItems" not in schema
        if kind == "array" and is_list:
            item = column(schema["items"], f"{where}[]")
            return JsonColumn(pa.list_(item.type), lambda values: [*map(item.value, values)])
        return _SCALARS.get(kind, _JSON)

    return {name: column(part, name) for name, part in schema["properties"].items()}


def _plain(schema: Any) -> dict[str, Any]:
    """A schema without the option of null."""
    if not isinstance(schema, dict):  # true
        return {}
    for name in ("anyOf", "oneOf", "allOf") if "type" not in schema else ():
        options = [_plain(option) for option in schema.get(name, ())]
        options = [o for o in options if o.get("type") != "null" and o.get("const", 0) is not None]
        if len(options) == 1:
            return options[0]
    return schema


def _kind(schema: Mapping[str, Any]) -> str | None:
    """A type's name, `date-time` or `date`; None for what only JSON can hold."""
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set(named or ())
    if not kinds:
        values = [schema["const"]] if "const" in schema else schema.get("enum", [])
        kinds = {_KINDS.get(type(value), "json") for value in values}
    kinds -= {"null"}
    if kinds == {"integer", "number"}:
        return "number"
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    is_time = kind == "string" and schema.get("format") in ("date", "date-time")
    return str(schema["format"]) if is_time else str(kind)


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueFaultError("holds half a surrogate pair, which is no character") from None
    return value


def _integer(value: float) -> int:
    if not -_INT64 <= value < _INT64:
        raise ValueFaultError("has more than 64 bits")
    return int(value)


def _number(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueFaultError("is too large for a double")
    return number


def _time(value: str) -> datetime:
    try:
        time = datetime.fromisoformat(value)
        if time.tzinfo is not None:
            return time.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise ValueFaultError("isn't a date and time with its offset from UTC")


def _date(value: str) -> date:
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise ValueFaultError("isn't a date") from None


def _json(value: Any) -> str:
    return _text(json.dumps(value, ensure_ascii=False))


_SCALARS: Final[Mapping[str | None, JsonColumn]] = {
    "string": JsonColumn(pa.string(), _text),
    "integer": JsonColumn(pa.int64(), _integer),
    "number": JsonColumn(pa.float64(), _number),
    "boolean": JsonColumn(pa.bool_(), bool),
    "date-time": JsonColumn(pa.timestamp("us", "UTC"), _time),
    "date": JsonColumn(pa.date32(), _date),
}
_JSON: Final = JsonColumn(pa.string(), _json)
