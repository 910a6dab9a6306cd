"""Rows that were finished when a run was stopped: kept beside the parts, and used once."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.demo_job import wait_until
from support.fake_job import DS, document_rows, fake_spec, job_fields, planned, write_table
from support.fork_server import ForkServer
from support.staged_job import NUM_ROWS, Engines, check_published, claim_attempt, plan_one_shard

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.engine import EngineJob, EngineOutput, EngineRequest
from batchllm_operator.engine.fake import FakeEngine
from batchllm_operator.engine.isolation import IsolatingEngine
from batchllm_operator.errors import FencedError, Interrupted, StorageError
from batchllm_operator.inspect.verify import verify_worker
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run import shard_run
from batchllm_operator.run.draining import Drain
from batchllm_operator.run.live_progress import INTERVAL_VARIABLE, Holder
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.attempts import Attempt
from batchllm_operator.shards.job_status import read_status
from batchllm_operator.shards.parts import (
    PART_SCHEMA,
    PartOutputs,
    ShardFiles,
    ShardParts,
    SpillEntry,
)
from batchllm_operator.shards.reports import ShardReport
from batchllm_operator.spec import JobSpec, parse_spec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan


def interrupt() -> None:
    raise Interrupted(signal.SIGINT)


def stop(plan: StoredPlan, at: int, error: type[BaseException] = Interrupted) -> Engines:
    """Run the shard until `at` of its requests are answered."""
    engines = Engines(at, interrupt)
    with pytest.raises(error):
        run_worker(plan, start=engines)
    return engines


def entries(plan: StoredPlan, shard_idx: int = 0) -> list[SpillEntry]:
    folder = plan.run_folder(shard_idx)
    names = [name for name in folder.find() if re.search(r"/spill-\d+\.json$", name)]
    return [SpillEntry.model_validate_json(folder.read_bytes(name)) for name in names]


def stored_rows(plan: StoredPlan) -> int:
    """Rows in parts and in spills of other parts."""
    return ShardParts.read(plan, 0, with_spilled=True).counts.num_rows


def answers(plan: StoredPlan) -> list[dict[str, Any]]:
    """What parts hold, without what the cache happened to hold."""
    folder, rows = plan.run_folder(0), []
    for entry in ShardFiles.of(plan, 0).ledger().values():
        rows += pq.read_table(folder.full_path(entry.path)).drop("num_cached_tokens").to_pylist()
    return rows


def counts(report: ShardReport) -> dict[str, Any]:
    """What doesn't depend on the time or the cache."""
    names = ("engine_s", "num_cached_tokens")
    return {name: value for name, value in report.counts if name not in names}


@pytest.fixture
def plan(lake_uri: str) -> StoredPlan:
    """30 requests in 6 parts."""
    return plan_one_shard(lake_uri)


# Stopped and taken up


@pytest.mark.parametrize("part_rows", [1, 4, 500])
@pytest.mark.parametrize("at", [0, 1, 9, 22, 29])
def test_a_stopped_run_keeps_every_finished_row(tmp_path: Path, part_rows: int, at: int) -> None:
    planner = {"num_shards": 1, "part_rows": part_rows}
    plan = plan_one_shard(str(tmp_path), planner=planner)
    stop(plan, at)
    (shard,) = read_status(plan).shards
    assert (shard.state, shard.done.num_rows) == ("stopped", at)
    rest = Engines()
    run_worker(plan, start=rest)
    assert rest.num_answers == NUM_ROWS - at
    assert commit_run(plan.folder.uri).num_rows_out == NUM_ROWS
    check_published(plan)


def test_a_run_that_is_stopped_again_and_again_generates_no_row_twice(plan: StoredPlan) -> None:
    answered = 0
    for at in (3, 4, 9, 0, 6):
        answered += stop(plan, at).num_answers
    assert read_status(plan).done.num_rows == answered == 22
    rest = Engines()
    report = run_worker(plan, start=rest)
    assert rest.num_answers == NUM_ROWS - answered
    assert verify_worker(plan.folder.uri) == report
    commit_run(plan.folder.uri)
    check_published(plan)


