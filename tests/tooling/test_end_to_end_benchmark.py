"""The end-to-end benchmark: what it counts and compares."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.benchmark_modules import ROOT, load
from support.demo_job import wait_until

agreement = load("end_to_end.agreement")
engine_run = load("end_to_end.engine_run")
main = load("end_to_end.__main__")
step_log = load("end_to_end.step_log")
targets = load("end_to_end.targets")


def steps(tokens: list[int], running: list[int], waiting: list[int]) -> Any:
    """A second between steps, each of which ends while the next one already runs."""
    begin_s, nothing = np.arange(len(tokens)), np.zeros(len(tokens))
    counts = map(np.array, (tokens, running, waiting))
    return step_log.Steps(begin_s, begin_s + 1.5, *counts, nothing, nothing, end_s=len(tokens))


def test_the_cool_down_begins_when_only_decodes_are_left() -> None:
    # Two prompts of 8 and 5 tokens, 3 output tokens each; the second one waits for a step.
    run = steps([8, 6, 2, 1], [1, 2, 2, 1], [1, 0, 0, 0])
    assert run.tecd_s == 2.5
    assert run.num_prefill_tokens(num_requests=2, num_output_tokens=6) == 13
    assert steps([8, 3, 2, 9], [1, 2, 2, 2], [0, 0, 0, 0]).tecd_s == 4.5  # prefill to the end
    assert steps([2, 2], [2, 2], [0, 0]).tecd_s == 0.0


class Scheduler:
    """Gives steps of one request with so many tokens, and nothing for 0."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = iter(tokens)
        self.waiting = ["a"]
        self.kv_cache_manager = SimpleNamespace(usage=0.5)

    def schedule(self, *args: object) -> Any:
        tokens = next(self.tokens)
        return SimpleNamespace(
            num_scheduled_tokens={"0": tokens} if tokens else {},
            total_num_scheduled_tokens=tokens,
            preempted_req_ids={"1", "2"} if tokens == 5 else None,
        )

    def update_from_output(self, scheduled: Any, model_output: object) -> str:
        return "updated"


