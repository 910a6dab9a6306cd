"""docs/howto/embeddings.md: its script, run as the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

from demo_table import build_demo_table
from support.demo_job import DS

ROOT = Path(__file__).resolve().parents[3]


def test_the_nearest_neighbours_are_of_the_same_subject(minilm: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "embeddings.md").read_text(encoding="utf-8")
    (tmp_path / ".models").symlink_to(minilm.parent)
    build_demo_table(tmp_path / ".demo" / "lake" / "documents", ds=DS)
    tried = page.partition("## Try it")[2]
    [script] = re.findall(r"^```python\n(.*?)^```$", tried, re.M | re.S)
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    nearest = dict(re.findall(r"^(\S+): (\S+) 0\.\d\d, ", ended.stdout, re.MULTILINE))
    assert len(nearest) == 30
    pairs = {"websockets": "aiohttp", "aiosignal": "aiohttp", "libcst": "astor"}
    assert {name: nearest[name] for name in pairs} == pairs
