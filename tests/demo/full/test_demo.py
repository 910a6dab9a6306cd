"""`make demo` as a whole, with the model that needs no package."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run_demo(checkout: Path, model: str = "tiny") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(checkout / "scripts" / "demo.sh")],
        env={**os.environ, "BATCHLLM_VENV": sys.prefix, "MODEL": model},
        capture_output=True,
        text=True,
    )


def test_it_ends_with_rows_the_saving_against_stock_and_the_report(tmp_path: Path) -> None:
    for name in ("dags", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    begun = run_demo(tmp_path)
    assert begun.returncode == 0, begun.stderr
    rows, _, saving = begun.stdout.partition("measuring stock vLLM")
    scores = [float(score) for score in re.findall(r"^  score +(\d\.\d\d)$", rows, re.MULTILINE)]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert [rows.count(f"\n  {name}  ") for name in ("document", "answer ")] == [3, 3]
    computed = re.search(r"prompt tokens computed +([\d,]+) -> ([\d,]+)\n", saving)
    assert computed is not None
    stock, ours = (int(number.replace(",", "")) for number in computed.groups())
    assert 0 < ours <= stock, "the cache holds all documents' keys and values of so small a model"
    assert re.search(r"equal texts +(\d\d) of \1\n", saving), "40 % of 150 rows, or a step more"
    report = Path(saving.splitlines()[-1].removeprefix("report").strip())
    assert report.is_relative_to(tmp_path) and "daily_snippets" in report.read_text()

    again = run_demo(tmp_path)
    assert again.returncode == 0
    assert ["starting vLLM" in run.stderr for run in (begun, again)] == [True, False]
    assert again.stdout.partition("\ntesting code: ")[2].partition("measuring")[0] in rows


def test_a_model_that_is_not_there_ends_it_with_one_line(tmp_path: Path) -> None:
    for name in ("dags", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    ended = run_demo(tmp_path, "./no-such-model")
    assert ended.returncode != 0
    assert "no-such-model" in ended.stderr.splitlines()[-1]
