"""Chats to texts by a model's chat template, as vLLM's `LLM.chat` gives them to it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchllm_operator.errors import ModelError
from batchllm_operator.model.content_format import takes_parts
from batchllm_operator.spec import PromptSpec

Message = Mapping[str, Any]


class ChatRefusedError(ModelError):
    """A chat template refuses a chat; `reason` is the template's own."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ChatTemplate:
    """The chat template of a tokenizer, with its arguments.

    Args:
        tokenizer: transformers' tokenizer, which has a chat template.
        path: the model, in messages.
        ds: the date, for templates that ask for it, so that a plan can be repeated.
        prompt: the spec's, with arguments of the template, and the answer's beginning.

    Raises:
        ModelError: there are several templates, and none is the default.
    """

    def __init__(self, tokenizer: Any, path: str, ds: str, prompt: PromptSpec) -> None:
        self._tokenizer, self._path, self._ds = tokenizer, path, ds
        self._answer_prefix = prompt.answer_prefix or ""
        self._arguments, self._advice = prompt.chat_arguments, advise_without_template(prompt)
        try:
            template = tokenizer.get_chat_template(tools=self._arguments.get("tools"))
        except ValueError as error:
            raise ModelError(f"model {path}: {error}") from error
        self.source: str = template
        self._takes_parts = takes_parts(template)
        self._knows_developers = any(f"{quote}developer{quote}" in template for quote in "'\"")

    def render(self, chats: Sequence[Sequence[Message]]) -> list[str]:
        """The text of each chat, at whose end the assistant's answer begins or continues.

        Raises:
            ChatRefusedError: the template refuses one.
            ModelError: it asks for a date, and `ds` isn't one.
        """
        try:
            texts: list[str] = self._tokenizer.apply_chat_template(
                [self._given(chat) for chat in chats],
                tokenize=False,
                add_generation_prompt=True,
                strftime_now=self._format_date,
                **self._arguments,
            )
        except ModelError:
            raise
        # A template is a program of the model's: it may fail in any way at a chat that it isn't
        # made for.
        except Exception as error:
            raise ChatRefusedError(
                f"model {self._path}: its chat template refuses the prompt: {error}; change"
                f" prompt.system, or {self._advice}",
                str(error),
            ) from error
        return [text + self._answer_prefix for text in texts]

    def _given(self, chat: Sequence[Message]) -> list[Message]:
        """The messages in the form that the template reads."""
        found: list[Message] = [{**each, "content": self._content(each)} for each in chat]
        if self._knows_developers or all(each["role"] != "developer" for each in found):
            return found
        return list(_without_developers(found))

    def _content(self, message: Message) -> object:
        content = message.get("content", [])
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not self._takes_parts:
            return "\n".join(part["text"] for part in parts if part["text"])
        return "\n".join(_texts(parts)) if message["role"] == "tool" else parts

    def _format_date(self, date_format: str) -> str:
        try:
            return datetime.date.fromisoformat(self._ds).strftime(date_format)
        except ValueError as error:
            raise ModelError(
                f"model {self._path}: its chat template asks for the date, and partition"
                f" {self._ds!r} isn't one (YYYY-MM-DD); {self._advice}"
            ) from error


def advise_without_template(prompt: PromptSpec) -> str:
    """What a spec can do if the model's chat template is missing or doesn't suit it."""
    if not prompt.is_chat:
        return "set prompt.chat_template: false"
    return (
        "put a chat template that works into the model's folder, as chat_template.jinja, or write"
        f" the whole text as prompt.template, in place of prompt.{prompt.field}"
    )


def _without_developers(chat: Sequence[Message]) -> Iterator[Message]:
    """The chat with developers' messages as the system's; all of these as one, which comes first.

    As vLLM does it for templates that don't know the role.
    """
    system, others = list[Message](), list[Message]()
    for message in chat:
        if message["role"] == "developer":
            message = {name: each for name, each in message.items() if name != "tools"}
            message["role"] = "system"
        (system if message["role"] == "system" else others).append(message)
    if len(system) == 1 and chat[0]["role"] in ("developer", "system"):
        yield from system
    else:
        texts = ["\n".join(_texts(each["content"])) for each in system]
        yield {"role": "system", "content": "\n\n".join(filter(None, texts))}
    yield from others


def _texts(content: str | list[dict[str, str]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]