def test_counts_of_a_run_in_pieces_are_those_of_a_run_at_once(tmp_path: Path) -> None:
    rows = document_rows()
    for idx in (3, 11):  # a request stands for two rows
        rows[idx] = {**rows[idx + 1], "row_key": f"copy {idx}"}
    reports = []
    for name, stops in {"whole": (), "pieces": (4, 8, 1)}.items():
        write_table(tmp_path / name / "documents", rows)
        plan = plan_job(fake_spec(tmp_path / name, planner={"num_shards": 1, "part_rows": 9}), DS)
        for at in stops:
            stop(plan, at)
        reports.append(counts(run_worker(plan).shards[0]))
    assert reports[0] == reports[1]
    assert reports[0]["num_rows"] == 30 > reports[0]["num_requests"] == 28


def test_engine_seconds_are_counted_once(plan: StoredPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holder, "lap", lambda holder: 7.0)
    monkeypatch.setattr(shard_run, "SPILL_ROWS", 4)
    stop(plan, 14)  # a spill, a part, a spill at 9, a part, a spill at the end
    spilled = sum(entry.engine_s for entry in entries(plan))
    written = ShardFiles.of(plan, 0).ledger().values()
    assert spilled == 7 * len(entries(plan)) == 21
    assert sum(entry.engine_s for entry in written) == pytest.approx(2 * 7 + 2 * 7)
    report = run_worker(plan).shards[0]
    num_laps = report.counts.engine_s / 7
    assert num_laps == pytest.approx(6 + len(entries(plan)))


