"""What README.md and docs/reference/python.md show is what happens."""

import doctest
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fake_job import DS, document_rows, job_fields, write_table
from support.pages import blocks

README = Path(__file__).parents[2] / "README.md"
PYTHON = README.parent / "docs" / "reference" / "python.md"


def test_the_interactive_example_prints_what_it_says() -> None:
    [example] = [block for block in blocks(PYTHON, "python") if block.startswith(">>>")]
    test = doctest.DocTestParser().get_doctest(example, {}, "python.md", str(PYTHON), 0)
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert (runner.tries, runner.failures) == (2, 0)


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "documents", document_rows())
    spec = yaml.safe_dump(job_fields("."))
    (tmp_path / "product_snippets.yaml").write_text(spec, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    [example] = [block for block in blocks(PYTHON, "python") if "commit_run" in block]
    names: dict[str, Any] = {}
    exec(compile(example.replace("2026-01-31", DS), str(PYTHON), "exec"), names)
    assert names["report"].num_rows_out == 30


def test_no_instruction_takes_it_for_granted_that_an_index_has_the_package() -> None:
    by_name = re.compile(r"""(pip3?|uv|pipx|poetry) (install|add) ["']?batchllm[-_]operator(?!-)""")
    kinds = ("*.md", "*.py", "*.sh", "*.yaml", "*.toml", "*Dockerfile", "*.txt")
    command = ["git", "ls-files", "-z", *kinds]
    listed = subprocess.run(command, cwd=README.parent, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    for path in map(README.parent.joinpath, listed.stdout.rstrip("\0").split("\0")):
        found = by_name.search(path.read_text(encoding="utf-8")) if path.is_file() else None
        assert found is None, f"{path}: {found}"
