"""vLLM's scheduler and ours over workloads small enough to follow by hand, and the estimate."""

import dataclasses
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchllm_operator.amounts import counted
from batchllm_operator.cost import (
    MODEL_SHAPES,
    EngineLimits,
    Prediction,
    StepWork,
    find_gpu,
    predict,
    prompt_work,
    step_seconds,
)
from batchllm_operator.errors import EngineError, PlanError
from batchllm_operator.prefixes import TokenTable, sort_prompts
from batchllm_operator.simulate.machine import POLICIES, Machine, Policy
from batchllm_operator.simulate.run import Run
from batchllm_operator.simulate.summary import format_runs
from batchllm_operator.simulate.vllm_scheduling import simulate
from batchllm_operator.simulate.workload import Shape, Workload

MISTRAL, H100 = MODEL_SHAPES["Mistral-7B"], find_gpu("H100")
UNCACHED = [name for name, policy in POLICIES.items() if not policy.prefix_caching]


def machine(num_blocks: int, **changes: Any) -> Machine:
    return dataclasses.replace(Machine(MISTRAL, H100, num_blocks), **changes)


def workload(outputs: list[int], prefix: int, distinct: int, **changes: int) -> Workload:
    """One group of prompts that differ behind their prefix."""
    prompts = [[*range(prefix), *[1000 + idx] * distinct] for idx in range(len(outputs))]
    return Workload(
        "test",
        TokenTable.from_lists(prompts),
        np.zeros(len(outputs), dtype=np.int64),
        np.full(len(outputs), prefix),
        np.array(outputs),
        np.array(outputs),
        **changes,
    )


def steps(run: Run) -> tuple[list[int], list[int], list[int]]:
    """Decode, distinct and prefix tokens of each step."""
    line = run.timeline
    return (
        line.num_decode_tokens.tolist(),
        line.num_distinct_tokens.tolist(),
        line.num_prefix_tokens.tolist(),
    )


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("scipy.signal", "resample_poly"),
        ("cv2", "VideoCapture"),
        ("torch._inductor.lowering", "FALLBACK_ALLOW_LIST"),
    ],
)
def test_what_vllm_does_without_can_be_imported_afterwards(name: str, attribute: str) -> None:
    pytest.importorskip(name.partition(".")[0], reason="this environment has none")
    assert hasattr(import_module(name), attribute)


# By hand


@pytest.mark.parametrize("name", ["static", "continuous", "chunked_prefill"])
def test_requests_that_all_fit_are_prefilled_at_once(name: str) -> None:
    """Each prefill gives a token; then three, three and five less one are decoded."""
    run = simulate(workload([3, 3, 5], 32, 4), POLICIES[name], machine(100))
    assert steps(run) == ([0, 3, 3, 1, 1], [12, 0, 0, 0, 0], [96, 0, 0, 0, 0])
    assert run.timeline.num_used_blocks.tolist() == [9, 9, 9, 3, 3]
    assert run.timeline.num_running.tolist() == [3, 3, 3, 1, 1]
    assert (run.saving_ratio, run.preemptions, run.valley_steps) == (0, 0, 0)
    assert run.optimal_saving_ratio == pytest.approx(64 / 108)


@pytest.mark.parametrize("name", ["stock_shuffled", "stock_sorted", "batchllm"])
def test_a_cached_prefix_is_computed_once(name: str) -> None:
    run = simulate(workload([3, 3, 5], 32, 4), POLICIES[name], machine(100))
    assert steps(run) == ([0, 3, 3, 1, 1], [12, 0, 0, 0, 0], [32, 0, 0, 0, 0])
    assert run.timeline.num_used_blocks.tolist() == [5, 5, 5, 3, 3]
    assert run.saving_ratio == run.optimal_saving_ratio == pytest.approx(64 / 108)


def test_ours_gets_a_few_requests_before_each_step_as_in_a_run() -> None:
    found = workload([1] * 200, 0, 20)
    ours, stock = (
        simulate(found, POLICIES[name], machine(1000)) for name in ("batchllm", "stock_sorted")
    )
    assert ours.timeline.num_running.tolist() == [64, 96, 40]
    assert ours.timeline.num_waiting.tolist() == [136, 40, 0]
    assert stock.timeline.num_running.tolist() == [200]


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_cache_larger_than_all_requests_is_as_good_as_an_endless_one(name: str) -> None:
    work = workload([9] * 80, prefix=32, distinct=16)
    endless = simulate(work, POLICIES[name], machine(1 << 40))
    assert steps(endless) == steps(simulate(work, POLICIES[name], machine(20_000)))


