"""The group scheduler, step by step; `EngineSteps` checks who holds what after every step."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.engine_steps import BLOCK_SIZE, EngineSteps
from support.levels import examples

from batchllm_operator.vllm_plugin.scheduler.groups import Member
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints, SchedulerSettings
from batchllm_operator.vllm_plugin.scheduler.projection import Growth
from batchllm_operator.vllm_plugin.scheduler.reservations import Reservations

NO_PACE = SchedulerSettings(pace=False)


def num_prefill(engine: EngineSteps, step: int) -> int:
    counts = engine.outputs[step].num_scheduled_tokens.values()
    return sum(tokens for tokens in counts if tokens > 1)


def num_computed(engine: EngineSteps) -> int:
    return sum(output.total_num_scheduled_tokens for output in engine.outputs)


# Prefixes


@pytest.mark.parametrize("lag", [0, 1])
def test_each_prefix_is_computed_once_where_stock_computes_some_again(lag: int) -> None:
    ideal = 6 * (320 + 8 * (48 + 39))  # the last output token isn't computed

    def run(policy: str) -> EngineSteps:
        engine = EngineSteps(num_blocks=200, chunk=512, policy=policy, lag=lag)
        for group_id in range(6):
            engine.add_group(group_id, 8, prefix=320, distinct=48, output=40)
        engine.run()
        return engine

    ours, stock = run("batchllm"), run("stock_sorted")
    assert ours.preempted == []
    assert num_computed(ours) == ideal
    assert stock.preempted and num_computed(stock) > ideal


def test_a_prefix_is_held_for_members_that_come_late() -> None:
    engine = EngineSteps(num_blocks=40)
    engine.add_group(0, 2, prefix=64, distinct=16, output=3, told_size=3)
    engine.run_while_unfinished("0.0", "0.1", beside=("9.0", 400))
    assert engine.ours.num_held_blocks == 64 // BLOCK_SIZE
    [late] = engine.add_group(0, 1, prefix=64, distinct=16, output=3, told_size=3, first=2)
    engine.step()
    assert engine.outputs[-1].num_scheduled_tokens[late] == 16
    assert engine.ours.num_held_blocks == 0
    engine.run()


def test_a_prefix_that_nobody_needs_is_reused_before_cached_ones_that_some_do() -> None:
    engine = EngineSteps(num_blocks=24, settings=NO_PACE)
    engine.add_group(0, 1, prefix=64, distinct=16, output=1, told_size=2)
    engine.step()  # held for its second member
    engine.add_group(1, 1, prefix=64, distinct=16, output=1)
    hashes = engine.request("1.0").block_hashes[:4]
    engine.run_while_unfinished("1.0")
    assert not any(engine.is_cached(each) for each in hashes)
    engine.add_group(0, 1, prefix=64, distinct=16, output=1, told_size=2, first=1)
    engine.run()
    assert engine.outputs[-1].total_num_scheduled_tokens <= 16


def test_what_the_next_group_begins_with_stays_cached() -> None:
    instruction = list(range(32))
    engine = EngineSteps(num_blocks=24, chunk=96, settings=NO_PACE)
    for group_id in (0, 1):
        document = [100 + 50 * group_id + position for position in range(48)]
        hints = RequestHints(group_id, num_prefix_tokens=80)
        engine.add(f"{group_id}.0", [*instruction, *document, 7], 200, hints=hints)
    while "0.0" not in engine.finished:
        engine.step()
    engine.run()
    assert num_computed(engine) == 81 + 49 + 2 * 199


def test_a_held_prefix_gives_way_to_a_request_that_needs_its_room() -> None:
    engine = EngineSteps(num_blocks=20)
    engine.add_group(0, 1, prefix=160, distinct=8, output=1, told_size=2)
    engine.add_group(1, 1, prefix=0, distinct=250, output=30)
    engine.run()
    assert sorted(engine.finished) == ["0.0", "1.0"]


@pytest.mark.parametrize("told_wrong", ["tokens", "length"])
def test_a_request_that_is_told_a_group_of_others_is_alone(told_wrong: str) -> None:
    engine = EngineSteps(num_blocks=60, settings=NO_PACE)
    engine.add_group(0, 3, prefix=64, distinct=16, output=30, told_size=5)
    hints = RequestHints(0, num_prefix_tokens=64, group_size=5, num_output_tokens=30)
    prompt = [9] * 80 if told_wrong == "tokens" else [1000, 1001, 1002]
    engine.add("stray.0", prompt, 30, hints=hints)
    engine.run()
    assert len(engine.finished) == 4 and engine.preempted == []


def test_without_a_prefix_cache_nothing_is_taken_to_be_shared() -> None:
    engine = EngineSteps(num_blocks=60, chunk=256, changes={"prefix_caching": False})
    engine.add_group(0, 8, prefix=160, distinct=16, output=30)
    engine.run()
    assert engine.preempted == []
    assert num_computed(engine) == 8 * (176 + 29)


# Memory


@pytest.mark.parametrize("lag", [0, 1])
def test_the_blocks_of_a_request_are_projected_once_if_all_goes_as_expected(
    lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    projected: list[str] = []
    growth_from = Member.growth_from

    def counting(self: Member, *args: Any) -> Growth:
        projected.append(self.request.request_id)
        return growth_from(self, *args)

    monkeypatch.setattr(Member, "growth_from", counting)
    engine = EngineSteps(num_blocks=100, chunk=512, lag=lag, settings=NO_PACE)
    for group_id in range(3):
        engine.add_group(group_id, 2, prefix=32, distinct=16, output=20)
    engine.run()
    assert engine.num_steps < 64, "estimates would be counted again"
    assert sorted(projected) == sorted(engine.finished)


def test_a_request_is_prefilled_after_what_an_earlier_step_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each prompt but the first is cut by a step's end."""
    expected: dict[str, int] = {}
    admit = Reservations.admit

    def noting(self: Reservations, request: Any, growth: Growth) -> None:
        expected[request.request_id] = growth.start
        admit(self, request, growth)

    monkeypatch.setattr(Reservations, "admit", noting)
    engine = EngineSteps(num_blocks=100, chunk=64, settings=NO_PACE)
    engine.add_alone(4, distinct=50, output=20)
    prefilled: dict[str, int] = {}
    while len(prefilled) < 4:
        engine.step()
        for request in engine.scheduler.running:
            if request.num_output_tokens:
                prefilled.setdefault(request.request_id, engine.num_steps)
    assert prefilled == expected == {"0.0": 1, "1.0": 2, "2.0": 3, "3.0": 4}
    engine.run()


