"""What is counted while a shard runs: the sums of its report, speeds and ETA by an own clock."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.staged_job import NUM_ROWS, plan_one_shard

from batchllm_operator.engine import EngineOutput
from batchllm_operator.engine.gpus import num_gpus_of
from batchllm_operator.row_error import RowError
from batchllm_operator.run.live_progress import Holder, LiveProgress
from batchllm_operator.shards.attempts import Attempt
from batchllm_operator.stored_plan.counts import NOTHING, Counts
from batchllm_operator.stored_plan.stored_plan import StoredPlan

BEGAN_AT = datetime(2026, 1, 31, tzinfo=UTC)
Part = list[tuple[EngineOutput, int]]
"""Outputs, with the number of rows that each stands for."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> StoredPlan:
    """One shard of 30 requests."""
    return plan_one_shard(str(tmp_path_factory.mktemp("lake")))


class Ticking:
    """Progress, and the clock that it goes by."""

    def __init__(self, plan: StoredPlan, *parts: Part, **settings: int) -> None:
        self.clock = 1000.0
        attempt = Attempt(plan.run_folder(0), 3)
        self.live = LiveProgress(
            plan,
            0,
            attempt,
            Holder(**settings),
            Counts.total(map(Counts.of, parts)),
            len(parts),
            clock=lambda: self.time(),
            now=lambda: BEGAN_AT + timedelta(seconds=self.clock - 1000.0),
        )

    def time(self) -> float:
        return self.clock

    def after(self, seconds: float, act: Callable[[], object] = lambda: None) -> None:
        self.clock += seconds
        act()

    def answer(self, num_rows: int = 1) -> None:
        self.live.count_output(output(0, 90, 30, 10), num_rows)


def output(request_idx: int, prompt: int, cached: int, generated: int) -> EngineOutput:
    return EngineOutput(request_idx, "text", "stop", prompt, cached, generated, None)


def failed(request_idx: int, prompt: int) -> EngineOutput:
    return EngineOutput(request_idx, None, None, prompt, 0, 0, RowError("engine_error", "no"))


tokens = st.integers(0, 5000)
answers = st.one_of(
    st.builds(lambda p, c, g: output(0, p, min(p, c), g), tokens, tokens, tokens),
    st.builds(lambda p: failed(0, p), tokens),
)
parts = st.lists(st.lists(st.tuples(answers, st.integers(1, 4)), min_size=1), max_size=5)


@given(before=parts, now=parts, still_open=st.lists(st.tuples(answers, st.integers(1, 4))))
def test_the_sums_are_those_of_the_parts(
    plan: StoredPlan, before: list[Part], now: list[Part], still_open: Part
) -> None:
    stored = Counts.total(map(Counts.of, [*before, *now]))
    progress = Ticking(plan, *before).live
    progress.begin_running()
    for part in now:
        for answer, num_rows in part:
            progress.count_output(answer, num_rows)
        progress.count_part()
    for answer, num_rows in still_open:
        progress.count_output(answer, num_rows)
    live = progress.snapshot()
    assert live.done == stored + Counts.of(still_open)
    assert live.num_parts_done == len(before) + len(now)
    progress.end(KeyboardInterrupt(), stored)  # what is still open is dropped
    assert progress.snapshot().done == stored


def test_times_are_those_of_a_clock_that_never_goes_back(plan: StoredPlan) -> None:
    run = Ticking(plan, num_gpus=2)
    run.live.hold_gpus()
    run.after(40)
    starting = run.live.snapshot()
    assert (starting.state, starting.elapsed_s, starting.engine_start_s) == ("starting", 40, 40)
    assert (starting.eta_s, starting.computed_tokens_per_s) == (None, 0.0)
    run.live.begin_running()
    run.after(20)
    running = run.live.snapshot()
    assert (running.state, running.elapsed_s, running.engine_start_s) == ("running", 60, 40)
    assert (running.started_at, running.updated_at - BEGAN_AT) == (BEGAN_AT, timedelta(seconds=60))
    assert (running.eta_s, running.gpu_s, running.attempt) == (None, 120, 3)


