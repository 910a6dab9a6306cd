"""The demo's lake table: passages of real documentation, each with the same queries.

    python scripts/demo_table.py DIR DS    write partition DS of the table

Every machine has such text: the long descriptions of installed Python distributions.
"""

import hashlib
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

QUERIES: Final = (
    "async programming",
    "HTTP and the web",
    "command line tools",
    "parsing and validating data",
    "testing code",
)
"""Each is asked of each document."""
_MAX_DOCUMENTS: Final = 30
_MIN_PASSAGE_CHARS: Final = 500
_MAX_PASSAGE_CHARS: Final = 1_200
_MIN_DOCUMENT_CHARS: Final = 400
_MAX_DOCUMENT_CHARS: Final = 2_500
_IMAGE: Final = r"!\[[^\]]*\](?:\([^)]*\)|\[[^\]]*\])"
_MARKUP: Final = (
    (re.compile(r"<!--.*?-->|^```.*?^``` *$", re.DOTALL | re.MULTILINE), ""),  # and code
    # Comments, images and the like of reStructuredText, with the lines that belong to them.
    (re.compile(r"^\.\.(?: .*)?(?:\n[ \t]+\S.*)*$", re.MULTILINE), ""),
    (re.compile(rf"\[{_IMAGE}\](?:\([^)]*\)|\[[^\]]*\])|{_IMAGE}"), ""),  # badges
    (re.compile(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])"), r"\1"),  # links
    (re.compile(r"`([^`<]+?)\s*<[^>]*>`_*"), r"\1"),  # links of reStructuredText
    (re.compile(r"<[^>]*>|\{[#:.][^}]*\}"), ""),  # tags
    (re.compile(r"^\[[^\]]+\]: .*$", re.MULTILINE), ""),  # where links lead
    # |badges|, tables, and lines of links
    (re.compile(r"^[\s|*-]*(?:\|[^|\n]+\|_*\s*)+$|^.* \| .*$", re.MULTILINE), ""),
    (re.compile(r"""^(?P<mark>[=\-~^"'*+#.:|])(?P=mark){2,}$""", re.MULTILINE), ""),  # underlines
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
    (re.compile(r"\n{3,}"), "\n\n"),
    # Small models end their lines where the text does.
    (re.compile(r"^(?!#)(.*\S)\n(?!\d+\. )(?=[\w(`'\"]|\*\S)", re.MULTILINE), r"\1 "),
)
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


def build_demo_table(folder: Path, *, ds: str) -> str:
    """Write partition `ds` of the demo table: `<folder>/ds=<ds>/part-0.parquet`; returns a summary.

    Documents are the beginnings of installed distributions' descriptions, as plain text. Each
    document is asked each of `QUERIES`, so that rows share documents as well as queries. Rows are
    in a fixed order that isn't grouped by document. One environment always gives the same bytes; an
    older file is replaced in one step.
    """
    passages = _passages()
    rows = [
        {
            "snippet_id": f"{package}:{idx}",
            "package": package,
            "document": passage,
            "query": query,
        }
        for package, passage in passages.items()
        for idx, query in enumerate(QUERIES)
    ]
    rows.sort(key=lambda row: _digest(row["snippet_id"]))  # regardless of the row's document
    partition_path = folder / f"ds={ds}"
    partition_path.mkdir(parents=True, exist_ok=True)
    unfinished = partition_path / f".part-0.parquet.{os.getpid()}"
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=DEMO_SCHEMA), unfinished)
        unfinished.replace(partition_path / "part-0.parquet")
    finally:
        unfinished.unlink(missing_ok=True)
    return f"{len(rows)} rows ({len(passages)} documents, {len(QUERIES)} queries)"


def _passages() -> dict[str, str]:
    """The beginnings of some descriptions, long enough to ask about, by package."""
    packages: dict[str, str] = {}  # the first with a text
    for document in demo_documents(max_chars=sys.maxsize):
        passage = clip(plain_text(document.text), _MAX_PASSAGE_CHARS)
        if len(passage) >= _MIN_PASSAGE_CHARS:
            packages.setdefault(passage, document.package)
    # A choice that changes little when other distributions are installed, too.
    chosen = sorted(packages.items(), key=lambda item: _digest(item[1]))[:_MAX_DOCUMENTS]
    return {package: passage for passage, package in chosen}


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


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
    return [DemoDocument(package, clip(text, max_chars)) for text, package in packages.items()]


def plain_text(text: str) -> str:
    """A Markdown or reStructuredText document without badges, code, links and underlines.

    A paragraph is a line.
    """
    for pattern, kept in _MARKUP:
        text = pattern.sub(kept, text)
    return text.strip()


def clip(text: str, max_chars: int) -> str:
    """`text` cut to at most `max_chars` characters, at the last line break if there is one."""
    if len(text) <= max_chars:
        return text
    head = text[:max_chars]
    at_line = head.rfind("\n")
    return head[:at_line].rstrip() if at_line > 0 else head


if __name__ == "__main__":
    table, partition = sys.argv[1:]
    print(f"demo table: {build_demo_table(Path(table), ds=partition)} in {table}/ds={partition}")