def test_what_ends_soon_makes_room_for_what_grows_late() -> None:
    """Final sizes don't fit together, but what is held at any one time does."""
    engine = EngineSteps(num_blocks=24, settings=NO_PACE)  # 22 to plan with
    for idx in range(4):
        engine.add_group(idx, 1, prefix=0, distinct=16, output=64)  # 5 blocks each at its end
        engine.step()
        for _ in range(20):
            engine.step()
    engine.add_group(4, 1, prefix=0, distinct=16, output=64)
    engine.step()
    assert len(engine.scheduler.running) == 5 or engine.finished
    engine.run()
    assert engine.preempted == []


def test_admission_is_by_blocks_whatever_the_number_of_requests() -> None:
    engine = EngineSteps(num_blocks=100, chunk=2048, settings=NO_PACE)
    engine.add_alone(100, distinct=8, output=100)  # 7 blocks each
    engine.step()
    assert len(engine.scheduler.running) == 98 // 7
    engine.run()
    assert engine.preempted == []


def test_memory_threshold_leaves_blocks_free() -> None:
    engine = EngineSteps(
        num_blocks=100, chunk=2048, settings=SchedulerSettings(memory_threshold=0.5, pace=False)
    )
    engine.add_alone(40, distinct=8, output=100)
    most = 0
    while engine.scheduler.has_requests():
        engine.step()
        most = max(most, engine.num_used_blocks)
    assert 40 <= most <= 50


@pytest.mark.parametrize("lag", [0, 1])
def test_outputs_longer_than_estimated_are_noticed(lag: int) -> None:
    engine = EngineSteps(num_blocks=200, chunk=256, lag=lag)
    engine.add_alone(200, distinct=64, output=100, estimate=50)
    engine.run()
    assert len(engine.finished) == 200
    late = [name for name in engine.preempted if int(name.split(".")[0]) >= 100]
    assert len(late) <= 5  # by then it is known how long they are


def test_of_two_that_grow_the_one_whose_prefix_others_hold_has_less_to_lose() -> None:
    engine = EngineSteps(num_blocks=24, chunk=512, settings=NO_PACE)
    engine.add_group(0, 2, prefix=128, distinct=16, output=150, estimate=1)  # 16 of their own
    engine.add_group(1, 1, prefix=0, distinct=80, output=150, estimate=1)
    engine.run()
    assert engine.preempted and "1.0" not in engine.preempted[:1]


def test_the_victim_has_the_least_computed_work() -> None:
    engine = EngineSteps(num_blocks=21, chunk=512, settings=NO_PACE)
    engine.add_group(0, 1, prefix=0, distinct=16, output=200, estimate=1)  # little so far
    engine.add_group(1, 1, prefix=0, distinct=220, output=100, estimate=1)
    engine.run()
    assert engine.preempted and set(engine.preempted) == {"0.0"}


# Even batches


