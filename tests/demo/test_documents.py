import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from batchllm_operator.demo import documents
from batchllm_operator.demo.documents import clip, demo_documents, headings_of


def test_markdown_headings_are_plain_text_without_code_and_versions() -> None:
    text = """\
# My *tool* ![badge](http://x/y.svg)

## Installation ##

run it:
```
# not a heading
```

## 1.2.3
## [Usage](http://x)
Quick start
-----------
## usage
"""
    assert headings_of(text) == ("My *tool", "Installation", "Usage", "Quick start")


def test_rst_headings_are_underlined_lines() -> None:
    text = """\
=====
Tool
=====

Getting `started <http://x>`_
=============================

Usage
~~~~~

  Example
  -------

License
'''''''
"""
    assert headings_of(text) == ("Tool", "Getting started", "Usage", "License")


def test_clip_ends_at_a_line_break() -> None:
    assert clip("one\ntwo\nthree", 9) == "one\ntwo"
    assert clip("one\ntwo", 7) == "one\ntwo"
    assert clip("a" * 10, 4) == "aaaa"


def test_documents_are_sorted_clipped_and_without_this_package() -> None:
    documents = demo_documents(max_chars=1_000)
    packages = [document.package for document in documents]
    assert packages == sorted(set(packages))
    assert "batchllm-operator" not in packages
    assert all(0 < len(document.text) <= 1_000 for document in documents)
    assert len(documents) >= 50


def test_documents_are_the_same_where_setuptools_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What setuptools carries is on sys.path from then on, and isn't the environment's."""
    setuptools = find_spec("setuptools")
    assert setuptools is not None and setuptools.origin is not None
    carried = str(Path(setuptools.origin).with_name("_vendor"))
    assert Path(carried).is_dir()
    found = []
    for paths in ([path for path in sys.path if path != carried], [carried, *sys.path]):
        monkeypatch.setattr(sys, "path", paths)
        documents._descriptions.cache_clear()
        found.append(demo_documents())
    assert found[0] == found[1]
