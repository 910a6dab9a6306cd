"""The section of a spec that says how a row becomes a prompt."""

import json
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from batchllm_operator.spec.fields import NonEmpty, OfOutput, OfPlan, Section, by_name, distinct
from batchllm_operator.spec.limits import check_values

Role = Literal["system", "user", "assistant", "tool", "developer"]
SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_RESERVED: Final = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "strftime_now", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)
"""Arguments of the call that renders a chat."""


def _check_template(template: str) -> str:
    if "" in template_columns(template):
        raise ValueError("has an empty {}: name a column, or write {{}} for braces")
    return template


def template_columns(template: str) -> tuple[str, ...]:
    """Names of the columns in `template`, in order of first use.

    A place is `{column}`; `{{` and `}}` are literal braces. Names are taken
    whole: the table says whether `{q.id}` is a column or a field of `q`. Conversions and formats,
    as in Python's format strings, are refused by a ValueError: a template can only insert data.
    """
    try:
        places = [place for place in Formatter().parse(template) if place[1] is not None]
    except ValueError:  # Python's message is obscure
        raise ValueError(
            "has a { or } without its other half; write {{ or }} for a brace that is text"
        ) from None
    for _, name, format_spec, conversion in places:
        if format_spec or conversion:
            raise ValueError(f"{{{name}}} may not carry a conversion or a format")
    return tuple(dict.fromkeys(str(name) for _, name, *_ in places))


def with_places(template: str, texts: Mapping[str, str]) -> str:
    """The template with other templates in some of its places, by their names."""
    made = ""
    for literal, name, *_ in Formatter().parse(template):
        made += literal_template(literal)
        if name is not None:
            made += texts.get(name, f"{{{name}}}")
    return made


def literal_template(text: str) -> str:
    """The template of a constant text."""
    return text.replace("{", "{{").replace("}", "}}")


def _parsed(value: object) -> Any:
    """A value, given as it is or as JSON text, as which it is stored.

    A stored spec doesn't keep the order of fields, but chat templates write them out in theirs.
    """
    try:
        if isinstance(value, str):
            value = json.loads(value)
            check_values(value)
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise ValueError("must be JSON: text, numbers, true, false, lists and mappings") from None


def _as_arguments(value: object) -> str | None:
    arguments = {} if value is None else _parsed(value)
    if not isinstance(arguments, dict):
        raise ValueError("must be a mapping of names to values")
    if reserved := sorted(_RESERVED & set(arguments)):
        raise ValueError(f"{reserved[0]} isn't for the template, or has a field of its own")
    return json.dumps(arguments, ensure_ascii=False) if arguments else None


def _as_tools(value: object) -> str | None:
    tools = [] if value is None else _parsed(value)
    if not isinstance(tools, list):
        raise ValueError("must be a list")
    for idx, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or tool.get("type") != "function":
            raise ValueError(
                f"[{idx}] must be like {{type: function, function: {{name: ..., ...}}}}"
            )
    return json.dumps(tools, ensure_ascii=False) if tools else None


MAX_FIELDS: Final = 16
_Few = Field(min_length=1, max_length=MAX_FIELDS)
Cut = Literal["end", "middle", "start"]
Template = Annotated[str, Field(min_length=1), AfterValidator(_check_template)]
_Arguments = Annotated[
    str | None,
    BeforeValidator(_as_arguments, json_schema_input_type=dict[str, JsonValue] | str | None),
]
_Tools = Annotated[
    str | None,
    BeforeValidator(
        _as_tools, json_schema_input_type=tuple[dict[str, JsonValue], ...] | str | None
    ),
]


class Turn(Section):
    """One message of a chat."""

    role: OfPlan[Role]
    """Who speaks."""
    template: OfPlan[Template]
    """Its text, with places as in `prompt.template`."""


FIELD_ORDERS: Final = "{fields}"
"""A column of rows beside the table's: the numbers of their fields, in order."""