def test_prefill_is_spread_over_the_steps_that_memory_allows() -> None:
    def prefill_steps(pace: bool) -> tuple[int, EngineSteps]:
        settings = SchedulerSettings(pace=pace, num_requests=120)
        engine = EngineSteps(num_blocks=300, chunk=512, settings=settings)
        engine.add_alone(120, distinct=128, output=64)
        engine.run()
        assert engine.preempted == []
        return sum(num_prefill(engine, step) > 0 for step in range(engine.num_steps)), engine

    (paced, with_pace), (burst, without) = prefill_steps(True), prefill_steps(False)
    assert paced > 1.5 * burst
    assert with_pace.num_steps <= 1.05 * without.num_steps


def test_the_pace_counts_requests_that_are_still_to_come() -> None:
    """Told of 400 requests, 40 that wait aren't taken to be all."""

    def running_after(num_steps: int, num_requests: int | None) -> int:
        settings = SchedulerSettings(num_requests=num_requests)
        engine = EngineSteps(num_blocks=600, chunk=512, settings=settings)
        engine.add_alone(40, distinct=128, output=64)
        for _ in range(num_steps):
            engine.step()
        return len(engine.scheduler.running)

    assert running_after(5, None) > 1.5 * running_after(5, 400)


def test_a_job_of_a_few_memories_fills_them_fast() -> None:
    """250 requests, of which memory holds 85 to 100."""
    settings = SchedulerSettings(num_requests=250)
    engine = EngineSteps(num_blocks=2500, chunk=8192, settings=settings)
    engine.add_alone(250, distinct=320, output=160)
    for _ in range(20):
        engine.step()
    assert len(engine.scheduler.running) > 40  # at the slowest pace, 13
    engine.run()
    assert engine.preempted == []


def test_a_job_that_fits_into_memory_is_not_held_back() -> None:
    engine = EngineSteps(num_blocks=300, chunk=512)
    engine.add_alone(10, distinct=128, output=64)
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.running) == 10
    engine.run()


def test_the_chunk_size_bounds_a_step_below_what_vllm_allows() -> None:
    engine = EngineSteps(chunk=512, settings=SchedulerSettings(chunk_size=96, pace=False))
    engine.add_group(0, 6, prefix=64, distinct=40, output=5)
    engine.run()
    assert max(output.total_num_scheduled_tokens for output in engine.outputs) == 96


def test_begin_forgets_what_was_learned_and_takes_other_settings() -> None:
    engine = EngineSteps(num_blocks=200, chunk=256)
    engine.add_alone(60, distinct=64, output=100, estimate=50)
    with pytest.raises(RuntimeError, match="still has requests"):
        engine.ours.begin(SchedulerSettings())
    engine.run()
    engine.ours.begin(SchedulerSettings(chunk_size=32, pace=False))
    start = engine.num_steps
    for idx in range(100, 140):
        engine.add_group(idx, 1, prefix=0, distinct=64, output=40)
    engine.run()
    assert max(output.total_num_scheduled_tokens for output in engine.outputs[start:]) == 32


# Requests that go away, or have no hints


def test_when_the_leader_goes_another_member_computes_the_prefix_once() -> None:
    engine = EngineSteps(num_blocks=200, chunk=128, settings=NO_PACE)
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 32
    engine.add_group(0, 6, prefix=640, distinct=16, output=10)
    engine.step()
    engine.step()
    engine.abort("0.0")
    engine.run()
    assert sorted(engine.finished) == [f"0.{member}" for member in range(1, 6)]
    assert num_computed(engine) <= 640 + 6 * 16 + 5 * 9


def test_without_hints_a_request_is_a_group_of_its_own() -> None:
    engine = EngineSteps()
    for idx in range(10):
        engine.add(f"plain-{idx}", [idx] * 50, 20)
    engine.run()
    assert len(engine.finished) == 10 and engine.preempted == []


def test_requests_that_a_reset_of_the_cache_preempts_give_their_blocks_back() -> None:
    engine = EngineSteps(num_blocks=60, settings=NO_PACE)
    engine.add_group(0, 4, prefix=64, distinct=16, output=10)
    engine.step()
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.num_planned_blocks == 0
    engine.run()
    assert len(engine.finished) == 4


def test_the_prefix_cache_can_be_reset_while_a_prefix_is_held() -> None:
    engine = EngineSteps(num_blocks=40)
    engine.add_group(0, 1, prefix=64, distinct=16, output=1, told_size=2)
    engine.run_while_unfinished("0.0", beside=("9.0", 50))
    engine.add("9.1", [4] * 8, 50)
    engine.abort("9.0")
    assert engine.ours.num_held_blocks > 0
    assert engine.scheduler.reset_prefix_cache()
    assert engine.ours.num_held_blocks == 0


# Chats: each turn begins with the whole one before


