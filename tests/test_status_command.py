"""`batchllm status`: what it prints, once and again, and the result that it writes."""

from __future__ import annotations

import io
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import Batchllm
from support.shard_progress import counts
from support.staged_job import Engines, plan_one_shard

from batchllm_operator.commands import reports as reports_command
from batchllm_operator.errors import EngineError, ExitCode, Interrupted
from batchllm_operator.report import format_status, format_totals
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards import job_status
from batchllm_operator.shards.reports import Refusal
from batchllm_operator.shards.status import (
    JobStatus,
    ShardState,
    ShardStatus,
    WorkerState,
    WorkerStatus,
)
from batchllm_operator.stored_plan.bill import Bill

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def shard(
    shard_idx: int,
    state: ShardState,
    num_rows_done: int = 0,
    done: dict[str, int] | None = None,
    **fields: Any,
) -> ShardStatus:
    return ShardStatus(
        shard_idx,
        state,
        num_rows=100,
        num_parts=10,
        done=counts(num_rows=num_rows_done, **(done or {})),
        **fields,
    )


def job(*shards: ShardStatus, is_committed: bool = False) -> JobStatus:
    bill = Bill(gpu_s=None, usd_per_hour=None)
    return JobStatus("/lake/plan", "p", "job", "2026-01-31", is_committed, NOW, shards, bill)


RUNNING = shard(
    1,
    "running",
    1234,
    num_parts_done=3,
    done={"num_logical_tokens": 1000, "num_prompt_tokens": 500, "num_cached_tokens": 110},
    computed_tokens_per_s=4321.6,
    output_tokens_per_s=65.4,
    eta_s=61.0,
    age_s=2.0,
)


def test_the_table_shows_each_shard() -> None:
    failed = shard(2, "failed", 50, age_s=10.0, error="no memory\x1b[31m left")
    silent = shard(3, "silent", 20, age_s=330.0)
    status = job(shard(0, "waiting"), replace(RUNNING, num_rows=5000), failed, silent)
    lines = format_status(status).splitlines()
    assert lines[0] == (
        "job job, partition 2026-01-31: 1,304/5,300 (25 %) rows, shards: 1 waiting, 1 running, 1"
        " silent, 1 failed, 4,322 computed prompt and 65 output tokens/s, 61 % of prompt tokens"
        " saved, ETA 1 min 05 s"
    )
    assert [re.sub(r"  +", "|", line.strip()) for line in lines[1:6]] == [
        "shard|state|worker|rows|parts|computed/s|output/s|saved|ETA|last sign",
        "0|waiting|0/100 (0 %)|0/10",
        "1|running|1,234/5,000 (25 %)|3/10|4,322|65|61 %|1 min 01 s|2 s ago",
        "2|failed|50/100 (50 %)|0/10|10 s ago",
        "3|silent|20/100 (20 %)|0/10|no sign for 5 min 30 s",
    ]
    assert lines[6:] == ["  shard 2: no memory�[31m left"]


def test_rejected_rows_and_a_refused_commit_are_named() -> None:
    refusal = Refusal(plan_id="p", refused_at=NOW, reason="3 of 30 rows failed\x1b[31m")
    bill = Bill(gpu_s=None, usd_per_hour=3.6, gpu="H100", predicted_gpu_s=100.0)
    status = replace(
        job(shard(0, "finished", 100)), num_rejected_rows=2, refusal=refusal, bill=bill
    )
    lines = format_status(status).splitlines()
    assert " rows, 2 rejected, shards: 1 finished" in lines[0]
    when = f"{NOW:%Y-%m-%d %H:%M}"
    reason = "3 of 30 rows failed\N{REPLACEMENT CHARACTER}[31m"
    assert lines[-1] == f"  commit refused, {when} UTC: {reason}"
    found = json.loads(json.dumps(reports_command.status_result(status)))
    assert (found["num_rejected_rows"], found["refused"]) == (2, refusal.reason)
    assert (found["predicted_gpu_s"], found["predicted_cost_usd"]) == (100.0, pytest.approx(0.1))


