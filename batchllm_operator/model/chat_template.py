"""Chats to texts by a model's chat template, as vLLM's `LLM.chat` gives them to it."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchllm_operator.errors import ModelError
from batchllm_operator.spec import PromptSpec
from batchllm_operator.spec.prompt import SYSTEM_ROLES

Message = Mapping[str, Any]


class ChatRefusedError(ModelError):
    """A chat template refuses a chat; `reason` is the template's own."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ChatTemplate:
    """The chat template of transformers' tokenizer for a model's path, with the spec's arguments.

    Templates that ask for the date get `ds`, so that a plan can be repeated. A ModelError says that
    there is no template, or there are several, and none is the default.
    """

    def __init__(self, tokenizer: Any, path: str, ds: str, prompt: PromptSpec) -> None:
        self._tokenizer, self._path, self._ds = tokenizer, path, ds
        self._answer_prefix, self._arguments = prompt.answer_prefix or "", prompt.chat_arguments
        self._advice = "set prompt.chat_template: false"
        if prompt.is_chat:
            self._advice = (
                "put a chat template that works into the model's folder, as chat_template.jinja, or"
                f" write the whole text as prompt.template, in place of prompt.{prompt.field}"
            )
        if not tokenizer.chat_template:
            raise ModelError(f"model {path}: has no chat template; {self._advice}")
        try:
            self.source: str = tokenizer.get_chat_template(tools=self._arguments.get("tools"))
        except ValueError as error:
            raise ModelError(f"model {path}: {error}") from error
        self.takes_parts = self._shows_texts_of_parts()
        self._knows_developers = any(f"{quote}developer{quote}" in self.source for quote in "'\"")

    def render(self, chats: Sequence[Sequence[Message]]) -> list[str]:
        """The text of each chat, at whose end the assistant's answer begins or continues.

        Raises ChatRefusedError for one that the template refuses, and ModelError if it asks for a
        date, and `ds` isn't one.
        """
        try:
            texts = self._apply([self._given(chat) for chat in chats])
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

    def _apply(self, chats: Sequence[Sequence[Message]]) -> list[str]:
        texts: list[str] = self._tokenizer.apply_chat_template(
            chats,
            tokenize=False,
            add_generation_prompt=True,
            strftime_now=self._format_date,
            **self._arguments,
        )
        return texts

    def _shows_texts_of_parts(self) -> bool:
        """Whether the template writes the text of each part of a content, and not the list itself.

        vLLM decides by a loop over the content (`_detect_content_format`): the same for a model's.
        """
        part = {"type": "text", "text": "text-of-a-part", "rest": "rest-of-a-part"}
        try:
            [text] = self._apply([[{"role": "user", "content": [part]}]])
        except Exception:  # noqa: BLE001 - see `render`
            return False
        return part["text"] in text and part["rest"] not in text

    def _given(self, chat: Sequence[Message]) -> list[Message]:
        """The messages in the form that the template reads."""
        messages: list[Message] = [{**m, "content": self._content(m)} for m in chat]
        if self._knows_developers or all(m["role"] != "developer" for m in messages):
            return messages
        return list(_without_developers(messages))

    def _content(self, message: Message) -> object:
        content = message.get("content", [])
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not self.takes_parts:
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


def _without_developers(chat: Sequence[Message]) -> Iterator[Message]:
    """The chat with developers' messages as the system's, and all of these as one, which comes
    first, as vLLM does it for templates that don't know the role."""
    system: list[Message] = [
        {name: value for name, value in {**message, "role": "system"}.items() if name != "tools"}
        for message in chat
        if message["role"] in SYSTEM_ROLES
    ]
    if len(system) == 1 and chat[0]["role"] in SYSTEM_ROLES:
        yield from system
    else:
        texts = ["\n".join(_texts(message["content"])) for message in system]
        yield {"role": "system", "content": "\n\n".join(filter(None, texts))}
    yield from (message for message in chat if message["role"] not in SYSTEM_ROLES)


def _texts(content: str | list[dict[str, str]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]
