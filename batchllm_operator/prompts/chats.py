"""Renders rows that are whole chats: their messages, as vLLM's `LLM.chat` passes them on."""

import json
from collections.abc import Mapping
from typing import Any, Final, get_args

import pyarrow as pa
from pyarrow import types

from batchllm_operator.model import ChatRefusedError, ChatTemplate
from batchllm_operator.prompts.control_tokens import CONTROL_TOKEN, ControlTokens
from batchllm_operator.prompts.template import (
    NULL_VALUE,
    PromptRenderer,
    RenderedPrompts,
    system_message,
)
from batchllm_operator.prompts.values import (
    NoTextError,
    has_text,
    is_list,
    is_string,
    not_utf8,
    storage_of,
    text_column,
)
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import PromptSpec, template_columns
from batchllm_operator.spec.limits import shown
from batchllm_operator.spec.prompt import SYSTEM_ROLES, FieldsSpec, Role, Turn

INVALID_MESSAGES: Final = "invalid_messages"
Messages = list[dict[str, Any]]
_ROLES: Final = get_args(Role)
_MAX_NAME_LEN: Final = 40


def sample_chat(prompt: PromptSpec) -> pa.RecordBatch:
    """A row for a renderer, for what doesn't depend on the data."""
    if prompt.messages is not None:
        return pa.record_batch({prompt.messages: ['[{"role": "user", "content": "x"}]']})
    return pa.record_batch({name: ["x"] for name in prompt.columns} or {"": ["x"]})


