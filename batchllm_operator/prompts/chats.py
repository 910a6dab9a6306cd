"""Renders rows into chats: the text of a row is the JSON of its messages.

A chat template gets what vLLM's `LLM.chat` passes on to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, get_args

import pyarrow as pa
from pyarrow import types

from batchllm_operator.prompts.control_tokens import (
    CONTROL_TOKEN,
    ControlTokenError,
    ControlTokens,
)
from batchllm_operator.prompts.template import (
    NULL_VALUE,
    PromptRenderer,
    RenderedPrompts,
    rendered_prompts,
)
from batchllm_operator.prompts.values import NOT_UTF8, has_text, text_column
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import PromptSpec
from batchllm_operator.spec.limits import shown
from batchllm_operator.spec.prompt import SYSTEM_ROLES, Role, Turn

INVALID_MESSAGES: Final = "invalid_messages"
Messages = list[dict[str, Any]]
_ROLES: Final = get_args(Role)
_MAX_NAME_LEN: Final = 40


def renderer_of(
    prompt: PromptSpec, control: ControlTokens | None = None
) -> PromptRenderer | _TurnsRenderer | _MessagesRenderer:
    """The renderer of a spec's prompt. Chats are as `read_chat` reads them.

    Args:
        control: see `PromptRenderer`.
    """
    if prompt.turns:
        return _TurnsRenderer(prompt.turns, prompt.system, control)
    if prompt.messages is not None:
        return _MessagesRenderer(prompt.messages, prompt.system, control)
    return PromptRenderer(prompt, control)


def read_chat(text: str) -> Messages:
    """The messages of a row."""
    messages: Messages = json.loads(text)
    return messages


def sample_chat(prompt: PromptSpec) -> pa.RecordBatch:
    """A row for a renderer, for what doesn't depend on the data."""
    if prompt.messages is not None:
        return pa.record_batch({prompt.messages: ['[{"role": "user", "content": "x"}]']})
    return pa.record_batch({name: ["x"] for name in prompt.columns} or {"": ["x"]})


