"""Answers that are JSON objects of a schema, whose properties become columns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.answers import fakes
from batchllm_operator.answers.json_columns import JsonColumn, ValueFaultError, property_columns
from batchllm_operator.answers.kind import AnswerKind, FakePrompt, PlannedAnswers
from batchllm_operator.answers.subschemas import parts, resolved
from batchllm_operator.errors import SpecError
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import JobSpec, JsonSchemaFormat, matcher
from batchllm_operator.spec.limits import shown
from batchllm_operator.spec.tasks import INVALID_OUTPUT

_MAX_NAME: Final = 100


class TypedAnswers(AnswerKind):
    """The properties of JSON objects. Parts keep no more of them than the text.

    Raises:
        SpecError: the schema isn't a JSON schema, or has no columns; see `property_columns`.
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
                reason = f"{where} doesn't meet the schema's {error.validator!r}"
                return RowError(INVALID_OUTPUT, reason)
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

    checker = FormatChecker(formats=())
    checker.checkers = {**kind.FORMAT_CHECKER.checkers, "regex": (_is_pattern, ValueError)}
    try:
        kind.check_schema(schema, format_checker=checker)
    except SchemaError as error:
        where = shown(".".join(map(str, error.absolute_path)))
        if error.validator == "format" and error.validator_value == "regex":
            pattern = shown(repr(error.instance))
            raise SpecError(
                f"response_format.json_schema: {where}: {pattern} isn't a regular expression, or"
                " one too large to be checked"
            ) from None
        raise SpecError(
            f"response_format.json_schema: isn't a JSON schema: {where}: {shown(error.message)}"
        ) from None
    _check_names(schema)


def _is_pattern(value: object) -> bool:
    return not isinstance(value, str) or bool(matcher(value))


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
    """The value of a JSON text.

    Raises:
        ValueFaultError: it isn't JSON.
    """
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
