"""The benchmark of faults: a trial runs through, its last line is JSON."""

from __future__ import annotations

from pathlib import Path

from support.benchmark_modules import run


def test_a_trial_runs_and_its_last_line_is_json(tmp_path: Path) -> None:
    root = str(tmp_path / "lakes")
    found = run(tmp_path, "faults", "--trials", "1", "--formats", "parquet", "--root", root)
    wrong = ("lost_rows", "duplicate_rows", "half_commits", "wrong_rows", "stuck")
    assert found["trials"] == found["by_format"]["parquet"]["trials"] == 1
    assert [found[name] for name in wrong] == [0] * len(wrong)