def test_a_small_job_that_ours_takes_longer_for_says_why() -> None:
    work, engine = workload([2] * 200, prefix=0, distinct=8), machine(20_000)
    stock, ours = (simulate(work, POLICIES[name], engine) for name in ("stock_sorted", "batchllm"))
    assert ours.predicted_s > stock.predicted_s
    told = f"batchllm takes {counted(ours.steps - stock.steps, 'step')} more than stock_sorted"
    assert told in format_runs(work, engine, [stock, ours])
    assert "steps more" not in format_runs(work, engine, [stock])


def test_shared_attention_reads_a_prefix_once_for_its_group() -> None:
    """In the two steps in which three requests decode, two of them read 32 tokens less."""
    separate, shared = (
        simulate(workload([3, 3, 5], 40, 4), POLICIES[name], machine(100))
        for name in ("batchllm_stock_attention", "batchllm")
    )
    assert steps(separate) == steps(shared)
    saved_bytes = 2 * 2 * 32 * MISTRAL.kv_bytes_per_token
    assert separate.predicted_s - shared.predicted_s == pytest.approx(
        saved_bytes / H100.bytes_per_s
    )


def test_the_time_of_a_run_is_that_of_its_steps() -> None:
    run = simulate(workload([2], 0, 20), POLICIES["stock_sorted"], machine(100))
    prefill, decode = StepWork(20, 1, 210, 0, 0), StepWork(1, 1, 0, 21, 21)
    expected = [step_seconds(work, MISTRAL, H100) for work in (prefill, decode)]
    assert run.timeline.step_s.tolist() == pytest.approx(expected)


def test_a_static_batch_waits_for_its_longest_output() -> None:
    """Memory for two at a time; the second batch comes when the output of four has ended."""
    found = workload([2, 4, 1, 1], 0, 20)
    static = simulate(found, POLICIES["static"], machine(5))
    assert static.timeline.num_running.tolist() == [2, 2, 1, 1, 2]
    assert static.timeline.num_waiting.tolist() == [2, 2, 2, 2, 0]
    continuous = simulate(found, POLICIES["continuous"], machine(5))
    assert continuous.timeline.num_running.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("arrivals_per_s", [49.0, 100.0])
def test_a_slow_stream_is_served_as_it_comes(arrivals_per_s: float) -> None:
    """(1 / 49) * 49 is below 1 in floating point; the request is there all the same."""
    run = simulate(
        workload([1, 1, 1], 0, 20),
        POLICIES["dynamic"],
        machine(100),
        arrivals_per_s=arrivals_per_s,
    )
    assert run.timeline.num_running.tolist() == [1, 1, 1]
    assert run.timeline.idle_s[0] == 1 / arrivals_per_s
    assert run.predicted_s == pytest.approx(3 / arrivals_per_s + run.timeline.step_s[-1])


def test_a_fast_stream_is_batched_by_what_came_meanwhile() -> None:
    """A request each ms, and steps of just under 6 ms."""
    run = simulate(
        workload([1] * 10, 0, 20), POLICIES["dynamic"], machine(100), arrivals_per_s=1000.0
    )
    assert run.timeline.num_running.tolist() == [1, 5, 4]
    assert run.timeline.idle_s.tolist() == [0.001, 0, 0]


def test_prompts_are_cut_only_where_prefill_is_chunked() -> None:
    found = workload([1, 1], 0, 40)
    cut = simulate(found, POLICIES["chunked_prefill"], machine(100, max_num_batched_tokens=16))
    assert cut.timeline.num_tokens.tolist() == [16] * 5
    whole = simulate(found, POLICIES["continuous"], machine(100, max_num_batched_tokens=16))
    assert whole.timeline.num_tokens.tolist() == [40, 40]


def test_what_is_computed_again_after_a_preemption() -> None:
    """Two requests in four blocks, each of 31 tokens and 20 more. In step 2 one takes the third
    block that both need; the other, with 31 + 1 tokens computed, begins again when it ended."""
    run = simulate(workload([20, 20], 0, 31), POLICIES["stock_sorted"], machine(5))
    decode, distinct, _ = steps(run)
    assert decode == [0, 2, *[1] * 18, 0, *[1] * 17]
    assert distinct == [62, *[0] * 19, 33, *[0] * 17]
    assert run.preemptions == 1
    assert run.timeline.num_preempted[2] == 1
    assert run.recomputed_tokens == run.timeline.num_recomputed_tokens[20] == 32
    assert run.saving_ratio == pytest.approx(1 - 95 / 62)
    ours = simulate(workload([20, 20], 0, 31), POLICIES["batchllm"], machine(5))
    assert (ours.preemptions, ours.saving_ratio) == (0, 0)


