"""The benchmark of shards as a command, on a few prompts."""

from pathlib import Path

from support.benchmark_modules import run


def test_shards_keep_the_sharing_and_vllm_finds_it(tmp_path: Path) -> None:
    report = run(tmp_path, "shards", "--num-prompts", "1000")
    rows = [row for row in report["rows"] if row["shape"] == "sites"]
    assert [row["num_shards"] for row in rows] == [1, 4, 16, 64]
    for row in rows:
        assert row["cached_saving"] == row["planned_saving"]
    assert rows[1]["extra_prefill"] < 0.01
