"""The benchmark of runahead: a small run."""

from pathlib import Path

import pytest
from support.benchmark_modules import load, run

main = load("runahead.__main__")


def test_a_small_run_gives_equal_tokens_whoever_computes_the_prefix(tmp_path: Path) -> None:
    if len(main.os.sched_getaffinity(0)) < 2:
        pytest.skip("two replicas need two cores")
    sizes = ("--groups", "1", "3", "--prefix-tokens", "256", "--members", "2")
    report = run(tmp_path, "runahead", *sizes, "--repetitions", "1")
    policies = {(each["groups"], each["policy"]) for each in report["rows"]}
    assert policies >= {(groups, policy) for groups in (1, 3) for policy in main.POLICIES}
    for each in report["rows"]:
        assert each["tokens_equal"], each
        assert each["failures"] == []
        assert 0 < each["ttft_s"] < each["makespan_s"]
    assert report["num_distinct_outputs"] > report["num_outputs"] // 2, "else equal says nothing"
    assert sum(report["split"]) == 256
    assert set(report["choices"]) == {"1", "3"}
