"""Real text that every machine has: long descriptions of installed Python distributions."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Final

_MIN_DOCUMENT_CHARS: Final = 400
_MAX_DOCUMENT_CHARS: Final = 2_500
_OWN_DISTRIBUTION: Final = "batchllm-operator"

_MARKDOWN_HEADING = re.compile(r"#{1,6}\s+(?P<text>.+?)[\s#]*$")
_CODE_FENCE = re.compile(r"\s*```")
_UNDERLINE = re.compile(r"""(?P<mark>[=\-~^"'*+#.:])(?P=mark){2,}$""")
_MARKUP: Final = (
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),  # images
    (re.compile(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])"), r"\1"),  # links
    (re.compile(r"`([^`<]+?)\s*<[^>]*>`_*"), r"\1"),  # links of reStructuredText
    (re.compile(r"<[^>]*>|\{[#:.][^}]*\}"), ""),  # tags
)
"""Patterns, and what is kept of their matches."""
_VERSION = re.compile(r"v?\d")
_WORD = re.compile(r"[A-Za-z]{3}")


@dataclass(frozen=True, slots=True)
class DemoDocument:
    """One distribution's long description."""

    package: str
    """Normalised name of the distribution; identifies the document."""
    text: str
    """The description, clipped at a line break."""
    headings: tuple[str, ...]
    """Headings of the whole description in order of appearance, each once (ignoring case)."""


def clip(text: str, max_chars: int) -> str:
    """`text` cut to at most `max_chars` characters, at the last line break if there is one."""
    if len(text) <= max_chars:
        return text
    head = text[:max_chars]
    at_line = head.rfind("\n")
    return head[:at_line].rstrip() if at_line > 0 else head


def headings_of(text: str) -> tuple[str, ...]:
    """Headings in a Markdown or reStructuredText document, as plain text, each once.

    Lines in code fences, version numbers and one-symbol lines don't count.
    """
    headings: dict[str, str] = {}
    in_fence = False
    for line, following in pairwise([*map(str.rstrip, text.splitlines()), ""]):
        if _CODE_FENCE.match(line):
            in_fence = not in_fence
        if in_fence or not line or line[0].isspace() or _UNDERLINE.match(line):
            continue
        if match := _MARKDOWN_HEADING.match(line):
            line = match["text"]
        elif not _UNDERLINE.match(following):
            continue
        for pattern, kept in _MARKUP:
            line = pattern.sub(kept, line)
        heading = " ".join(line.split()).strip(" #*`_:.!|")
        if 3 <= len(heading) <= 60 and _WORD.search(heading) and not _VERSION.match(heading):
            headings.setdefault(heading.casefold(), heading)
    return tuple(headings.values())


def demo_documents(max_chars: int = _MAX_DOCUMENT_CHARS) -> tuple[DemoDocument, ...]:
    """Long descriptions of the installed distributions, sorted by name, without equal texts.

    The same environment always gives the same documents. This package's own
    description is left out, so that editing the README doesn't change the demo.
    """
    return tuple(
        DemoDocument(package, clip(text, max_chars), headings)
        for package, text, headings in _descriptions()
    )


@cache
def _descriptions() -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """(normalised name, whole description, headings) of every distribution with enough text."""
    # setuptools adds its `_vendor` folder to sys.path when it is imported.
    folders = [folder for folder in sys.path if Path(folder).name != "_vendor"]
    by_package: dict[str, str] = {}
    for distribution in metadata.distributions(path=folders):
        fields = distribution.metadata.json
        name, text = fields.get("name"), fields.get("description")
        if isinstance(name, str) and isinstance(text, str):  # else it is broken, or has none
            text = "\n".join(line.rstrip() for line in text.strip().splitlines())
            # The first on sys.path is in use.
            by_package.setdefault(re.sub(r"[-_.]+", "-", name).lower(), text)
    descriptions, seen = [], set[str]()
    for package, text in sorted(by_package.items()):
        if len(text) >= _MIN_DOCUMENT_CHARS and text not in seen and package != _OWN_DISTRIBUTION:
            seen.add(text)
            descriptions.append((package, text, headings_of(text)))
    return tuple(descriptions)
