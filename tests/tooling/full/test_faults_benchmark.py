"""The benchmark of faults: trials run through, its last line is JSON."""

from pathlib import Path

from support.benchmark_modules import run

WRONG = ("lost_rows", "duplicate_rows", "half_commits", "wrong_rows", "stuck", "overpaid_rows")


def test_workers_come_and_go_and_nothing_is_lost_or_paid_twice(tmp_path: Path) -> None:
    args = ("--workers", "--trials", "6", "--formats", "parquet", "--processes", "1")
    found = run(tmp_path, "faults", *args, "--root", str(tmp_path / "lakes"))
    assert found["trials"] == 6
    assert found["kills"] > 0 and found["faults"] > 0
    kinds = found["trials_by_kind"]
    assert {"workers_kill", "workers_zombie", "workers_twins"} < kinds.keys()
    assert [found[name] for name in WRONG] == [0] * len(WRONG)