def has_messages(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold chats: lists of structs, or JSON text."""
    while isinstance(kind, pa.BaseExtensionType) or types.is_dictionary(kind):
        is_dictionary = types.is_dictionary(kind)
        kind = kind.value_type if is_dictionary else kind.storage_type
    if _is_list(kind) and types.is_struct(kind.value_type):
        names = {field.name for field in kind.value_type}
        return {"role", "content"} <= names and _is_json(kind.value_type)
    return _is_text(kind)


class _TurnsRenderer:
    """Renders `prompt.turns`; a row has the error of its first turn without a text."""

    def __init__(
        self, turns: tuple[Turn, ...], system: str | None, control: ControlTokens | None
    ) -> None:
        self._head = _head(system)
        self._turns = [
            (turn.role, PromptRenderer(PromptSpec(template=turn.template, constant=True), control))
            for turn in turns
        ]

    def render(self, batch: pa.RecordBatch) -> RenderedPrompts:
        turns = [renderer.render(batch) for _, renderer in self._turns]
        errors: dict[int, RowError] = {}
        for turn in reversed(turns):
            errors |= turn.errors
        columns = [turn.texts.to_pylist() for turn in turns]
        texts: list[str | None] = []
        for row, contents in enumerate(zip(*columns, strict=True)):
            pairs = zip(self._turns, contents, strict=True)
            chat = [{"role": role, "content": content} for (role, _), content in pairs]
            texts.append(None if row in errors else _as_text(self._head + chat))
        control_rows = frozenset[int]().union(*(turn.control_rows for turn in turns))
        return rendered_prompts(texts, errors, control_rows)


class _MessagesRenderer:
    """Renders `prompt.messages`."""

    def __init__(self, column: str, system: str | None, control: ControlTokens | None) -> None:
        self._column, self._head = column, _head(system)
        self._control = control or ControlTokens()

    def render(self, batch: pa.RecordBatch) -> RenderedPrompts:
        column, where = batch.column(self._column), f"column {self._column!r}"
        known = text_column(column) if has_text(column.type) else None
        faults = {} if known is None else known.faults
        errors = {
            row: RowError(fault.code, f"{where} {fault.reason}") for row, fault in faults.items()
        }
        texts: list[str | None] = [None] * batch.num_rows
        control_rows = []
        for row, value in enumerate(column if known is None else known.texts):
            try:
                if row not in errors:
                    given = value.as_py()
                    found = _loaded(given) if known is not None else _without_nulls(given)
                    messages, spells_control = self._control.in_messages(messages_of(found))
                    control_rows += [row] if spells_control else []
                    texts[row] = self._chat(messages)
            except ControlTokenError as error:
                control_rows.append(row)
                errors[row] = RowError(CONTROL_TOKEN, f"{where} {error}")
            except UnicodeDecodeError as error:
                errors[row] = RowError(NOT_UTF8, f"{where} isn't valid UTF-8: {error.reason}")
            except InvalidMessagesError as error:
                is_null = not value.is_valid
                code = NULL_VALUE if is_null else INVALID_MESSAGES
                errors[row] = RowError(code, f"{where} {'is null' if is_null else error}")
        return rendered_prompts(texts, errors, control_rows)

    def _chat(self, messages: Messages) -> str:
        head = [] if messages[0]["role"] in SYSTEM_ROLES else self._head
        return _as_text(head + messages)


def _head(system: str | None) -> Messages:
    return [] if system is None else [{"role": "system", "content": system}]


def _as_text(messages: Messages) -> str:
    """The JSON of a chat, which keeps the order of its fields.

    Raises:
        InvalidMessagesError: it holds what no tokenizer or JSON has.
    """
    try:
        text = json.dumps(messages, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise InvalidMessagesError("holds half a surrogate pair, which is no character") from None
    except (ValueError, RecursionError):
        raise InvalidMessagesError("holds NaN or an infinity, or is too deep") from None
    return text


def _loaded(text: str | None) -> object:
    try:
        return None if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidMessagesError(f"isn't JSON: {error}") from None
    except (ValueError, RecursionError):
        raise InvalidMessagesError(
            "is JSON with a number of thousands of digits, or too deep"
        ) from None


def _without_nulls(value: Any) -> Any:
    """Without the fields that a struct has only for other rows."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_json(kind: pa.DataType) -> bool:
    """Whether JSON has all values of this type."""
    if types.is_struct(kind):
        return all(_is_json(field.type) for field in kind)
    if _is_list(kind) or types.is_dictionary(kind):
        return _is_json(kind.value_type)
    is_number = types.is_integer(kind) or types.is_floating(kind)
    return bool(is_number or types.is_boolean(kind) or types.is_null(kind)) or _is_text(kind)


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


class InvalidMessagesError(ValueError):
    """Something that isn't a chat; the text says what is wrong, after the column's name."""


def messages_of(value: object) -> list[dict[str, Any]]:
    """The messages of a chat, from what its JSON says.

    Raises:
        InvalidMessagesError: it isn't a list of messages.
    """
    if not isinstance(value, list):
        raise InvalidMessagesError("isn't a list of messages")
    if not value:
        raise InvalidMessagesError("has no messages")
    found = []
    for idx, message in enumerate(value):
        try:
            found.append(_message(message))
        except InvalidMessagesError as error:
            raise InvalidMessagesError(f"message {idx + 1} {error}") from None
    return found


def _message(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidMessagesError("isn't an object with role and content")
    role = value.get("role")
    if role not in _ROLES:
        has = "has no role" if role is None else f"has the role {_named(role)}"
        raise InvalidMessagesError(f"{has}; roles are {', '.join(_ROLES)}")
    found: dict[str, Any] = {"role": role}
    calls = _tool_calls(value.get("tool_calls")) if role == "assistant" else []
    if (content := value.get("content")) is not None:
        found["content"] = _content(content)
    elif not calls:
        raise InvalidMessagesError("has no content")
    if calls:
        found["tool_calls"] = calls
    if role == "assistant" and value.get("reasoning") is not None:
        found["reasoning"] = found["reasoning_content"] = value["reasoning"]
    if role == "tool" and "tool_call_id" in value:
        found["tool_call_id"] = value["tool_call_id"]
    found |= {name: value[name] for name in ("name", "task") if isinstance(value.get(name), str)}
    if role == "developer":
        found["tools"] = value.get("tools")
    return found


def _content(value: object) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidMessagesError("has a content that isn't text, nor a list of parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidMessagesError(
                f"has a part of type {_named(kind)}; only text can be placed"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidMessagesError("has a part without text")
    return value


def _tool_calls(value: object) -> list[dict[str, Any]]:
    if value is None:
        return []
    found: list[dict[str, Any]] = []
    for given in value if isinstance(value, list) else [None]:
        call = given if isinstance(given, dict) else {}
        function = call.get("function")
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise InvalidMessagesError("has tool_calls that aren't a list of calls of functions")
        found.append({**call, "function": {**function, "arguments": _arguments(function)}})
    return found


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    """Templates read an object, where OpenAI's API has its JSON; anything else is an empty one."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return arguments if isinstance(arguments, dict) else {}


def _named(value: object) -> str:
    return repr(shown(value, _MAX_NAME_LEN))
