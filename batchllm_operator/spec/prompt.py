"""The section of a spec that says how a row becomes a prompt."""

from __future__ import annotations

from string import Formatter
from typing import Annotated

from pydantic import AfterValidator, Field

from batchllm_operator.spec.sections import Section


def _check_template(template: str) -> str:
    for column in template_columns(template):
        if not column:
            raise ValueError("has an empty {}: name a column, or write {{}} for braces")
    return template


def template_columns(template: str) -> tuple[str, ...]:
    """Names of the columns in `template`, in order of first use.

    A place is `{column}`; `{{` and `}}` are literal braces. Other features of Python's format
    strings (attributes, indexes, conversions, formats) are refused, so that a template can only
    insert data.

    Raises:
        ValueError: the template isn't well formed.
    """
    columns: dict[str, None] = {}
    try:
        places = list(Formatter().parse(template))
    except ValueError:  # Python's message is obscure
        raise ValueError(
            "has a { or } without its other half; write {{ or }} for a brace that is text"
        ) from None
    for _, name, format_spec, conversion in places:
        if name is None:
            continue
        if format_spec or conversion:
            raise ValueError(f"{{{name}}} may not carry a conversion or a format")
        if any(mark in name for mark in ".[]"):
            raise ValueError(f"{{{name}}} may not reach into a value; name a column")
        columns[name] = None
    return tuple(columns)


Template = Annotated[str, Field(min_length=1), AfterValidator(_check_template)]


class PromptSpec(Section):
    """How a row becomes a prompt."""

    system: str | None = None
    """Constant text that comes first in every prompt (braces are literal): the system
    message when `chat_template` is on, else put before the template as it is."""
    template: Template
    """Text with `{column}` places; `{{` and `}}` are literal braces. Put the columns
    that many rows share first: what comes first can be shared. Text is placed as it is; integers
    and decimals as plain digits, floats by the fewest digits (0.1, 3.0, 1e+20), booleans as `true`
    and `false`, dates and times as in ISO 8601 (in UTC if they have a time zone), lists of these as
    JSON. A null, NaN or infinity fails its row; a column of anything else is refused.
    Values mean nothing here, but text that spells a special token of the model (`<|im_start|>`)
    becomes that token, as in vLLM itself. Untrusted rows can end a chat's turn and begin another
    that way: remove such text from them first."""
    chat_template: bool = False
    """Wrap the prompt in the model's chat template, as one user message."""

    @property
    def columns(self) -> tuple[str, ...]:
        return template_columns(self.template)
