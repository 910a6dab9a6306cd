"""docs/howto/embeddings.md: its files and commands, run as the page says."""

import re
import subprocess
from pathlib import Path

from demo_table import build_demo_table
from support.demo_job import DS

ROOT = Path(__file__).resolve().parents[3]


def test_the_nearest_neighbours_are_of_the_same_subject(minilm: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "embeddings.md").read_text(encoding="utf-8")
    for name in (".venv", "scripts", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".models").symlink_to(minilm.parent)
    build_demo_table(tmp_path / ".demo" / "lake" / "documents", ds=DS)
    tried = page.partition("## Try it")[2]
    for name, language in {"passages.yaml": "yaml", "neighbours.py": "python"}.items():
        [content] = re.findall(rf"^```{language}\n(.*?)^```$", tried, re.M | re.S)
        (tmp_path / name).write_text(content, encoding="utf-8")
    [commands] = re.findall(r"^```bash\n(.*?)^```$", tried, re.M | re.S)
    ended = subprocess.run(["bash", "-euc", commands], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    nearest = dict(re.findall(r"^(\S+): (\S+) 0\.\d\d, ", ended.stdout, re.MULTILINE))
    assert len(nearest) == 30
    pairs = {"websockets": "aiohttp", "aiosignal": "aiohttp", "libcst": "astor"}
    assert {name: nearest[name] for name in pairs} == pairs
