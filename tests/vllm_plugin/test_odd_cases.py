"""What users of vLLM may do beside the usual: limits, layers, sessions, drafts, grammars, hints."""

from types import MethodType
from typing import Any

import pytest
import torch
from support.engine_steps import STOP, EngineSteps, hash_of
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints, SchedulerSettings

NO_PACE = SchedulerSettings(pace=False)
WHOLE = {"chunked_prefill": False}


def steps(limit: int, **settings: Any) -> EngineSteps:
    """An engine after at most `limit` steps of a job."""
    job = {"num": 100, "distinct": 10, "output": 400, **settings.pop("job", {})}
    engine = EngineSteps(**settings)
    engine.add_alone(job["num"], distinct=job["distinct"], output=job["output"])
    while engine.scheduler.has_requests() and engine.num_steps < limit:
        engine.step()
    return engine


def test_a_pace_below_a_token_a_step_admits_at_all() -> None:
    """Short prompts, long outputs: 2 * rate < 1, so int() is 0 for ever, and one runs at a time."""
    engine = steps(
        3000,
        num_blocks=260,
        chunk=512,
        settings=SchedulerSettings(num_requests=600),
        job={"num": 600},
    )
    assert len(engine.finished) > 50  # 7, where all 600 take 24,026 steps without pace


def test_a_prompt_with_nothing_to_mix_it_with_is_not_spread() -> None:
    job = {"num": 40, "distinct": 1500, "output": 100}
    paced, plain = (
        steps(
            9000,
            num_blocks=110,
            chunk=2048,
            settings=SchedulerSettings(pace=pace, num_requests=40),
            job=job,
        ).num_steps
        for pace in (True, False)
    )
    assert paced <= 1.05 * plain  # 6983 against 4001


def test_without_chunked_prefill_all_comes_to_its_end() -> None:
    engine = EngineSteps(num_blocks=300, chunk=512, changes=WHOLE)
    for idx in range(40):
        engine.add_group(idx, 2, prefix=320, distinct=40, output=60)
    engine.run(5000)  # schedules nothing, for ever


def test_a_chunk_size_below_a_prompt_without_chunked_prefill() -> None:
    settings = SchedulerSettings(pace=False, chunk_size=64)
    engine = EngineSteps(num_blocks=300, chunk=512, settings=settings, changes=WHOLE)
    engine.add_group(0, 2, prefix=0, distinct=100, output=5)
    engine.run(500)


def test_a_limit_is_not_an_estimate() -> None:
    """The default of the spec: no estimate, `max_tokens` as a safe limit, short outputs."""

    def num_steps(policy: str) -> int:
        engine = EngineSteps(
            num_blocks=1000,
            chunk=2048,
            policy=policy,
            settings=SchedulerSettings(num_requests=1000),
        )
        for idx in range(1000):
            prompt = [500_000 + hash_of(f"{idx}.0", position) for position in range(100)]
            engine.add(f"{idx}.0", prompt, 20, hints=RequestHints(idx), max_tokens=3900)
        while engine.scheduler.has_requests() and engine.num_steps < 9000:
            engine.step()
        return engine.num_steps

    assert num_steps("batchllm") <= 2 * num_steps("stock_sorted")  # 7450 against 167


