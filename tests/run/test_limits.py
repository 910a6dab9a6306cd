"""Runs that have used what their spec allows: they stop at a part, and go on once it is raised."""

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.answers_job import asking
from support.demo_job import wait_until
from support.fake_job import DS, JobFolder, document_rows, fake_spec, write_table
from support.prompts_job import several
from support.shard_progress import leave_progress
from support.staged_job import Engines, check_published, plan_one_shard

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import ExitCode, LimitError, SpecError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.report import format_status
from batchllm_operator.run import budget as budget_module
from batchllm_operator.run.budget import Budget
from batchllm_operator.run.draining import Drain
from batchllm_operator.run.live_progress import INTERVAL_VARIABLE
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.job_status import read_attempts, read_status
from batchllm_operator.shards.usage import Usage
from batchllm_operator.spec import LimitsSpec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

SHARD: dict[str, Any] = {"planner": {"num_shards": 1}}
NUM_TOKENS = 8  # of each output
HOW = "to go on, raise it in the spec, plan again and run"


def stopped(plan: StoredPlan, engines: Engines, *worker: int, **how: Any) -> str:
    """The message and the notes of the limit that ends a run."""
    with pytest.raises(LimitError) as error:
        run_worker(plan.folder.uri, *worker, start=engines, **how)
    return "; ".join([str(error.value), *getattr(error.value, "__notes__", [])])


def raised(lake_uri: str, plan: StoredPlan, limits: dict[str, Any], **changes: Any) -> StoredPlan:
    """The plan with other limits."""
    again = plan_job(fake_spec(lake_uri, limits=limits, **changes), DS)
    assert again.folder.uri == plan.folder.uri, "limits are no part of a plan's identity"
    return again


def test_a_run_stops_at_a_part_and_goes_on_once_the_limit_is_raised(lake_uri: str) -> None:
    plan = plan_one_shard(lake_uri, limits={"output_tokens": 60})
    engines = Engines()
    assert stopped(plan, engines) == (
        f"limits.output_tokens: the run has used 64 of 60; {HOW}; 10 of the plan's 30 rows are"
        " finished and kept"
    )
    assert engines.num_answers == 10, "the open part was finished"
    (shard,) = read_status(plan).shards
    assert (shard.state, shard.num_parts_done) == ("stopped", 2)
    shown = format_status(read_status(plan))
    assert "  shard 0: limits.output_tokens: the run has used 64 of 60" in shown
    assert f"  note: limits.output_tokens: the run has used 80 of 60; {HOW}" in shown

    again = Engines()
    assert "has used 80 of 60" in stopped(plan, again)
    assert again.started == [], "no engine starts for nothing"
    assert read_status(plan).shards[0].num_attempts == 1, "nor does an attempt"

    plan = raised(lake_uri, plan, {"output_tokens": 240, "gpu_hours": 1}, **SHARD)
    run_worker(plan, start=again)
    assert again.num_answers == 20
    assert read_status(plan).notes == (), "it is used, but nothing is left to do"
    commit_run(plan.folder.uri)
    check_published(plan)