def test_what_was_all_spilled_needs_no_engine(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_none(run: shard_run.ShardRun, *part: object) -> None:
        if run.progress.snapshot().done.num_rows == NUM_ROWS:
            interrupt()

    with monkeypatch.context() as patch:
        patch.setattr(shard_run.ShardRun, "_write", write_none)
        assert stop(plan, -1).num_answers == NUM_ROWS
    assert ShardFiles.of(plan, 0).ledger() == {}
    engines = Engines()
    report = run_worker(plan, start=engines).shards[0]
    assert engines.started == []
    assert (report.counts.num_rows, report.num_parts, report.num_resumed_parts) == (30, 6, 0)
    commit_run(plan.folder.uri)
    check_published(plan)


SCHEMA = {
    "type": "object",
    "properties": {"summary": {"type": "string", "maxLength": 40}},
    "required": ["summary"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": SCHEMA}
JOBS: dict[str, dict[str, Any]] = {
    "samples": {"sampling": {"temperature": 0.7, "n": 3}},
    "logprobs": {"sampling": {"logprobs": 2, "max_tokens": 3}},
    "classify": {"task": "classify", "labels": {"relevant": "yes", "irrelevant": "no"}},
    "embed": {"task": "embed"},
    "invalid": {
        "response_format": FORM,
        "engine": {"backend": "fake", "extra_args": {"invalid_every": 2}},
        "retry_invalid": 2,
        "sampling": {"temperature": 1.0, "seed": 5},
        "max_failed_fraction": 1.0,
    },
}


def plan_kind(folder: Path, kind: str, part_rows: int) -> StoredPlan:
    write_table(folder / "documents", document_rows())
    fields = job_fields(str(folder), planner={"num_shards": 1, "part_rows": part_rows})
    del fields["sampling"]
    engine = {**fields["engine"], **JOBS[kind].get("engine", {})}
    engine["extra_args"] = {**fields["engine"]["extra_args"], **engine["extra_args"]}
    return plan_job(parse_spec({**fields, **JOBS[kind], "engine": engine}, source="test spec"), DS)


@pytest.mark.parametrize("kind", JOBS)
def test_answers_of_every_kind_come_back_as_they_were(tmp_path: Path, kind: str) -> None:
    found = []
    for name, stops in {"whole": (), "pieces": (7, 11)}.items():
        plan = plan_kind(tmp_path / name, kind, 500)
        for at in stops:
            stop(plan, at)
        run_worker(plan)
        found.append(answers(plan))
        commit_run(plan.folder.uri)
    assert found[0] == found[1]
    assert len(found[0]) == NUM_ROWS


class SteppingEngine(FakeEngine):
    """Computes eight outputs at a time, like a step of vLLM."""

    def __init__(self, spec: JobSpec, job: EngineJob) -> None:
        super().__init__(spec, job.max_model_len)
        self.unread: list[EngineOutput] = []

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        outputs = super().stream(requests)
        while step := list(islice(outputs, 8)):
            self.unread = step
            while self.unread:
                yield self.unread[0]
                del self.unread[0]


@pytest.mark.parametrize("kind", ["embed", "invalid"])
def test_a_signal_between_outputs_of_a_step_loses_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It comes while the first part is written, after five of the step's eight rows."""
    whole, plan = (plan_kind(tmp_path / name, kind, 5) for name in ("whole", "stopped"))
    run_worker(whole)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(ShardFiles, "write_part", lambda *_: interrupt())
        run_worker(plan, start=lambda *args: IsolatingEngine(lambda: SteppingEngine(*args)))
    assert entries(plan)
    rest = Engines()
    run_worker(plan, start=rest)
    if kind == "embed":
        assert rest.num_answers == NUM_ROWS - 8
    assert answers(plan) == answers(whole), "no row was kept that comes again for its form"


def test_workers_that_are_stopped_keep_rows_of_all_shards_that_they_have_begun(
    tmp_path: Path,
) -> None:
    """The engine has requests of the next shard before the last of this one have ended."""
    plan = planned(tmp_path, document_rows(8, 5), planner={"num_shards": 4, "part_rows": 500})
    before = 0
    for at in (13, 8):
        engines = Engines(at, interrupt)
        with pytest.raises(Interrupted) as caught:
            run_worker(plan.folder.uri, 0, 1, start=engines)
        before += at
        note = f"{before} of the plan's 40 rows are finished and kept: give the same command"
        assert caught.value.__notes__[0].startswith(note)
    rest = Engines()
    run_worker(plan.folder.uri, 1, 2, start=rest)
    assert rest.num_answers == 40 - before
    commit_run(plan.folder.uri)


# Killed, fenced, damaged


@pytest.mark.parametrize(
    ("rows", "seconds", "lost"), [(4, 600.0, 1), (1000, 0.0, 0), (1000, 600.0, 9)]
)
def test_kill_9_loses_what_was_finished_since_the_last_spill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, seconds: float, lost: int
) -> None:
    plan = plan_one_shard(str(tmp_path), planner={"num_shards": 1, "part_rows": 10})
    monkeypatch.setattr(shard_run, "SPILL_ROWS", rows)
    monkeypatch.setattr(shard_run, "SPILL_S", seconds)
    with monkeypatch.context() as patch:  # as if there were no time for it
        patch.setattr(shard_run.ShardRun, "_keep_finished", lambda *_: None)
        stop(plan, 19)
    rest = Engines()
    run_worker(plan, start=rest)
    assert rest.num_answers == NUM_ROWS - 19 + lost
    commit_run(plan.folder.uri)
    check_published(plan)


def test_rows_are_spilled_while_the_engine_finishes_nothing(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_run, "SPILL_S", 0.05)
    monkeypatch.setenv(INTERVAL_VARIABLE, "0.1")
    slow = Engines(8, lambda: wait_until(lambda: stored_rows(plan) == 8, "all rows are stored"))
    run_worker(plan, start=slow)
    assert commit_run(plan.folder.uri).num_rows_out == NUM_ROWS
    check_published(plan)


@pytest.mark.parametrize("stem", ["part-", "spill-"])
@pytest.mark.parametrize("step", ["publish_file", "create"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_while_something_is_written_loses_nothing(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch, stem: str, step: str, when: str
) -> None:
    monkeypatch.setattr(shard_run, "SPILL_ROWS", 3)
    original = getattr(Folder, step)
    hit: list[str] = []

    def signalled(folder: Folder, *args: Any) -> Any:
        name = next(arg for arg in args if isinstance(arg, str))
        is_it = f"/{stem}" in name and not hit
        hit.extend([name] if is_it else [])
        if is_it and when == "before":
            interrupt()
        result = original(folder, *args)
        if is_it:
            interrupt()
        return result

    engines = Engines()
    with monkeypatch.context() as patch:
        patch.setattr(Folder, step, signalled)
        with pytest.raises(Interrupted):
            run_worker(plan, start=engines)
    assert hit and 0 < engines.num_answers < NUM_ROWS
    rest = Engines()
    run_worker(plan, start=rest)
    assert engines.num_answers + rest.num_answers == NUM_ROWS
    commit_run(plan.folder.uri)
    check_published(plan)


def test_a_signal_while_another_threads_spill_is_waited_for_loses_nothing(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERVAL_VARIABLE, "0.1")
    is_spilling, is_taking = threading.Event(), threading.Event()
    publish, take = Folder.publish_file, shard_run.ShardRun.take

    def interrupted_upload(folder: Folder, source: Path, name: str) -> None:
        if "/spill-" in name and not is_spilling.is_set():
            is_spilling.set()
            assert is_taking.wait(30)
            time.sleep(0.1)  # until it waits
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.1)
        publish(folder, source, name)

    def noted_take(run: shard_run.ShardRun, output: EngineOutput) -> int:
        if is_spilling.is_set():
            is_taking.set()
        return take(run, output)

    def wait_for_spill() -> None:
        monkeypatch.setattr(shard_run, "SPILL_S", 0.0)
        assert is_spilling.wait(30)

    monkeypatch.setattr(Folder, "publish_file", interrupted_upload)
    monkeypatch.setattr(shard_run.ShardRun, "take", noted_take)
    engines = Engines(8, wait_for_spill)
    with pytest.raises(KeyboardInterrupt):
        run_worker(plan, start=engines)
    assert stored_rows(plan) == engines.num_answers == 9
    run_worker(plan)
    commit_run(plan.folder.uri)
    check_published(plan)


def test_a_fenced_attempt_spills_nothing_more_and_its_spills_count(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_run, "SPILL_ROWS", 3)
    successor = Engines()
    zombie = Engines(4, lambda: run_worker(plan, owner="task", start=successor))
    assert run_worker(plan, owner="task", start=zombie).shards == {}
    assert [entry.attempt for entry in entries(plan) if entry.attempt == 1] == [1]
    assert successor.num_answers == NUM_ROWS - 3
    commit_run(plan.folder.uri)
    check_published(plan)


def test_a_run_that_was_fenced_when_it_is_stopped_keeps_its_end(plan: StoredPlan) -> None:
    def fence_and_stop() -> None:
        claim_attempt(plan.run_folder(0))
        interrupt()

    with pytest.raises(Interrupted) as caught:
        run_worker(plan, start=Engines(3, fence_and_stop))
    assert entries(plan) == []
    assert caught.value.__notes__[0].startswith("0 of the plan's 30 rows are finished and kept")


def damage(plan: StoredPlan, how: str) -> None:
    """Damage the only spill."""
    (entry,) = entries(plan)
    folder = Path(plan.run_folder(0).full_path(""))
    file, described = folder / entry.path, folder / entry.entry_path
    match how:
        case "missing":
            file.unlink()
        case "flipped":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        case "unreadable":
            described.write_bytes(b"{")
        case "another plan's":
            foreign = entry.model_copy(update={"plan_id": "0123456789abcdef"})
            described.write_text(foreign.model_dump_json())
        case "another shard's":
            described.write_text(entry.model_copy(update={"shard_idx": 1}).model_dump_json())
        case "renamed":
            described.rename(described.with_name("spill-00007.json"))


@pytest.mark.parametrize(
    "how",
    ["missing", "flipped", "unreadable", "another plan's", "another shard's", "renamed"],
)
def test_a_spill_that_is_damaged_or_foreign_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    plan = plan_one_shard(str(tmp_path))
    stop(plan, 14)
    damage(plan, how)
    rest = Engines()
    run_worker(plan, start=rest)
    assert rest.num_answers == NUM_ROWS - 10, "parts of five count"
    assert "doesn't count" in caplog.text
    commit_run(plan.folder.uri)
    check_published(plan)


def test_a_request_that_was_spilled_twice_counts_once(tmp_path: Path) -> None:
    """The first attempt was about to write the entry when the second claimed its number."""
    folder = Folder.open(str(tmp_path / "shard"))
    attempts = [claim_attempt(folder) for _ in range(3)]
    files = ShardFiles(folder, "plan", 0, PART_SCHEMA)

    def write(attempt: Attempt, text: str) -> None:
        output = EngineOutput(5, text, "stop", 10, 4, 2, None)
        files.write_spill(attempt, 0, {2: PartOutputs({5: output}, {5: [50, 51]})}, 8.0)

    write(attempts[2], "new")
    with pytest.raises(FencedError):
        write(attempts[0], "old")
    found = files.spilled({})
    assert [each.text for each in found[2].outputs.values()] == ["new"]
    assert found[2].counts.num_rows == 2
    assert files.spilled({2}) == {}


def test_a_storage_that_takes_no_spill_keeps_the_reason_of_the_stop(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ShardFiles, "write_spill", fail)
        stop(plan, 8)
    assert "finished rows of shard 0 are lost: the disk is full" in caplog.text
    assert read_status(plan).done.num_rows == 5


def test_an_engine_that_fails_leaves_what_it_has_finished(plan: StoredPlan) -> None:
    class BrokenError(Exception):
        pass

    def fail() -> None:
        raise BrokenError

    with pytest.raises(BrokenError):
        run_worker(plan, start=Engines(8, fail))
    rest = Engines()
    run_worker(plan, start=rest)
    assert rest.num_answers == NUM_ROWS - 8


def test_parts_that_a_drain_has_no_time_for_keep_their_finished_rows(plan: StoredPlan) -> None:
    def terminate() -> Iterator[None]:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    with pytest.raises(Interrupted), Drain().on_sigterm(60.0) as drain:
        run_worker(plan, start=Engines(8, lambda: next(terminate())), drain=drain)
    assert [entry.num_rows for entry in entries(plan)] == [3]


# Commands


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_says_how_many_rows_are_kept(
    tmp_path: Path, commands: ForkServer, number: int
) -> None:
    write_table(tmp_path / "documents", document_rows())
    engine = {"extra_args": {"delay_s": 0.1, "byte_tokens": True}}
    spec = fake_spec(tmp_path, engine=engine, planner={"num_shards": 1, "part_rows": 500})
    plan = plan_job(spec, DS)
    command = ["run", "--plan", plan.folder.uri]
    with (tmp_path / "stderr").open("w") as stderr:
        process = commands.start(
            "batchllm_operator",
            command,
            env={**os.environ, INTERVAL_VARIABLE: "0.1"},
            stderr=stderr.fileno(),
        )
        wait_until(lambda: read_status(plan).done.num_rows > 2, "some rows are finished")
        os.kill(process.pid, number)
        assert process.wait(timeout=60) == 128 + number
    message = (tmp_path / "stderr").read_text()
    match = re.search(r"stopped by signal \d+; (\d+) of the plan's 30 rows are finished", message)
    assert match, message
    rest = Engines()
    run_worker(plan, start=rest)
    assert 0 < int(match[1]) == NUM_ROWS - rest.num_answers