def test_of_many_shards_those_left_to_do_are_shown() -> None:
    done = [shard(idx, "finished", 100) for idx in range(40)]
    waiting = [shard(idx, "waiting") for idx in range(40, 60)]
    lines = format_status(job(*done, *waiting)).splitlines()
    assert len(lines) == 1 + 1 + 20 + 1 and lines[-1] == "  not shown: 40 finished"
    more = [shard(idx, "waiting") for idx in range(60, 90)]
    lines = format_status(job(*done, *waiting, *more)).splitlines()
    assert lines[1:] == ["  not shown: 50 waiting, 40 finished"]


def worker(number: int, state: WorkerState, *live_shards: int, **fields: Any) -> WorkerStatus:
    known: dict[str, Any] = {
        "host": f"pod-{number}",
        "num_workers": 8,
        "num_finished": 3,
        "num_rows_done": 4000,
        "computed_tokens_per_s": 4321.6 if live_shards else 0.0,
        "output_tokens_per_s": 65.4 if live_shards else 0.0,
        "age_s": 2.0,
        "gpu_s": 75.0,
    }
    return WorkerStatus(number, state=state, live_shards=live_shards, **(known | fields))


def test_workers_are_shown_before_their_shards() -> None:
    shards = (shard(0, "waiting"), replace(RUNNING, num_rows=5000, worker=7))
    workers = (worker(2, "silent", age_s=330.0, gpu_s=0.0), worker(7, "running", 1, 12))
    status = replace(job(*shards), workers=workers)
    lines = format_status(status).splitlines()
    assert "1 waiting, 1 running, 1 worker at work, 4,322 computed prompt and 65 output" in lines[0]
    assert [re.sub(r"  +", "|", line.strip()) for line in lines[1:]] == [
        "worker|state|runs|finished|rows|computed/s|output/s|GPU time|last sign|host",
        "2|silent|3|4,000|no sign for 5 min 30 s|pod-2",
        "7|running|1, 12|3|4,000|4,322|65|1 min 15 s|2 s ago|pod-7",
        "shard|state|worker|rows|parts|computed/s|output/s|saved|ETA|last sign",
        "0|waiting|0/100 (0 %)|0/10",
        "1|running|7|1,234/5,000 (25 %)|3/10|4,322|65|61 %|1 min 01 s|2 s ago",
    ]
    finished = replace(job(shard(0, "finished", 100, worker=7)), workers=workers)
    assert "at work" not in format_totals(finished)


def test_of_many_workers_those_at_work_are_shown() -> None:
    live = [worker(number, "running", number) for number in range(2)]
    ended = [worker(number, "idle") for number in range(2, 31)]
    shards = [shard(idx, "running", worker=idx) for idx in range(2)]
    status = replace(job(*shards), workers=(*live, *ended))
    lines = format_status(status).splitlines()
    assert len(lines) == 1 + (1 + 2 + 1) + (1 + 2)
    assert lines[4] == "  workers not shown: 29 idle"


def test_totals_of_a_finished_and_of_a_committed_run() -> None:
    finished = shard(0, "finished", 100, {"num_failed_rows": 2})
    assert format_totals(job(finished)) == (
        "job job, partition 2026-01-31: 100/100 (100 %) rows, 2 failed, shards: 1 finished"
    )
    assert "committed" in format_totals(job(finished, is_committed=True))
    assert "0/0 (100 %) rows" in format_totals(job())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, *statuses: JobStatus) -> tuple[JobStatus, list[float]]:
    found: Iterator[JobStatus] = iter(statuses)
    pauses: list[float] = []
    last = reports_command.follow(lambda: next(found), 7.0, stream, pauses.append)
    return last, pauses


STEPS = (
    job(shard(0, "waiting")),
    job(shard(0, "waiting")),
    job(shard(0, "running", 10)),
    job(shard(0, "finished", 100)),
)


def test_followed_elsewhere_than_on_a_terminal_only_changes_are_told() -> None:
    stream = io.StringIO()
    last, pauses = shown(stream, *STEPS)
    assert last is STEPS[-1] and pauses == [7.0, 7.0, 7.0]
    totals = [format_totals(STEPS[0]), format_totals(STEPS[2])]
    assert stream.getvalue() == "\n".join([*totals, format_status(STEPS[-1])]) + "\n"


