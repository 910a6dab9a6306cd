"""The messages of a chat: what a row may hold, and what a chat template is given of it.

A chat template gets what vLLM's `LLM.chat` passes on to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, get_args

from batchllm_operator.spec.limits import shown
from batchllm_operator.spec.prompt import Role

_ROLES: Final = get_args(Role)
_MAX_NAME_LEN: Final = 40


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
