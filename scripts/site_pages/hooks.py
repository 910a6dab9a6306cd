"""Hooks of mkdocs: fills in what is generated, and follows links that lead out of docs/.

A page's line `<!-- generated: NAME -->` becomes what `reference.GENERATED` makes of NAME. A linked
file outside docs/ is a page of the site too, in its folder `repo/`: Markdown as it is, other files
as a block of code.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # mkdocs loads this file by its path
from site_pages import reference

ROOT: Final = Path(__file__).resolve().parents[2]
REPO: Final = "repo/"
"""The site's folder of what lies outside docs/."""
_LINK: Final = re.compile(r"\[([^\[\]]*)\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)")
_GENERATED: Final = re.compile(r"^<!-- generated: ([a-z]+) -->$", re.MULTILINE)
_LOADED: Final = re.compile(
    r"""<(?:script|img|iframe|link(?![^>]*rel=.?canonical))\b[^>]*(?:src|href)=["']?https?:"""
)
_LANGUAGES: Final = {"py": "python", "sh": "bash", "yml": "yaml"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ that a page links to, and those that they link to."""
    from mkdocs.structure.files import File

    todo = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    todo += re.findall(rf"{REPO}(\S+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    seen = set(todo)
    while todo:
        path = todo.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, uri_of(path), content=_content(path)))
        if path.endswith(".md"):
            found = {target for target in _targets(path) if not target.startswith("docs/")} - seen
            seen |= found
            todo += sorted(found)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its generated parts, and with links that lead where its targets are here."""
    path = _path_of(page.file.src_uri)
    if page.file.src_uri.startswith(("adr/", REPO)):
        page.meta.setdefault("search", {"boost": 0.3})  # below what a user looks for
    if not path.endswith(".md"):  # a block of code
        return markdown
    markdown = _GENERATED.sub(lambda match: reference.GENERATED[match[1]](), markdown)

    def here(match: re.Match[str]) -> str:
        text, link, anchor = match.groups(default="")
        target = _target(path, link)
        if target is None:  # the site has no page of a folder, and mkdocs reports other links
            return text if (ROOT / path).parent.joinpath(link).is_dir() else match[0]
        uri = os.path.relpath(uri_of(target), Path(page.file.src_uri).parent)
        return f"[{text}]({uri}{anchor})"

    return _LINK.sub(here, markdown)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """The page's HTML, in which the theme's search has a name for those who hear it."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def on_post_build(*, config: MkDocsConfig) -> None:
    """Refuse a site that loads anything from elsewhere.

    Raises:
        PluginError: a page does.
    """
    from mkdocs.exceptions import PluginError

    for page in Path(config.site_dir).rglob("*.html"):
        if found := _LOADED.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page} loads something from elsewhere: {found[0]}")


def uri_of(path: str) -> str:
    """Where a file of the repository is in the site's sources."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{REPO}{path}" if path.endswith(".md") else f"{REPO}{path}.md"


def _path_of(uri: str) -> str:
    """The file of the repository that a page shows."""
    if not uri.startswith(REPO):
        return f"docs/{uri}"
    path = uri.removeprefix(REPO)
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def _target(path: str, link: str) -> str | None:
    """The file that a link of the file `path` leads to; of a folder its README, or None."""
    target = os.path.normpath(Path(path).parent / link)
    if (ROOT / target).is_dir():
        target = f"{target}/README.md"
    return target if (ROOT / target).is_file() else None


def _targets(path: str) -> Iterator[str]:
    for _, link, _ in _LINK.findall((ROOT / path).read_text(encoding="utf-8")):
        if target := _target(path, link):
            yield target


def _content(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    ending = path.rpartition(".")[2]
    language = _LANGUAGES.get(ending, ending)
    front = "---\nsearch: {exclude: true}\n---\n"
    return f"{front}# `{path}`\n\n````{language}\n{text}\n````\n"
