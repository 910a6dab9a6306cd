"""The demo's lake table: passages of real documentation, each with several queries.

Every machine has such text: the long descriptions of installed Python distributions.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.amounts import counted
from batchllm_operator.errors import TableError

_MIN_DOCUMENT_CHARS: Final = 400
_MAX_DOCUMENT_CHARS: Final = 2_500
_MARKDOWN_HEADING = re.compile(r"#{1,6}\s+(?P<text>.+?)[\s#]*$")
_CODE_FENCE = re.compile(r"\s*```")
_UNDERLINE = re.compile(r"""(?P<mark>[=\-~^"'*+#.:])(?P=mark){2,}$""")
_MARKUP: Final = (
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),  # images
    (re.compile(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])"), r"\1"),  # links
    (re.compile(r"`([^`<]+?)\s*<[^>]*>`_*"), r"\1"),  # links of reStructuredText
    (re.compile(r"<[^>]*>|\{[#:.][^}]*\}"), ""),  # tags
)
_VERSION = re.compile(r"v?\d")
_WORD = re.compile(r"[A-Za-z]{3}")
_MAX_DOCUMENTS: Final = 60
_MAX_QUERIES: Final = 5
"""Of a document."""
DEMO_SCHEMA: Final = pa.schema(
    [
        pa.field(name, pa.string(), nullable=False)
        for name in ("snippet_id", "package", "document", "query")
    ]
)
"""Columns of the demo table; `snippet_id` is the key, the partition column is in the path."""


class DemoDocument(NamedTuple):
    """One distribution's long description."""

    package: str
    """Normalised name of the distribution; identifies the document."""
    text: str
    """The description, clipped at a line break."""
    headings: tuple[str, ...]
    """Headings of the whole description in order of appearance, each once (ignoring case)."""


def build_demo_table(folder: Path, *, ds: str) -> str:
    """Write partition `ds` of the demo table: `<folder>/ds=<ds>/part-0.parquet`; returns a summary.

    Documents are descriptions of installed distributions; their queries are the headings that recur
    most across all of them ("Installation", "Usage", ...), so that rows share documents as well as
    queries. Rows are in a fixed order that isn't grouped by document. One environment always gives
    the same bytes; an older file is replaced in one step. A TableError tells that `ds` can't name a
    partition, or that no installed distribution has a description with headings.
    """
    if not ds or "/" in ds or ds.startswith("."):
        raise TableError(f"demo table {folder}: {ds!r} can't name a partition; use 2026-01-31")
    chosen = _choose(demo_documents())
    if not chosen:
        raise TableError(
            f"demo table {folder}: no Python distribution installed here has a long description"
            " with headings, so there is nothing to make a table of"
        )
    rows = [
        {
            "snippet_id": f"{document.package}:{idx}",
            "package": document.package,
            "document": document.text,
            "query": query,
        }
        for document, queries in chosen
        for idx, query in enumerate(queries)
    ]
    # An order that is independent of the row's document.
    rows.sort(key=lambda row: hashlib.sha256(row["snippet_id"].encode()).digest())
    partition_path = folder / f"ds={ds}"
    partition_path.mkdir(parents=True, exist_ok=True)
    unfinished = partition_path / f".part-0.parquet.{os.getpid()}"
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=DEMO_SCHEMA), unfinished)
        unfinished.replace(partition_path / "part-0.parquet")
    finally:
        unfinished.unlink(missing_ok=True)
    queries = counted(len({row["query"] for row in rows}), "different query", "different queries")
    documents = counted(len(chosen), "document")
    return f"{counted(len(rows), 'row')} ({documents}, {queries}) in {partition_path}"


def _choose(documents: Sequence[DemoDocument]) -> list[tuple[DemoDocument, list[str]]]:
    """Documents with the queries that most others share, and their queries."""
    spellings = Counter(heading for document in documents for heading in document.headings)
    recurrence = Counter(h.casefold() for document in documents for h in document.headings)
    # One spelling for all documents ("Quick Start", "Quick start"), so that queries are shared.
    canonical: dict[str, str] = {}
    for heading, _ in sorted(spellings.items(), key=lambda item: (-item[1], item[0])):
        canonical.setdefault(heading.casefold(), heading)
    candidates: dict[str, tuple[int, str, DemoDocument, list[str]]] = {}  # by text
    for document in documents:
        ranked = sorted((-recurrence[h.casefold()], h.casefold()) for h in document.headings)
        num_shared = sum(count < -1 for count, _ in ranked[:_MAX_QUERIES])
        queries = [canonical[heading] for _, heading in ranked[:_MAX_QUERIES]]
        if queries:
            candidate = -num_shared, document.package, document, queries
            candidates.setdefault(document.text, candidate)
    best = sorted(candidates.values(), key=itemgetter(0, 1))[:_MAX_DOCUMENTS]
    return [(document, queries) for _, _, document, queries in best]


def demo_documents(max_chars: int = _MAX_DOCUMENT_CHARS) -> list[DemoDocument]:
    """Long descriptions of the installed distributions, sorted by name, without equal texts.

    The same environment always gives the same documents. This package's own description is left
    out, so that editing the README doesn't change the demo.
    """
    # setuptools adds its `_vendor` folder to sys.path when it is imported.
    folders = [folder for folder in sys.path if Path(folder).name != "_vendor"]
    descriptions: dict[str, str] = {}
    for distribution in metadata.distributions(path=folders):
        fields = distribution.metadata.json
        name, text = fields.get("name"), fields.get("description")
        if isinstance(name, str) and isinstance(text, str):  # else it is broken, or has none
            text = "\n".join(line.rstrip() for line in text.strip().splitlines())
            # The first on sys.path is in use.
            descriptions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), text)
    descriptions.pop("batchllm-operator", None)
    packages: dict[str, str] = {}  # the first with a text
    for package, text in sorted(descriptions.items()):
        if len(text) >= _MIN_DOCUMENT_CHARS:
            packages.setdefault(text, package)
    return [
        DemoDocument(package, clip(text, max_chars), headings_of(text))
        for text, package in packages.items()
    ]


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