def test_gpus_that_two_shards_share_are_counted_once(plan: StoredPlan) -> None:
    run = Ticking(plan, num_gpus=2, worker=5, num_workers=8)
    run.live.begin_running()
    run.after(30)  # the shard before has requests in the engine
    fed = run.live.snapshot()
    assert (fed.worker, fed.num_workers, fed.gpu_held_s, fed.gpu_s) == (5, 8, 0, 0)
    run.live.hold_gpus()
    run.after(10, run.live.hold_gpus)  # doesn't begin again
    run.after(10, lambda: run.live.end(None, NOTHING))
    run.after(5)  # until its last state is written
    ended = run.live.snapshot()
    assert (ended.elapsed_s, ended.gpu_held_s, ended.gpu_s) == (55, 20, 40)


def test_gpus_that_are_held_while_somebody_looks_are_held_from_then_on(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Ticking(plan, num_gpus=2)

    def interrupted() -> float:
        """Another thread goes on in the middle of a snapshot."""
        monkeypatch.undo()
        run.after(1, run.live.hold_gpus)
        return run.clock - 1

    monkeypatch.setattr(run, "time", interrupted)
    assert run.live.snapshot().gpu_s == 0
    run.after(5)
    assert run.live.snapshot().gpu_s == 10


def test_speed_is_that_of_the_last_minute_without_cached_tokens(plan: StoredPlan) -> None:
    def speeds() -> tuple[float, float]:
        seen = run.live.snapshot()
        return seen.computed_tokens_per_s, seen.output_tokens_per_s

    run = Ticking(plan)
    run.live.begin_running()
    run.after(10, run.answer)  # of 90 prompt tokens 30 were cached
    assert speeds() == (60 / 10, 10 / 10)
    run.after(30, run.answer)
    assert speeds() == (120 / 40, 20 / 40)
    run.after(30)
    assert speeds() == (60 / 60, 10 / 60)
    run.after(3600)
    assert speeds() == (0.0, 0.0)


def test_eta_goes_by_the_minute_and_by_all_of_the_attempt(plan: StoredPlan) -> None:
    run = Ticking(plan, [(output(0, 90, 30, 10), 6)])
    run.live.begin_running()
    for _ in range(12):
        run.after(10, run.answer)  # 12 of 24 rows in 120 s
    assert run.live.snapshot().eta_s == pytest.approx(12 / 0.1)
    run.after(120)  # none in the last minute: half as fast again
    assert run.live.snapshot().eta_s == pytest.approx(12 / ((12 / 240 + 0) / 2))
    run.live.end(None, NOTHING)
    assert run.live.snapshot().eta_s == 0.0


def test_rows_of_earlier_attempts_say_nothing_of_the_speed(plan: StoredPlan) -> None:
    run = Ticking(plan, [(output(0, 90, 30, 10), 20)])
    run.live.begin_running()
    run.after(10)
    assert run.live.snapshot().eta_s is None
    run.after(0, lambda: run.answer(num_rows=5))
    assert run.live.snapshot().eta_s == pytest.approx((NUM_ROWS - 25) / 0.5)


def test_the_note_says_speed_and_saving(plan: StoredPlan) -> None:
    run = Ticking(plan)
    assert run.live.note() == (
        "0 computed prompt and 0 output tokens/s, 0 % of prompt tokens saved"
    )
    run.live.begin_running()
    run.after(0.05, lambda: run.answer(num_rows=2))
    assert run.live.note() == (
        "1,200 computed prompt and 200 output tokens/s, 67 % of prompt tokens saved"
    )


@pytest.mark.parametrize(
    ("version", "num_gpus"), [("0.32.0", 6), ("0.32.0+cpu", 0), ("0.32.0+rocm700", 6), (None, 0)]
)
def test_gpus_are_known_before_the_engine_starts(
    plan: StoredPlan, version: str | None, num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchllm_operator.engine import gpus

    def installed(name: str) -> str:
        if version is None:
            raise gpus.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(gpus, "version", installed)
    spec = plan.manifest.spec
    assert num_gpus_of(spec) == 0
    changes = {"backend": "vllm", "tensor_parallel_size": 2}
    more = {"extra_args": {"pipeline_parallel_size": 3}}
    engine = spec.engine.model_copy(update=changes | more)
    assert num_gpus_of(spec.model_copy(update={"engine": engine})) == num_gpus


def test_outputs_that_are_lost_at_the_end_make_no_speed_negative(plan: StoredPlan) -> None:
    run = Ticking(plan, num_gpus=2)  # which it doesn't hold yet
    run.live.begin_running()
    run.after(10, run.answer)
    run.after(10, run.answer)
    run.after(55, lambda: run.live.end(KeyboardInterrupt(), NOTHING))
    assert run.live.snapshot().computed_tokens_per_s == 0.0
    assert run.live.snapshot().gpu_s == 0