def test_a_step_is_done_when_its_tokens_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous scheduling puts the next step together while one runs."""
    clock = iter(range(100))
    monkeypatch.setattr(step_log.time, "perf_counter", lambda: float(next(clock)))
    scheduler = Scheduler([8, 6, 1])
    log = step_log.StepLog(scheduler)
    log.start()  # 0
    first = scheduler.schedule()  # 1
    second = scheduler.schedule()  # 2
    scheduler.update_from_output(first, None)  # 3
    third = scheduler.schedule()  # 4
    scheduler.update_from_output(second, None)  # 5
    scheduler.waiting.clear()
    scheduler.update_from_output(third, None)  # 6
    found = log.stop()  # 7
    assert found.begin_s.tolist() == [1, 2, 4]
    assert found.done_s.tolist() == [3, 5, 6]
    assert found.end_s == 7


def row(workload: str, policy: str, speed: float, **changes: Any) -> dict[str, Any]:
    """A measured run of 1,000 requests."""
    return {
        **dict.fromkeys((*targets._SAME, *targets._MEDIANS), 1),
        "workload": workload,
        "policy": policy,
        "settings": "default",
        "num_requests": 1000,
        "requests_per_s": speed,
        "total_s": 1000 / speed,
        "tecd_s": 900 / speed,
        "plan_s": 0.05 if policy.startswith("batchllm") else 0.0,
        "attention": ["FlashAttentionBackend 3"],
        "cuda_graphs": "FULL_AND_PIECEWISE",
        **changes,
    }


OTHER = "chunk_4096_seqs_512"


def by_measure(summaries: Any, policy: str) -> dict[str, dict[str, Any]]:
    judged = targets.targets(summaries)
    return {target["measure"]: target for target in judged if target["policy"] == policy}


def test_medians_and_the_better_settings_count() -> None:
    summaries = targets.summarize(
        [
            *(row("case_1", "stock_sorted", speed) for speed in (10.0, 12.0, 11.0)),
            row("case_1", "stock_sorted", 14.0, settings=OTHER, tecd_s=99.0),
            row("case_1", "stock_as_given", 7.0),
            row("case_1", "stock_as_given", 6.0, settings=OTHER),
            row("case_1", "batchllm", 16.1),
            row("case_1", "batchllm_stock_attention", 15.0),
        ]
    )
    [default] = [summary for summary in summaries if summary.repetitions == 3]
    assert (default.requests_per_s, default.least_requests_per_s) == (11.0, 10.0)
    assert targets.best(summaries, "case_1", ("stock_sorted",)).settings == OTHER
    ratios = targets.speedups(summaries)["case_1"]
    assert ratios["batchllm_vs_sorted"] == 1.15
    assert ratios["batchllm_vs_as_given"] == 2.3
    assert ratios["batchllm_stock_attention_vs_sorted"] == 1.071
    assert ratios["batchllm_vs_sorted_tecd"] == round(16.1 / 11, 3)  # the other setting's is longer
    ours = by_measure(summaries, "batchllm")
    assert ours["case_1: requests/s over stock sorted"]["is_met"] is True
    assert ours["case_1: requests/s over stock as_given"]["is_met"] is True
    assert ours["case_2: requests/s over stock sorted"]["is_met"] is None
    assert ours["planning, share of the whole"]["is_met"] is True
    plain = by_measure(summaries, "batchllm_stock_attention")
    assert plain["case_1: requests/s over stock sorted"]["is_met"] is False


def test_what_was_measured_is_judged_and_missing_baselines_are_named() -> None:
    rows = [row("no_sharing", "stock_sorted", 10.0), row("no_sharing", "batchllm", 20.0)]
    measure = "no_sharing: requests/s over stock sorted"
    target = by_measure(targets.summarize(rows), "batchllm")[measure]
    assert (target["measured"], target["is_met"]) == (2.0, True)
    assert target["baselines_missing"] == [f"stock_sorted {OTHER}"]
    for alone in rows:  # nothing to compare is no pass
        target = by_measure(targets.summarize([alone]), "batchllm")[measure]
        assert (target["measured"], target["is_met"]) == (None, None)


def test_runs_of_different_work_are_not_put_together() -> None:
    for name, value in (("num_requests", 999), ("attention", ["TritonAttentionBackend"])):
        rows = [row("case_1", "batchllm", 9.0), row("case_1", "batchllm", 9.0, **{name: value})]
        with pytest.raises(ValueError, match=f"differ in {name}"):
            targets.summarize(rows)


def outputs(tokens: list[list[int]], logprobs: list[float]) -> Any:
    """Every token's likeliest are 0, 1, 2 with these log-probabilities."""
    array = np.array(tokens, dtype=np.int64)
    likely = np.broadcast_to(np.arange(3), (*array.shape, 3))
    return agreement.Outputs(array, likely, np.broadcast_to(np.array(logprobs), likely.shape))


def test_agreement_ends_at_the_first_difference() -> None:
    reference = outputs([[0, 0, 0, 0]] * 4, [-0.5, -0.75, -3.0])
    other = outputs([[0, 0, 0, 0], [0, 1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 7]], [-0.5, -0.75, -3.0])
    found = agreement.compare(reference, other)
    assert found["equal_outputs"] == 0.25
    assert found["equal_first_tokens"] == 0.75
    assert found["tokens_before_difference"] == (4 + 1 + 0 + 3) / 16
    assert found["median_margin"] == 2.5
    assert found["largest_margin"] == 2.5
    assert found["num_beyond"] == 1
    assert agreement.typical_margin(reference) == 0.25
    same = agreement.compare(reference, reference)
    assert (same["equal_outputs"], same["largest_margin"]) == (1.0, None)
    with pytest.raises(ValueError, match="outputs of"):
        agreement.compare(reference, outputs([[0, 0]], [-0.5, -0.75, -3.0]))