def has_messages(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold chats: lists of structs, or JSON text."""
    kind = storage_of(kind)
    if is_list(kind) and types.is_struct(kind.value_type):
        names = {field.name for field in kind.value_type}
        return {"role", "content"} <= names and _is_json(kind.value_type)
    return is_string(kind)


class ChatRenderer:
    """Renders `prompt.turns`, or the messages of the column `prompt.messages`.

    Without a chat template, the text of a row is the JSON of its messages. A row whose chat the
    template refuses gets an error, as does one whose turn has no text.
    """

    def __init__(
        self,
        prompt: PromptSpec,
        control: ControlTokens | None = None,
        chat: ChatTemplate | None = None,
        fills_nulls: bool = False,
    ) -> None:
        self._control, self._chat = control or ControlTokens(), chat
        self._column, self._head = prompt.messages or "", system_message(prompt)
        self._turns = [
            (turn.role, PromptRenderer(_prompt_of(turn, prompt.fields), control, None, fills_nulls))
            for turn in prompt.turns
        ]

    def render(self, batch: pa.RecordBatch) -> RenderedPrompts:
        """Render each row of `batch`; see `PromptRenderer.render`."""
        errors: dict[int, RowError] = {}
        control_rows: set[int] = set()
        made = self._of_turns if self._turns else self._of_column
        chats = made(batch, errors, control_rows)
        text_of = self._texts(chats, errors)
        texts = pa.array(map(text_of.get, range(batch.num_rows)), pa.large_string())
        return RenderedPrompts(texts, dict(sorted(errors.items())), frozenset(control_rows))

    def _of_turns(
        self, batch: pa.RecordBatch, errors: dict[int, RowError], control_rows: set[int]
    ) -> dict[int, Messages]:
        """The chats of rows; adds the other rows' errors, and rows that spell control tokens."""
        turns = [renderer.render(batch) for _, renderer in self._turns]
        for turn in reversed(turns):  # the error of the first turn without a text counts
            errors |= turn.errors
            control_rows |= turn.control_rows
        roles = [role for role, _ in self._turns]
        rows = enumerate(zip(*(turn.texts.to_pylist() for turn in turns), strict=True))
        return {
            row: self._head
            + [{"role": r, "content": text} for r, text in zip(roles, texts, strict=True)]
            for row, texts in rows
            if row not in errors
        }

    def _of_column(
        self, batch: pa.RecordBatch, errors: dict[int, RowError], control_rows: set[int]
    ) -> dict[int, Messages]:
        """See `_of_turns`."""
        column = batch.column(self._column)
        known = text_column(column) if has_text(column.type) else None
        faults = {} if known is None else known.faults
        chats: dict[int, Messages] = {}
        for row, value in enumerate(column if known is None else known.texts):
            try:
                if row in faults:
                    raise faults[row]
                if not value.is_valid:
                    raise NoTextError(NULL_VALUE, "is null")
                given = _without_nulls(value.as_py()) if known is None else _loaded(value.as_py())
                messages, spells_control = self._control.in_messages(messages_of(given))
                control_rows |= {row} if spells_control else set()
                head = [] if messages[0]["role"] in SYSTEM_ROLES else self._head
                _as_text(messages)
                chats[row] = head + messages
            except UnicodeDecodeError as error:
                errors[row] = not_utf8(error).of(self._column)
            except NoTextError as error:
                control_rows |= {row} if error.code == CONTROL_TOKEN else set()
                errors[row] = error.of(self._column)
        return chats

    def _texts(self, chats: dict[int, Messages], errors: dict[int, RowError]) -> dict[int, str]:
        """The text of each chat; adds errors of those that the template refuses."""
        if self._chat is None or not chats:
            return {row: _as_text(chat) for row, chat in chats.items()}
        try:
            return dict(zip(chats, self._chat.render(list(chats.values())), strict=True))
        except ChatRefusedError:
            texts: dict[int, str] = {}
        for row, chat in chats.items():
            try:
                [texts[row]] = self._chat.render([chat])
            except ChatRefusedError as error:
                reason = shown(" ".join(error.reason.split()))
                refusal = f"the model's chat template refuses them: {reason}"
                errors[row] = RowError(INVALID_MESSAGES, refusal)
        return texts


def _prompt_of(turn: Turn, fields: FieldsSpec | None) -> PromptSpec:
    places = template_columns(turn.template)
    fields = fields if "fields" in places else None
    return PromptSpec(template=turn.template, fields=fields, constant=True)


def _as_text(messages: Messages) -> str:
    """The JSON of a chat; a NoTextError if it holds what no tokenizer or JSON has."""
    try:
        text = json.dumps(messages, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise _invalid("holds half a surrogate pair, which is no character") from None
    except (ValueError, RecursionError):
        raise _invalid("holds NaN or an infinity, or is too deep") from None
    return text


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _invalid(f"isn't JSON: {error}") from None
    except (ValueError, RecursionError):
        raise _invalid("is JSON with a number of thousands of digits, or too deep") from None


def _without_nulls(value: Any) -> Any:
    """Without the fields that a struct has only for other rows."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _is_json(kind: pa.DataType) -> bool:
    """Whether JSON has all values of this type."""
    if types.is_struct(kind):
        return all(_is_json(field.type) for field in kind)
    if is_list(kind) or types.is_dictionary(kind):
        return _is_json(kind.value_type)
    is_number = types.is_integer(kind) or types.is_floating(kind)
    return bool(is_number or types.is_boolean(kind) or types.is_null(kind)) or is_string(kind)


def _invalid(reason: str) -> NoTextError:
    return NoTextError(INVALID_MESSAGES, reason)


def messages_of(value: object) -> Messages:
    """The messages of a chat, from what its JSON says, or a NoTextError."""
    if not isinstance(value, list):
        raise _invalid("isn't a list of messages")
    if not value:
        raise _invalid("has no messages")
    messages: Messages = []
    try:
        for message in value:
            messages.append(_message(message))
    except NoTextError as fault:
        raise _invalid(f"message {len(messages) + 1} {fault.reason}") from None
    return messages


def _message(given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise _invalid("isn't an object with role and content")
    role, content = given.get("role"), given.get("content")
    if role not in _ROLES:
        has = "has no role" if role is None else f"has the role {_named(role)}"
        raise _invalid(f"{has}; roles are {', '.join(_ROLES)}")
    message: dict[str, Any] = {"role": role}
    calls = _tool_calls(given.get("tool_calls")) if role == "assistant" else []
    if content is not None:
        _check_content(content)
        message["content"] = content
    elif not calls:
        raise _invalid("has no content")
    if calls:
        message["tool_calls"] = calls
    if role == "assistant" and given.get("reasoning") is not None:
        message["reasoning"] = message["reasoning_content"] = given["reasoning"]
    if role == "tool" and "tool_call_id" in given:
        message["tool_call_id"] = given["tool_call_id"]
    message |= {name: given[name] for name in ("name", "task") if isinstance(given.get(name), str)}
    if role == "developer":
        message["tools"] = given.get("tools")
    return message


def _check_content(content: object) -> None:
    if not isinstance(content, str | list):
        raise _invalid("has a content that isn't text, nor a list of parts")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _invalid(f"has a part of type {_named(kind)}; only text can be placed")
        if not isinstance(part.get("text"), str):
            raise _invalid("has a part without text")


def _tool_calls(given: object) -> list[dict[str, Any]]:
    """Calls with arguments as an object, which templates read, where OpenAI's API has its JSON."""
    calls: list[dict[str, Any]] = []
    for value in given if isinstance(given, list) else [] if given is None else [None]:
        call = value if isinstance(value, dict) else {}
        function = call.get("function")
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise _invalid("has tool_calls that aren't a list of calls of functions")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {}
        arguments = arguments if isinstance(arguments, dict) else {}
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def _named(value: object) -> str:
    return repr(shown(value, _MAX_NAME_LEN))
