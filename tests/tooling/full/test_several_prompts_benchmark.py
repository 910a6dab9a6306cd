"""The benchmark of several prompts as a command, on a few documents."""

from pathlib import Path

from support.benchmark_modules import run


def test_one_job_computes_what_prompts_share_once(tmp_path: Path) -> None:
    report = run(tmp_path, "several_prompts", "--documents", "6", "--tokens", "200")
    together, apart = report["one_job"], report["a_job_for_each_prompt"]
    assert together.keys() == {"batchllm", "stock_sorted", "stock_shuffled"}
    for policy, jobs in apart.items():
        found = together[policy]
        assert found["num_prompt_tokens"] == jobs["num_prompt_tokens"]
        assert found["num_computed_tokens"] < jobs["num_computed_tokens"] / 2
        assert 0 < found["predicted_s"] < jobs["predicted_s"]