class FieldsSpec(Section):
    """Fields of a prompt that carry their names, so that they may stand in any order."""

    order: OfPlan[Literal["by_row"]]
    """`by_row`: the plan chooses an order for each row, so that prompts share as many tokens as
    possible."""
    columns: OfPlan[Annotated[tuple[NonEmpty, ...], _Few, distinct("column")]]
    """At most 16, as `prompt.template` names them."""
    render: OfPlan[Template] = "{name}: {value}\n"
    """How a field is written: `{name}` is its column's name, `{value}` the row's value."""

    def _faults(self) -> Iterator[str]:
        if set(template_columns(self.render)) != {"name", "value"}:
            yield "render: must have the places {name} and {value}, and no others"
        if "fields" in self.columns:
            yield "columns: rename the column 'fields', as {fields} is the place of them all"
        for column in self.columns:
            if set("{}!:") & set(column):
                yield f"columns: a template can't place {column!r}, because of its {{, }}, ! or :"

    @property
    def templates(self) -> list[str]:
        """A template for each field."""
        return [
            with_places(self.render, {"name": literal_template(name), "value": f"{{{name}}}"})
            for name in self.columns
        ]


class PromptSpec(Section):
    """How a row becomes a prompt: by `template`, `turns` or `messages`."""

    system: OfPlan[str | None] = None
    """Constant text that comes first in every prompt (braces are literal): the system
    message when `chat_template` is on, else put before the template as it is. A conversation of
    `messages` that begins with a `system` or `developer` message has its own, and keeps it."""
    template: OfPlan[Template | None] = None
    """Text with `{column}` places; `{{` and `}}` are literal braces. `{doc.title}` is a field of a
    struct, `{tags[0]}` an item of a list, `{sizes[eu]}` a value of a map, unless there is a column
    of that name; a name with a dot is put in backquotes before a field. Put the columns
    that many rows share first: what comes first can be shared. Text is placed as it is; integers
    and decimals as plain digits, floats by the fewest digits (0.1, 3.0, 1e+20), booleans as `true`
    and `false`, dates and times as in ISO 8601 (in UTC if they have a time zone), lists of these as
    JSON. A null, NaN or infinity fails its row; a column of anything else is refused.
    Values mean nothing here, but see `special_tokens`."""
    turns: OfPlan[tuple[Turn, ...]] = ()
    """The messages of a chat, each with a `template`; through the model's chat template. A turn
    without text fails its row."""
    messages: OfPlan[NonEmpty | None] = None
    """Column that holds each row's chat: a list of structs with `role` and `content`, or such a
    list as JSON text. `content` is text, or a list of parts `{type: text, text: ...}`. `name`,
    `tool_calls`, `tool_call_id` and `reasoning` go to the chat template, too; other fields don't,
    as in vLLM. A row that holds no such list fails."""
    chat_template: OfPlan[bool] = False
    """Wrap the prompt in the model's chat template, as one user message. Always on for `turns` and
    `messages`."""
    chat_template_kwargs: OfOutput[_Arguments] = None
    """Values that the chat template can ask for, such as `enable_thinking: false`. Stored as JSON
    text, which may be given as well."""
    tools: OfOutput[_Tools] = None
    """Functions that the model may call, as in OpenAI's API: a list of
    `{type: function, function: {name, description, parameters}}`. The chat template describes them;
    the answer's text is kept as it is. Stored as JSON text, which may be given as well."""
    fields: OfPlan[FieldsSpec | None] = None
    """Columns that stand together at the place `{fields}` of `template`, or of one of `turns`, each
    row's in an order of its own: `{order: by_row, columns: [title, brand, review]}`. The order
    depends on the other rows, too, so a row may have another one in a later partition, where
    `reuse_outputs` then doesn't know its prompt. With it, no column can be called `fields`."""
    answer_prefix: OfPlan[NonEmpty | None] = None
    """Constant text with which the assistant's answer begins (braces are literal), such as
    `"Category:"`: it follows the chat template's text, and the model continues it, so answers don't
    repeat it. For chats: end a plain `template` with such text. Let it end without a space, as most
    models write a word with the space before it."""
    special_tokens: OfPlan[Literal["keep", "text", "reject"] | None] = None
    """What becomes of a column's text that spells a control token of the model (`<|im_end|>`), with
    which a row could end its turn in a chat and begin another. `text`: ordinary text, the default
    where the model's chat template is used; `keep`: the token, as in vLLM itself, the default
    elsewhere, as columns may hold prompts that are complete; `reject`: the row fails."""
    truncate: OfPlan[Annotated[dict[NonEmpty, Cut], AfterValidator(by_name)]] = Field(
        default_factory=dict
    )
    """Columns whose values are cut where a prompt is too long, and what is cut off: the `end`, the
    `middle` or the `start`. A prompt is cut to leave room for `sampling.max_tokens`, or for half of
    the model's length if that is less; several columns lose the same share of their tokens.
    Without it, a prompt that the model can't take fails its row. Not for `messages`."""
    constant: OfPlan[bool] = False
    """Allow a prompt without any column, the same for all rows: for several samples of one prompt,
    with a `temperature`. Without it such a prompt is refused, as a place is missing."""

    @model_validator(mode="before")
    @classmethod
    def _fill_chat_template(cls, data: object) -> object:
        if isinstance(data, dict) and (data.get("turns") or data.get("messages")):
            return {"chat_template": True} | data
        return data

    def _faults(self) -> Iterator[str]:
        forms = [self.template, self.turns, self.messages]
        if (num_given := sum(map(bool, forms))) != 1:
            have = "is missing" if num_given == 0 else "must be alone"
            yield f"one of template, turns and messages {have}"
        if self.is_chat and not self.chat_template:
            yield (
                "chat_template: turns and messages always go through the model's chat template;"
                " leave it out"
            )
        if not self.chat_template and (self.chat_template_kwargs or self.tools):
            yield (
                "chat_template_kwargs and tools are for the model's chat template: set"
                " chat_template: true, or give turns or messages"
            )
        if self.answer_prefix is not None and not self.chat_template:
            yield (
                "answer_prefix: begins the answer of a chat; end prompt.template with its text, or"
                " set chat_template: true"
            )
        if self.system is not None and self.turns and self.turns[0].role in SYSTEM_ROLES:
            yield "system: the first of turns is one already; leave one of them out"
        if self.truncate and self.messages is not None:
            yield "truncate: cuts columns of template and turns; messages are whole"
        names = [name for form in self._forms for _, name, *_ in Formatter().parse(form)]
        if self.fields is not None and names.count("fields") != 1:
            yield f"fields: {self.field} must have one place {{fields}} for them"
        if absent := sorted(self.truncate.keys() - set(self.columns)):
            yield f"truncate: {self.field} places no column {absent[0]!r}"
        if not self.columns and not self.constant:
            yield (
                f"{self.field}: places no column, so that all rows would have the same prompt;"
                " write {COLUMN}, with single braces, where a row's value belongs, or set"
                " prompt.constant: true"
            )

    @property
    def is_chat(self) -> bool:
        """Whether a row is a whole chat, not one text."""
        return self.template is None

    @property
    def field(self) -> str:
        """The name of the field that says how a row becomes a prompt."""
        return "turns" if self.turns else "template" if self.messages is None else "messages"

    @property
    def control_mode(self) -> Literal["keep", "text", "reject"]:
        """`special_tokens`, or its default."""
        return self.special_tokens or ("text" if self.chat_template else "keep")

    @property
    def _forms(self) -> list[str]:
        return [self.template or "", *(turn.template for turn in self.turns)]

    @property
    def _templates(self) -> list[str]:
        """With the fields, in the order of their columns."""
        if self.fields is None:
            return self._forms
        texts = {"fields": "".join(self.fields.templates)}
        return [with_places(form, texts) for form in self._forms]

    @property
    def literals(self) -> list[str]:
        """All constant texts."""
        parsed = [text for form in self._templates for text, *_ in Formatter().parse(form)]
        return [*filter(None, [self.system, self.answer_prefix]), *parsed]

    @property
    def columns(self) -> tuple[str, ...]:
        """Distinct input columns, in order of first use."""
        if self.messages is not None:
            return (self.messages,)
        names = (name for form in self._templates for name in template_columns(form))
        return tuple(dict.fromkeys(names))

    @property
    def chat_arguments(self) -> dict[str, Any]:
        """What a chat template is given beside the messages."""
        arguments: dict[str, Any] = json.loads(self.chat_template_kwargs or "{}")
        return arguments | ({"tools": json.loads(self.tools)} if self.tools else {})
