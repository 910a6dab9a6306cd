"""Real text that every machine has: long descriptions of installed Python distributions."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

_MIN_DOCUMENT_CHARS: Final = 400
_MAX_DOCUMENT_CHARS: Final = 2_500
_OWN_DISTRIBUTION: Final = "batchllm-operator"


@dataclass(frozen=True, slots=True)
class DemoDocument:
    package: str
    """Normalised name of the distribution; identifies the document."""
    text: str
    """The description, clipped at a line break."""


def clip(text: str, max_chars: int) -> str:
    """`text` cut to at most `max_chars` characters, at the last line break if there is one."""
    if len(text) <= max_chars:
        return text
    head = text[:max_chars]
    at_line = head.rfind("\n")
    return head[:at_line].rstrip() if at_line > 0 else head


def demo_documents(max_chars: int = _MAX_DOCUMENT_CHARS) -> tuple[DemoDocument, ...]:
    """Long descriptions of the installed distributions, sorted by name, without equal texts.

    The same environment always gives the same documents. This package's own
    description is left out, so that editing the README doesn't change the demo.
    """
    return tuple(DemoDocument(package, clip(text, max_chars)) for package, text in _descriptions())


@cache
def _descriptions() -> tuple[tuple[str, str], ...]:
    """(normalised name, whole description) of every distribution with enough text."""
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
    packages: dict[str, str] = {}
    for package, text in sorted(by_package.items()):
        if len(text) >= _MIN_DOCUMENT_CHARS and package != _OWN_DISTRIBUTION:
            packages.setdefault(text, package)
    return tuple((package, text) for text, package in packages.items())