def test_followed_on_a_terminal_each_takes_the_place_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "24")
    stream = Terminal()
    shown(stream, *STEPS)
    lines = _screen(stream.getvalue())
    assert lines == format_status(STEPS[-1]).splitlines()


def test_no_more_is_shown_than_a_terminal_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "4")
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    many = job(*(shard(idx, "waiting") for idx in range(9)))
    with pytest.raises(StopIteration):
        shown(stream, many)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 and max(map(len, lines)) == 29


def _screen(text: str) -> list[str]:
    """What stands on a terminal that knows `n lines up` and `clear below`."""
    lines: list[str] = []
    for piece in re.split("(\x1b\\[[0-9]+F\x1b\\[J)", text):
        up = re.fullmatch("\x1b\\[([0-9]+)F\x1b\\[J", piece)
        if up:
            del lines[len(lines) - int(up[1]) :]
        else:
            lines += piece.splitlines()
    return lines


def test_a_committed_plan_is_followed_no_longer() -> None:
    last, pauses = shown(io.StringIO(), job(shard(0, "waiting"), is_committed=True))
    assert last.is_committed and pauses == []


def test_the_command_prints_and_writes_its_result(batchllm: Batchllm, tmp_path: Path) -> None:
    plan = plan_one_shard(str(tmp_path))

    def fail() -> None:
        raise EngineError("broken")

    with pytest.raises(EngineError):
        run_worker(plan, start=Engines(at=13, act=fail))
    result = tmp_path / "result.json"
    done = batchllm("status", "--plan", plan.folder.uri, "--result", result)
    assert done.code == ExitCode.OK and not done.err
    assert "13/30 (43 %) rows, shards: 1 failed" in done.out and "shard 0: broken" in done.out
    found = json.loads(result.read_text())
    assert (found["command"], found["done"]["num_rows"]) == ("status", 13)
    assert found["is_committed"] is False
    assert found["shards"][0]["state"] == "failed"
    assert (found["shards"][0]["worker"], found["num_live_workers"]) == (0, 0)
    assert [each["state"] for each in found["workers"]] == ["failed"]
    run_worker(plan)
    done = batchllm("status", "--plan", plan.folder.uri, "--follow", "--interval", "0.01")
    assert done.code == ExitCode.OK and "30/30 (100 %) rows" in done.out


def test_the_result_names_workers() -> None:
    found = reports_command.status_result(replace(job(RUNNING), workers=(worker(7, "running", 1),)))
    assert found["num_live_workers"] == 1
    assert {**found["workers"][0], "live_shards": [1]} == {
        "worker": 7,
        "host": "pod-7",
        "num_workers": 8,
        "state": "running",
        "is_live": True,
        "live_shards": [1],
        "num_finished": 3,
        "num_rows_done": 4000,
        "computed_tokens_per_s": 4321.6,
        "output_tokens_per_s": 65.4,
        "age_s": 2.0,
        "gpu_s": 75.0,
    }


def test_wrong_arguments(batchllm: Batchllm, tmp_path: Path) -> None:
    assert batchllm("status", "--plan", tmp_path / "none").code == ExitCode.INVALID
    for interval in ("0", "-1", "nan", "inf", "x"):
        assert batchllm("status", "--plan", "x", "--follow", "--interval", interval).code == 2


def test_ctrl_c_ends_following(
    batchllm: Batchllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_one_shard(str(tmp_path))
    looks: list[object] = []
    read = job_status.read_status

    def read_twice(*args: Any) -> JobStatus:
        looks.append(args)
        if len(looks) == 3:
            raise Interrupted(signal.SIGINT)
        return read(*args)

    monkeypatch.setattr(job_status, "read_status", read_twice)
    done = batchllm("status", "--plan", plan.folder.uri, "--follow", "--interval", "0.01")
    assert done.code == ExitCode.INTERRUPTED and "Traceback" not in done.err
    assert done.out.count("\n") == 1
