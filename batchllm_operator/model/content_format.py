"""How a chat template reads the content of a message: as a text, or as a list of parts.

The rules are those by which vLLM decides what it gives to a template.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import lru_cache

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


@lru_cache(maxsize=8)
def takes_parts(template: str) -> bool:
    """Whether the template loops over the parts of a message's content."""
    try:
        root = _ENVIRONMENT.parse(template)
    except TemplateError:  # rendering tells why
        return False
    chats = _names_of_chat(root)
    messages = {
        loop.target.name
        for loop in root.find_all(nodes.For)
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
        for loop in root.find_all(nodes.For)
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
    names = {"messages"}
    assigned = [
        (each.target.name, each.node)
        for each in root.find_all(nodes.Assign)
        if isinstance(each.target, nodes.Name)
    ]
    while more := {
        target
        for target, value in assigned
        if target not in names and any(_reads(value, name) for name in names)
    }:
        names |= more
    return names


def _content_parameters(
    root: nodes.Template, macro: nodes.Macro, messages: Set[str]
) -> Iterator[str]:
    """The macro's parameters that are given the content of a message."""
    own = [parameter.name for parameter in macro.args]
    for call in root.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given = [*zip(own, call.args, strict=False)]
            given += [(each.key, each.value) for each in call.kwargs if each.key in own]
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
            case nodes.Getitem(node=owner, arg=nodes.Const(value=found)) if found == key:
                node = owner
            case nodes.Getattr(node=owner, attr=found) if found == key:
                node = owner
            case _:
                return False
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