def test_layers_of_two_kinds_can_use_all_of_memory() -> None:
    most = {}
    for policy in ("batchllm", "stock_sorted"):
        engine = EngineSteps(num_blocks=400, chunk=512, policy=policy, settings=NO_PACE)
        engine.check = MethodType(lambda self: None, engine)  # type: ignore[method-assign]
        shape: dict[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
        kinds = (
            FullAttentionSpec(block_size=16, **shape),
            SlidingWindowSpec(block_size=16, sliding_window=4096, **shape),
        )
        old = engine.scheduler
        engine.scheduler = type(old)(
            vllm_config=old.vllm_config,
            kv_cache_config=KVCacheConfig(
                num_blocks=401,
                kv_cache_tensors=[],
                kv_cache_groups=[
                    KVCacheGroupSpec([f"{idx}"], kind) for idx, kind in enumerate(kinds)
                ],
            ),
            structured_output_manager=old.structured_output_manager,
            block_size=16,
        )
        for idx in range(20):
            engine.add_group(idx, 6, prefix=160, distinct=40, output=60)
        used = []
        while engine.scheduler.has_requests() and engine.num_steps < 5000:
            engine.step()
            used.append(engine.num_used_blocks)
        most[policy] = max(used)
    assert most["batchllm"] >= 0.9 * most["stock_sorted"]  # 284 of 400


def test_a_held_prefix_gives_way_while_another_request_runs() -> None:
    engine = EngineSteps(num_blocks=40, settings=NO_PACE)
    engine.add("9.0", [3] * 8, 300)
    engine.step()
    engine.add_group(0, 1, prefix=320, distinct=8, output=2, told_size=5)  # 4 never come
    while "0.0" not in engine.finished:
        engine.step()
    start = engine.num_steps
    for idx in range(1, 6):
        engine.add_group(idx, 1, prefix=0, distinct=320, output=4)
    while len(engine.finished) < 6 and engine.num_steps < 1000:
        engine.step()
    assert engine.num_steps - start <= 60  # stock 45, ours 324: when 9.0 has ended


def test_no_decode_waits_for_a_prefill_where_memory_is_short() -> None:
    """Found by the suite's property test: a choice of victims put a prefill before decodes."""
    engine = EngineSteps(num_blocks=40, chunk=16)
    sizes = [(1, 0, 1, 1), (1, 0, 1, 1), (1, 0, 1, 33), (1, 0, 36, 30), (4, 128, 1, 21)]
    for idx, (size, prefix, distinct, output) in enumerate([*sizes, (3, 0, 68, 14)]):
        engine.add_group(
            idx, size, prefix=prefix, distinct=distinct, output=output, told_size=1, estimate=1
        )
        engine.step()
    engine.run()


@pytest.mark.parametrize("settings", [SchedulerSettings(memory_threshold=0.005), None])
def test_a_tiny_share_of_memory_is_still_one_request(settings: SchedulerSettings | None) -> None:
    """ZeroDivisionError in `fill_share`, which is the engine's death."""
    engine = EngineSteps(
        num_blocks=100 if settings else 2, settings=settings or SchedulerSettings()
    )
    engine.add_alone(5, distinct=10, output=5)
    engine.run()


def test_a_session_that_waits_for_input_leaves_no_negative_blocks() -> None:
    engine = EngineSteps(num_blocks=60, chunk=256, settings=NO_PACE)
    engine.check = MethodType(lambda self: None, engine)  # type: ignore[method-assign]
    engine.add("99.0", [3] * 8, 600)
    engine.step()
    params = SamplingParams(max_tokens=400, stop_token_ids=[STOP])
    request = Request("1.0", [9] * 100, params, None, block_hasher=engine._hasher)
    request.resumable = True
    engine._lengths["1.0"] = 5
    engine.scheduler.add_request(request)
    for _ in range(100):  # beyond a rebuild
        engine.step()
    engine.abort("1.0")
    assert engine.ours._reservations.projection.num_blocks() >= 0  # -6


class _Speculative(EngineSteps):
    """All of 4 drafts are accepted: 5 tokens a step."""

    def check(self) -> None:
        pass

    def _deliver(self) -> None:
        output, is_sampled = self._pending.popleft()
        names, sampled = list(output.num_scheduled_tokens), []
        for name, is_made in zip(names, is_sampled, strict=True):
            request, tokens = self.scheduler.requests.get(name), []
            if is_made and request is not None:
                drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
                left = self._lengths[name] - request.num_output_tokens
                tokens = [7] * min(1 + drafts, left)
                if len(tokens) == left:
                    tokens[-1] = STOP
            sampled.append(tokens)
        model_output = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled)
        self.scheduler.update_from_output(output, model_output)
        for name in names:
            if name not in self.scheduler.requests:
                self.finished[name] = self._lengths[name]


def test_pace_follows_the_tokens_that_drafts_bring() -> None:
    found = []
    for pace in (True, False):
        settings = SchedulerSettings(pace=pace, num_requests=60)
        engine = _Speculative(num_blocks=200, chunk=512, lag=1, settings=settings)
        engine.scheduler.num_spec_tokens = 4
        engine.ours._tokens_per_decode = 5
        engine.ours.begin(settings)
        engine.scheduler._spec_token_placeholders = [-1] * 4
        engine.add_alone(60, distinct=100, output=100)
        engine.run(5000)
        found.append(engine.num_steps)
    assert found[0] <= 1.25 * found[1]  # 279 against 94, if drafts are not counted


def test_blocks_that_somebody_else_holds_are_not_planned_with() -> None:
    engine = EngineSteps(num_blocks=100, chunk=2048, settings=NO_PACE)
    engine.check = MethodType(lambda self: None, engine)  # type: ignore[method-assign]
    engine.add_group(0, 1, prefix=0, distinct=8, output=100)  # 7 blocks each
    engine.step()
    engine.pool.get_new_blocks(60)  # as for a transfer that is under way
    engine.step()
    for idx in range(1, 40):
        engine.add_group(idx, 1, prefix=0, distinct=8, output=100)
    engine.step()
    assert len(engine.scheduler.running) == (100 - 2 - 60) // 7
    engine.run()
    assert engine.preempted == []