def add_chat(engine: EngineSteps, number: int, turns: list[tuple[int, int]]) -> None:
    """Turns of so many tokens more, with outputs of so many; they share the first one's prompt."""
    prompt: list[int] = []
    for turn, (num_tokens, output) in enumerate(turns):
        prompt = prompt + [10_000 * number + len(prompt) + idx for idx in range(num_tokens)]
        hints = RequestHints(number, turns[0][0], len(turns), output)
        engine.add(f"{number}.{turn}", prompt, output, hints=hints)


def test_turns_of_a_chat_are_counted_once() -> None:
    def num_steps(policy: str) -> int:
        engine = EngineSteps(num_blocks=200, chunk=512, policy=policy, settings=NO_PACE)
        for number in range(1, 13):
            add_chat(engine, number, [(64, 40)] * 8)
        engine.run()
        assert policy != "batchllm" or engine.preempted == []
        return engine.num_steps

    assert num_steps("batchllm") <= 1.3 * num_steps("stock_sorted")  # 402 against 131


@settings(max_examples=examples(60), derandomize=True)
@given(
    chats=st.lists(
        st.lists(st.tuples(st.integers(1, 60), st.integers(1, 90)), min_size=1, max_size=5),
        min_size=1,
        max_size=6,
    ),
    chunk=st.sampled_from([16, 64, 300]),
    lag=st.integers(0, 1),
)
def test_whichever_turn_ends_first_blocks_are_planned_for(
    chats: list[list[tuple[int, int]]], chunk: int, lag: int
) -> None:
    engine = EngineSteps(num_blocks=60, chunk=chunk, lag=lag, settings=NO_PACE)
    for number, turns in enumerate(chats, start=1):
        add_chat(engine, number, turns)
    while engine.scheduler.has_requests():
        engine.step()
        assert engine.num_used_blocks <= engine.num_planned_blocks + 1
    engine.run()
    assert engine.preempted == []


# Anything


@st.composite
def jobs(draw: st.DrawFn) -> list[dict[str, int]]:
    """Groups that each fit into 40 blocks."""
    return draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "size": st.integers(1, 6),
                    "prefix": st.integers(0, 200),
                    "distinct": st.integers(1, 120),
                    "output": st.integers(1, 90),
                }
            ),
            min_size=1,
            max_size=8,
        )
    )


@settings(max_examples=examples(60), derandomize=True)
@given(
    groups=jobs(), chunk=st.sampled_from([16, 64, 300]), lag=st.integers(0, 1), pace=st.booleans()
)
@example(  # prefill takes many steps, and what was to end meanwhile ends later
    groups=[
        {"size": 4, "prefix": 166, "distinct": 32, "output": 60},
        {"size": 4, "prefix": 166, "distinct": 32, "output": 60},
        {"size": 4, "prefix": 166, "distinct": 31, "output": 31},
        {"size": 1, "prefix": 127, "distinct": 30, "output": 5},
    ],
    chunk=16,
    lag=0,
    pace=False,
)
def test_with_true_lengths_nothing_is_preempted_or_computed_twice(
    groups: list[dict[str, int]], chunk: int, lag: int, pace: bool
) -> None:
    engine = EngineSteps(num_blocks=60, chunk=chunk, lag=lag, settings=SchedulerSettings(pace=pace))
    for group_id, group in enumerate(groups):
        engine.add_group(group_id, **group)
    while engine.scheduler.has_requests():
        engine.step()
        assert engine.num_used_blocks <= engine.num_planned_blocks + 1
    engine.run()
    assert len(engine.finished) == sum(group["size"] for group in groups)
    assert engine.preempted == []


@settings(max_examples=examples(60), derandomize=True)
@given(
    groups=jobs(),
    chunk=st.sampled_from([16, 64, 300]),
    lag=st.integers(0, 1),
    told=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 150)), min_size=8, max_size=8),
    events=st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.integers(0, 12)), max_size=12),
)
def test_whatever_is_told_and_whenever_they_come_and_go_all_ends_and_nothing_is_held(
    groups: list[dict[str, int]],
    chunk: int,
    lag: int,
    told: list[tuple[int, int]],
    events: list[tuple[int, bool, int]],
) -> None:
    engine = EngineSteps(num_blocks=40, chunk=chunk, lag=lag)
    alive: set[str] = set()
    to_come = dict(enumerate(zip(groups, told, strict=False)))
    for group_id, is_abort, num_steps in [*events, *((idx, False, 1) for idx in range(8))]:
        if is_abort:
            gone = {name for name in alive if int(name.split(".")[0]) == group_id}
            engine.abort(*gone)
            alive -= gone
        elif group_id in to_come:
            group, (size, estimate) = to_come.pop(group_id)
            alive |= set(engine.add_group(group_id, **group, told_size=size, estimate=estimate))
        for _ in range(num_steps):
            engine.step()
        alive -= engine.finished.keys()
    engine.run()
    assert alive <= engine.finished.keys()
