"""The benchmark of shards as a command, on a few prompts."""

from __future__ import annotations

from pathlib import Path

from support.benchmark_modules import run


def test_shards_keep_the_sharing_and_vllm_finds_it(tmp_path: Path) -> None:
    report = run(tmp_path, "shards", "--num-prompts", "1000", "--shapes", "sites")
    assert [row["num_shards"] for row in report["rows"]] == [1, 4, 16, 64]
    for row in report["rows"]:
        assert row["cached_saving"] == row["planned_saving"]
    assert report["rows"][1]["extra_prefill"] < 0.01
