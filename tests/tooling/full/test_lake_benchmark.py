"""The benchmark of large tables, over small ones: its figures are there."""

from pathlib import Path

from support.benchmark_modules import run


def test_it_runs_and_its_last_line_is_json(tmp_path: Path) -> None:
    args = ["--rows", "300,20", "--formats", "delta", "--repetitions", "2"]
    found = run(tmp_path, "lake", *args, "--root", str(tmp_path))
    assert [row["num_rows"] for row in found["rows"]] == [20, 300]
    for row in found["rows"]:
        assert set(row["peak_bytes"]) == {"plan", "run", "commit"}
        assert min(row["peak_bytes"].values()) > 10 << 20
        assert len(row["commit_s"]) == len(row["write_s"]["zstd"]) == 2
    assert set(found["growth"]["delta"]) == {"plan", "run", "commit"}
    assert found["commit_ratio"]["delta"] == found["rows"][-1]["commit_ratio"] > 0
    assert list(tmp_path.iterdir()) == []
