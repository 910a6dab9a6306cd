"""Chats to texts by a model's chat template, as vLLM's `LLM.chat` gives them to it."""

import datetime
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
        self._takes_parts = takes_parts(self.source)
        self._knows_developers = any(f"{quote}developer{quote}" in self.source for quote in "'\"")

    def render(self, chats: Sequence[Sequence[Message]]) -> list[str]:
        """The text of each chat, at whose end the assistant's answer begins or continues.

        Raises ChatRefusedError for one that the template refuses, and ModelError if it asks for a
        date, and `ds` isn't one.
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
        messages: list[Message] = [{**m, "content": self._content(m)} for m in chat]
        if self._knows_developers or all(m["role"] != "developer" for m in messages):
            return messages
        return list(_without_developers(messages))

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


# Whether a template reads the content of a message as a text, or as a list of parts, by the rules
# of vLLM's `_detect_content_format`.


def takes_parts(template: str) -> bool:
    """Whether the template loops over the parts of a message's content."""
    try:
        root = _ENVIRONMENT.parse(template)
    except TemplateError:  # rendering tells why
        return False
    loops, chats = list(root.find_all(nodes.For)), _names_of_chat(root)
    messages = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in chats)
    }
    parameters: dict[int, Set[str]] = {}  # of macros, by each loop in them
    for macro in root.find_all(nodes.Macro):
        names = frozenset(_content_parameters(root, macro, messages))
        parameters |= {id(loop): names for loop in macro.find_all(nodes.For)}
    return any(
        any(_reads(loop.iter, name, "content") for name in messages)
        or (
            isinstance(loop.iter, nodes.Name)
            and loop.iter.name in parameters.get(id(loop), {"content"})
        )
        for loop in loops
    )


class _Generation(Extension):
    """transformers' tag around what a model has said."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)


def _names_of_chat(root: nodes.Template) -> set[str]:
    """`messages`, and variables that are set to it or to a part of it."""
    names, size = {"messages"}, 0
    while size < len(names):
        size = len(names)
        for assigned in root.find_all(nodes.Assign):
            target, value = assigned.target, assigned.node
            if isinstance(target, nodes.Name) and any(_reads(value, name) for name in names):
                names.add(target.name)
    return names


def _content_parameters(
    root: nodes.Template, macro: nodes.Macro, messages: Set[str]
) -> Iterator[str]:
    """The macro's parameters that are given the content of a message."""
    own = [parameter.name for parameter in macro.args]
    for call in root.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given = [*zip(own, call.args, strict=False)]
            given += [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in own]
            for name, value in given:
                if any(_reads(value, message, "content") for message in messages):
                    yield name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether it is a variable, or a key of one, maybe filtered, tested or cut."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        match node:
            case nodes.Getitem(node=owner, arg=nodes.Const(value=read)) if read == key:
                node = owner
            case nodes.Getattr(node=owner, attr=read) if read == key:
                node = owner
            case _:
                return False
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
