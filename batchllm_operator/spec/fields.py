"""What a field of the spec is: what it decides, shared types, and the base of sections."""

from collections.abc import Iterator
from enum import Flag, auto
from typing import Annotated, Any, Final, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

_Value = TypeVar("_Value")
MAX_COUNT: Final = (1 << 31) - 1
MAX_BYTES: Final = (1 << 63) - 1
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Int64 = Annotated[int, Field(ge=-MAX_BYTES - 1, le=MAX_BYTES)]
NonEmpty = Annotated[str, Field(min_length=1)]


def by_name(values: dict[str, _Value]) -> dict[str, _Value]:
    """In an order that a stored spec keeps: JSON's objects have none."""
    return dict(sorted(values.items()))


def distinct(kind: str) -> AfterValidator:
    """A check that a tuple has no value twice."""

    def check(values: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(values)) < len(values):
            raise ValueError(f"names a {kind} twice")
        return values

    return AfterValidator(check)


def _kinds(annotation: object) -> set[object]:
    """The types in an annotation, and those of its literals."""
    if not (arguments := get_args(annotation)):
        return {annotation if isinstance(annotation, type) else type(annotation)}
    return set().union(*map(_kinds, arguments))


class Decides(Flag):
    """What the value of a field decides."""

    OUTPUT = auto()
    """The answer to a prompt, so that outputs are reused only by equal settings."""
    PLAN = auto()
    """The identity of a plan."""


OfOutput = Annotated[_Value, Decides.OUTPUT | Decides.PLAN]
"""A field that decides what a model answers to given token ids."""
OfPlan = Annotated[_Value, Decides.PLAN]
"""A field that decides what is asked or published. The prompt's token ids and the versions of model
and tokenizer stand for it where outputs are reused."""
Neutral = Annotated[_Value, Decides(0)]
"""A field of speed or strictness, which changes at most the rounding of sums: parts that are
finished stay valid if it changes."""


def _decided(field: FieldInfo) -> Decides | None:
    """What a field decides; None if its declaration doesn't say."""
    return next((mark for mark in field.metadata if isinstance(mark, Decides)), None)


class Section(BaseModel):
    """A part of the spec: immutable, no unknown fields, no values in error messages."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a field that says of neither plan nor output whether it decides them."""
        for name, field in cls.model_fields.items():
            kind = field.annotation
            is_section = isinstance(kind, type) and issubclass(kind, Section)
            if not is_section and _decided(field) is None:
                raise TypeError(f"{cls.__name__}.{name}: mark it as OfOutput, OfPlan or Neutral")

    def settings(self, decided: Decides) -> dict[str, Any]:
        """The fields that decide this, as JSON's values; what decides an output decides a plan.

        A field that is None isn't there: a release that adds one leaves the identities of jobs that
        don't set it as they are.
        """
        stored, chosen = self.model_dump(mode="json"), dict[str, Any]()
        for name in stored:
            value, decides = getattr(self, name), _decided(type(self).model_fields[name])
            if isinstance(value, Section) and decides != Decides(0):
                chosen[name] = value.settings(decided)
            elif value is not None and decided in (decides or Decides(0)):
                chosen[name] = stored[name]
        return chosen

    def _faults(self) -> Iterator[str]:
        """What no field's type says is wrong; only the first is told."""
        yield from ()

    @model_validator(mode="after")
    def _check_faults(self) -> Self:
        for fault in self._faults():
            raise ValueError(fault)
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse bools as numbers: Python has them as integers, YAML's `yes` and `on` are true.

        And sizes with more behind them: pydantic takes the 1 of `1,5GiB`.
        """
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float, ByteSize}:
            raise ValueError("must be a number, not true or false (YAML's yes and no)")
        if isinstance(value, str) and ByteSize in kinds:
            size = ByteSize.byte_string_re.fullmatch(value.strip())
            if size is None:
                raise PydanticCustomError("byte_size", "not a size")
        return value