def test_the_engines_own_limit_of_requests_holds() -> None:
    run = simulate(workload([2] * 5, 0, 4), POLICIES["stock_sorted"], machine(99, max_num_seqs=2))
    assert run.timeline.num_running.max() == 2


def test_a_limit_above_the_estimate_is_told() -> None:
    """An output that has its estimate ends there, though the scheduler can't be sure of it."""
    told = workload([3, 5], 0, 4, max_output_tokens=50)
    run = simulate(told, POLICIES["batchllm"], machine(100))
    assert run.timeline.num_decode_tokens.sum() == 2 + 4


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(PlanError, match=r"request 1 has 65 tokens .* has room for 64"):
        simulate(workload([1, 45], 0, 20), POLICIES["static"], machine(5))


def test_a_scheduler_that_stands_still_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    monkeypatch.setattr(KVCacheManager, "allocate_slots", lambda *args, **kwargs: None)
    with pytest.raises(EngineError, match="stock_sorted: requests wait"):
        simulate(workload([1], 0, 20), POLICIES["stock_sorted"], machine(5))


# Whatever the policy


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(POLICIES)), st.integers(0, 9), st.sampled_from([0.0, 0.5]))
def test_every_request_ends_and_every_token_is_counted(name: str, seed: int, error: float) -> None:
    shape = Shape("test", 40, 4, 60, 20, output_tokens=12, instruction_tokens=16, spread=0.5)
    found = shape.make(seed).with_estimate_error(error, seed)
    num_blocks = 40
    run = simulate(found, POLICIES[name], machine(num_blocks, max_num_batched_tokens=128))
    line = run.timeline
    assert line.num_used_blocks.max() < num_blocks
    assert line.num_tokens.min() >= 1
    if POLICIES[name].chunked_prefill:
        assert line.num_tokens.max() <= 128
    # The first token of each output comes from prefill, the others are decoded one by one, but
    # for those that come from a prefill after a preemption.
    assert 40 * 11 - run.preemptions <= line.num_decode_tokens.sum() <= 40 * 11
    once = int(line.num_tokens.sum()) - run.recomputed_tokens
    computed_alone = found.tokens.num_tokens + 40 * 11
    if name in UNCACHED:
        assert once == computed_alone
    else:
        saved = 1 - (once - 40 * 11) / found.tokens.num_tokens
        assert 0 <= saved <= run.optimal_saving_ratio


def test_sorted_and_planned_prompts_share_what_shuffled_ones_lose() -> None:
    found = Shape("test", 60, 6, 200, 20, output_tokens=10).make()
    runs = [
        simulate(found, POLICIES[name], machine(120))
        for name in ("stock_shuffled", "stock_sorted", "batchllm")
    ]
    savings = [run.saving_ratio for run in runs]
    assert savings[0] < savings[1] <= savings[2] == pytest.approx(runs[0].optimal_saving_ratio)


# The estimate


def estimate(found: Workload, policy: Policy, num_blocks: int) -> Prediction:
    """What `plan` would print of it."""
    ranked, lengths = sort_prompts(found.tokens), found.tokens.lengths
    idxs = ranked.prompt_idxs
    work = prompt_work(lengths[idxs], found.output_tokens[idxs], ranked.cached_tokens(lengths, 16))
    limits = EngineLimits(
        kv_cache_bytes=int(num_blocks * 16 * MISTRAL.kv_bytes_per_token),
        max_num_seqs=policy.max_num_seqs,
        spreads_prefill=policy.scheduler == "batchllm",
    )
    return predict(work.total(), MISTRAL, H100, limits)


FIFTH = 27_000 // 5  # of an H100's blocks, for a fifth of the paper's requests


STOCK, OURS = "stock_sorted", "batchllm_stock_attention"


def test_the_estimate_is_within_a_tenth_of_the_simulation() -> None:
    check_estimate(OURS, Shape("case 1", 600, 7, 1100, 400, 100, 30), FIFTH)


def check_estimate(name: str, shape: Shape, num_blocks: int) -> None:
    """Within a tenth, mostly below: the estimate preempts nothing and loses nothing cached."""
    found, policy = shape.make(), POLICIES[name]
    run = simulate(found, policy, machine(num_blocks))
    predicted = estimate(found, policy, num_blocks)
    assert predicted.gpu_s == pytest.approx(run.predicted_s, rel=0.1)
    assert predicted.num_steps == pytest.approx(run.steps, rel=0.15)