def test_differences_that_are_no_near_ties_are_not_plausible() -> None:
    control = {"largest_margin": 0.1, "num_beyond": 0}
    for margin, beyond, expected in (
        (None, 0, True),
        (0.2, 0, True),
        (0.21, 0, False),
        (0.1, 1, False),
    ):
        ours = {"largest_margin": margin, "num_beyond": beyond}
        assert agreement.is_plausible(ours, control, typical=0.05) is expected
    nothing = {"largest_margin": None, "num_beyond": 0}
    assert agreement.is_plausible({"largest_margin": 0.04, "num_beyond": 0}, nothing, typical=0.05)


def is_gone(pid: str) -> bool:
    try:
        status = Path("/proc", pid.strip(), "stat").read_text()
        return status.rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_an_engine_that_hangs_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "_KILL_AFTER_S", 0.0)
    monkeypatch.setattr(main, "_SETTLE_S", 0.0)
    runs = [("case_1", 0)]
    task = main.Task("stock_sorted", "default", runs, str(tmp_path / "rows"), budget_s=5.0)
    monkeypatch.setattr(main.sys, "executable", str(tmp_path / "hang"))
    (tmp_path / "hang").write_text(f"#!/bin/sh\nsleep 60 &\necho $! >{tmp_path}/pid\nwait\n")
    (tmp_path / "hang").chmod(0o755)
    assert main.run_engine(task, tmp_path).startswith("killed after 5 s")
    pid = (tmp_path / "pid").read_text()
    # It would sleep for a minute.
    wait_until(lambda: is_gone(pid), "what it started is gone", limit_s=30.0)


RUN_LOGGED = """
import sys
from pathlib import Path
from benchmarks.end_to_end.processes import end_on_sigterm, run_logged
end_on_sigterm()
run_logged(["sh", "-c", "sleep 60 & echo $! >pid.new; mv pid.new pid; wait"], Path("log"), {}, None)
"""


def test_an_engine_ends_with_the_benchmark_that_started_it(tmp_path: Path) -> None:
    """A step of `on_gpu.sh` that ran past its limit must leave the next one the whole GPU."""
    benchmark = subprocess.Popen(
        [sys.executable, "-c", RUN_LOGGED], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    wait_until((tmp_path / "pid").exists, "the engine has started", limit_s=60.0)
    benchmark.send_signal(signal.SIGTERM)
    assert benchmark.wait(30) == 128 + signal.SIGTERM
    wait_until(lambda: is_gone((tmp_path / "pid").read_text()), "it is gone", limit_s=30.0)


def test_processes_of_a_benchmark_find_it_from_a_checkout(tmp_path: Path) -> None:
    command = "import sys; from benchmarks.end_to_end.processes import *; sys.exit(run_logged("
    command += "[sys.executable, '-P', '-c', 'import benchmarks'], Path(sys.argv[1]), {}, None))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    call = [sys.executable, "-c", command, str(tmp_path / "log")]
    subprocess.run(call, cwd=ROOT, env=environment, check=True)


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({}, None),
        ({"cuda_graphs": "CUDAGraphMode.NONE"}, "no CUDA graphs"),
        ({"async_scheduling": False}, "no asynchronous scheduling"),
        ({"attention": ["FlashAttentionBackend 2"]}, "not FlashAttention 3"),
        ({"attention": ["PrefixAttentionBackend"]}, None),
    ],
)
def test_a_baseline_that_is_not_the_best_is_doubted(changes: Any, doubt: str | None) -> None:
    facts = row("case_1", "stock_sorted", 1.0, **changes)
    found = engine_run.baseline_doubts(facts, True)
    assert len(found) == (doubt is not None)
    assert doubt is None or doubt in found[0]
    assert engine_run.baseline_doubts(facts, False) == []