def test_what_other_workers_use_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker starts while the first works."""
    monkeypatch.setattr(budget_module, "LOOK_S", 0.0)
    monkeypatch.setenv(INTERVAL_VARIABLE, "0.1")
    lake = str(tmp_path)
    plan = plan_one_shard(lake, planner={"num_shards": 2}, limits={"output_tokens": 130})
    others: list[str] = []

    def seen_tokens() -> int:
        attempts = read_attempts(plan).values()
        return Usage.total(Usage.of(each.progress) for each in attempts).num_output_tokens

    def start_the_other() -> None:
        before = 11 * NUM_TOKENS
        wait_until(lambda: seen_tokens() == before, "the first is seen")
        others.append(stopped(plan, engines := Engines(), 1, 2))
        # It stops at its sixth output, and finishes the part.
        assert before + 6 * NUM_TOKENS in range(130, 130 + NUM_TOKENS)
        assert engines.num_answers == 10

    stop = stopped(plan, Engines(11, start_the_other), 0, 2)
    assert "has used 136 of 130" in others[0]
    assert "limits.output_tokens: the run has used" in stop
    status = read_status(plan)
    assert {shard.state for shard in status.shards} <= {"finished", "stopped", "waiting"}
    used = seen_tokens()
    assert used == status.done.num_output_tokens, "all that was generated is kept"
    assert 130 <= used <= 130 + 2 * 5 * NUM_TOKENS + NUM_TOKENS, "two parts and an output at most"

    plan = raised(lake, plan, {}, planner={"num_shards": 2})
    run_worker(plan, 1, 2)
    assert read_status(plan).done.num_rows == 30
    commit_run(plan.folder.uri)
    check_published(plan)


def test_dropped_work_counts(lake_uri: str) -> None:
    """Of an attempt that was killed, and of answers that were tried again."""
    plan = plan_one_shard(lake_uri, limits={"output_tokens": 60})
    leave_progress(plan, 0, state="stopped", num_generated_tokens=50)
    engines = Engines()
    assert "has used 66 of 60" in stopped(plan, engines)
    assert engines.num_answers == 5


def test_answers_that_are_tried_again_count(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows())
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    spec = asking(
        tmp_path,
        response_format={"type": "json_schema", "json_schema": schema},
        retry_invalid=2,
        sampling={"temperature": 1.0, "max_tokens": NUM_TOKENS},
        limits={"output_tokens": 60},
        max_failed_fraction=1.0,
        engine={"backend": "fake", "extra_args": {"byte_tokens": True, "invalid_every": 1}},
        planner={"num_shards": 1, "part_rows": 5},
    )
    plan = plan_job(spec, DS)
    engines = Engines()
    assert "has used 64 of 60" in stopped(plan, engines)
    used = Usage.of(read_attempts(plan)[0].progress).num_output_tokens
    assert used == engines.num_answers * NUM_TOKENS == 5 * 3 * NUM_TOKENS


def test_rounds_before_count(tmp_path: Path) -> None:
    templates = {"a": "{document}", "b": "{a}{query}"}
    prompts = {
        name: {"template": template, "sampling": {"max_tokens": NUM_TOKENS}}
        for name, template in templates.items()
    }
    write_table(tmp_path / "documents", document_rows(2, 2))
    limits = {"output_tokens": 5 * NUM_TOKENS}
    spec = several(tmp_path, prompts, limits=limits, planner={"num_shards": 1, "part_rows": 1})
    run_worker(plan_job(spec, DS))
    later = plan_job(spec, DS)
    assert "has used 40 of 40" in stopped(later, Engines())
    assert read_status(later).done.num_rows in (2, 3), "of the part that was open"
    before = later.folder.path.replace(later.manifest.plan_id, later.manifest.before or "")
    shutil.rmtree(before)
    (note,) = read_status(later).notes
    assert note.startswith("limits: plan ") and f"{later.manifest.before}" in note


def test_attempts_that_have_ended_are_not_read_at_every_output() -> None:
    class Progress:
        has_ended = False
        num_reads = 0

        @property
        def usage(self) -> Usage:
            self.num_reads += 1
            return Usage(NUM_TOKENS)

    spec = SimpleNamespace(limits=LimitsSpec(output_tokens=100 * NUM_TOKENS))
    plan: Any = SimpleNamespace(manifest=SimpleNamespace(spec=spec, estimate=None))
    drain = Drain()
    budget = Budget(plan, drain)
    attempts: list[Any] = [Progress() for _ in range(100)]
    for number, progress in enumerate(attempts):
        budget.watch(number, 1, progress)
        assert not drain.has_begun
        budget.check(looks=False)
        progress.has_ended = True
    assert "has used 800 of 800" in str(drain.limit)
    assert max(progress.num_reads for progress in attempts) == 2


def test_gpus_count_while_no_output_ends(lake_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "LOOK_S", 0.0)
    monkeypatch.setenv(INTERVAL_VARIABLE, "0.1")
    plan = plan_one_shard(lake_uri, planner={"num_shards": 2}, limits={"gpu_hours": 3})
    drain = Drain()

    def another_holds_gpus() -> None:
        leave_progress(plan, 1, state="stopped", gpu_held_s=7200.0, num_gpus=2)
        wait_until(lambda: drain.has_begun, "it drains")

    engines = Engines(2, another_holds_gpus)
    text = stopped(plan, engines, num_gpus=1, drain=drain)
    assert "limits.gpu_hours: the run has used 4.00 of 3;" in text
    assert engines.num_answers == 5


def test_open_parts_have_as_long_as_after_a_signal(lake_uri: str) -> None:
    plan = plan_one_shard(lake_uri, limits={"output_tokens": 16})
    engines = Engines(3, lambda: threading.Event().wait(60))  # ended by the timer's signal
    with Drain().on_sigterm(0.05) as drain:
        text = stopped(plan, engines, drain=drain)
    assert text.endswith("3 of the plan's 30 rows are finished and kept")
    assert read_status(plan).shards[0].state == "stopped"


def test_small_and_large_limits_are_shown_with_their_digits(lake_uri: str) -> None:
    plan = plan_one_shard(lake_uri, limits={"gpu_hours": 0.001})
    assert "has used 0.00125 of 0.001;" in next(Usage(gpu_s=4.5).reached(plan.manifest))
    plan = plan_one_shard(lake_uri, limits={"gpu_hours": 2_000_000})
    assert "has used 3,000,000.00 of 2,000,000;" in next(
        Usage(gpu_s=1.08e10).reached(plan.manifest)
    )


def test_a_cost_needs_a_price(lake_uri: str) -> None:
    with pytest.raises(SpecError, match=r"limits.cost: needs planner.target_gpu, whose price"):
        plan_one_shard(lake_uri, limits={"cost": 5})


def test_the_command_ends_with_an_exit_code_of_its_own(tmp_path: Path, batchllm: Any) -> None:
    job = JobFolder(tmp_path)
    job.write_rows(DS)
    one_by_one = {"engine": {"extra_args": {"max_in_flight": 1}}, "planner": {"part_rows": 1}}
    spec = job.write_spec("job", **one_by_one, limits={"output_tokens": 1})
    done = batchllm("job", "--job", spec, "--ds", DS)
    assert done.code == ExitCode.LIMIT
    run = ("run", "--job", spec, "--ds", DS, "--worker", 0, "--num-workers", 1)
    done = batchllm(*run)
    assert done.code == ExitCode.LIMIT
    assert "batchllm: error: limits.output_tokens: the run has used" in done.err
    spec = job.write_spec("job", **one_by_one)
    assert batchllm("plan", "--job", spec, "--ds", DS).code == 0
    assert batchllm(*run).code == 0
