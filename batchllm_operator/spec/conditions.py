"""Conditions on rows: a list of terms that must all hold, or a text that says the same."""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, field_validator

from batchllm_operator.spec.fields import MAX_BYTES, Int64, OfPlan, Section

_OPERATIONS: Final[Mapping[type[ast.cmpop], str]] = {
    **{ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
    **{ast.In: "in", ast.NotIn: "not in", ast.Is: "is null", ast.IsNot: "is not null"},
}
_COLUMN: Final = re.compile(r"[^\W\d]\w*(\.\w+)*")
_CONSTANTS: Final = {"true": True, "false": False, "null": None}


class Comparison(Section):
    """A comparison of an input column with a value."""

    column: OfPlan[str]
    """Input column that is compared."""
    op: OfPlan[
        Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in", "is null", "is not null"]
    ] = "=="
    """Comparison; `in` and `not in` take a list, `is null` and `is not null` no value."""
    value: OfPlan[str | Int64 | float | bool | tuple[str | Int64 | float | bool, ...] | None] = None
    """What the column is compared with. Whole numbers have at most 64 bits. Dates and timestamps
    are text as in ISO 8601 (in UTC unless they say otherwise), decimals numbers or text."""

    @field_validator("value", mode="before")
    @classmethod
    def _check_size(cls, value: object) -> object:
        """Refuse larger numbers, which would become floats."""
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int) and not -MAX_BYTES - 1 <= number <= MAX_BYTES:
                raise ValueError("a whole number must fit into 64 bits")
        return value

    def _faults(self) -> Iterator[str]:
        if self.op.startswith("is ") != (self.value is None):
            yield "'is null' and 'is not null' take no value; the other comparisons need one"
        elif (self.op in ("in", "not in")) != isinstance(self.value, tuple):
            yield "'in' and 'not in' take a list; the other comparisons one value"


class FilterTerm(Comparison):
    """One condition on a row; all conditions of a spec must hold."""

    column: OfPlan[str] = ""
    """Input column that is compared; required without `any`."""
    any: OfPlan[tuple[Comparison, ...]] = ()
    """In place of a comparison: several, of which one must hold."""

    def _faults(self) -> Iterator[str]:
        if not self.any:
            yield from super()._faults()
        if bool(self.any) == bool(self.column) or (self.any and self.value is not None):
            yield "names either a column, op and value, or any of several comparisons"

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """One of them must hold."""
        return self.any or (self,)


def _as_terms(value: object) -> object:
    """The terms of a text, which Python's own parser reads."""
    if not isinstance(value, str):
        return value
    try:
        node = ast.parse(value.strip(), mode="eval").body
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            return [_term(each) for each in node.values]
        return [_term(node)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(
            "isn't a condition: write COLUMN == VALUE (or !=, <, <=, >, >=, in, not in, is null, is"
            " not null), several with `and`, alternatives with `or` in parentheses, text in quotes;"
            " a column whose name isn't a word is for the form {column: ..., op: ..., value: ...}"
        ) from None


def _term(node: ast.expr) -> dict[str, Any]:
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        return {"any": [_comparison(each) for each in node.values]}
    return _comparison(node)


def _comparison(node: ast.expr) -> dict[str, Any]:
    """The fields of a `Comparison`; ValueError if the expression is something else."""
    if not isinstance(node, ast.Compare) or len(node.ops) > 1:
        raise ValueError("isn't one comparison")
    column, op = ast.unparse(node.left), _OPERATIONS[type(node.ops[0])]
    value = _value(node.comparators[0])
    if not _COLUMN.fullmatch(column) or (value is None) != op.startswith("is "):
        raise ValueError("doesn't compare a column")
    return {"column": column, "op": op} | ({} if value is None else {"value": value})


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    return ast.literal_eval(node)


Conditions = Annotated[
    tuple[FilterTerm, ...],
    BeforeValidator(_as_terms, json_schema_input_type=str | tuple[FilterTerm, ...]),
]
