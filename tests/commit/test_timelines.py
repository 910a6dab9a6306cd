"""Traces of steps, in few enough numbers to be drawn."""

import logging
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.levels import examples
from support.shard_progress import shard_progress

from batchllm_operator.errors import StorageError
from batchllm_operator.report import timelines
from batchllm_operator.report.timelines import read_timeline
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.timeline import Timeline
from batchllm_operator.vllm_plugin.scheduler.trace import StepRow, StepTrace

CHUNK = 1000


def step(number: int, start_s: float, tokens: int, *, waiting: int = 0, used: int = 10) -> StepRow:
    """A step of decode tokens."""
    return StepRow(
        step=number,
        start_s=start_s,
        scheduling_s=0.001,
        num_decode_tokens=tokens,
        num_distinct_tokens=0,
        num_prefix_tokens=0,
        num_cached_tokens=0,
        num_scheduled=1,
        num_running=1,
        num_waiting=waiting,
        num_preempted=number % 2,
        num_used_blocks=used,
        num_held_blocks=used // 2,
        num_blocks=100,
    )


def write_trace(
    folder: Path,
    steps: Sequence[StepRow],
    *,
    attempt: int = 1,
    name: str = "a",
    chunk: int = CHUNK,
) -> None:
    path = folder / f"attempt-{attempt:05d}" / f"trace-{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(StepTrace(path, chunk)) as trace:
        for each in steps:
            trace.add(each)


def timeline(folder: Path, attempt: int = 1, **fields: Any) -> Timeline | None:
    """The timeline of the engine that began this attempt at shard 5."""
    began = shard_progress(shard_idx=5, attempt=attempt, worker=7, **fields)
    return read_timeline(Folder.open(str(folder)), began)


def shown(folder: Path, attempt: int = 1) -> Timeline:
    found = timeline(folder, attempt)
    assert found is not None
    return found


def test_a_workers_timeline_is_that_of_one_attempt(tmp_path: Path) -> None:
    write_trace(tmp_path, [step(0, 0.0, 100)], attempt=1)
    write_trace(tmp_path, [step(0, 0.0, 200), step(1, 1.0, 300)], attempt=2)
    found = shown(tmp_path, 2)
    assert (found.num_decode_tokens, found.name) == ((200.0, 300.0), "worker 7, from shard 5")
    assert timeline(tmp_path, 3) is None


def test_each_step_is_a_bin_while_there_are_few(tmp_path: Path) -> None:
    steps = [step(0, 0.0, 900), step(1, 1.0, 400, waiting=3), step(2, 2.0, 100, used=70)]
    write_trace(tmp_path, steps)
    found = shown(tmp_path)
    assert (found.shard_idx, found.num_steps, found.chunk_size) == (5, 3, CHUNK)
    assert (found.duration_s, found.bin_s) == (3.0, 1.0)
    assert found.num_decode_tokens == (900.0, 400.0, 100.0)
    assert found.kv_used == (0.1, 0.1, 0.7)
    assert found.kv_held == (0.05, 0.05, 0.35)
    assert found.num_preempted == 1


def test_a_valley_is_a_small_step_while_requests_wait(tmp_path: Path) -> None:
    steps = [
        step(0, 0.0, CHUNK, waiting=9),
        step(1, 1.0, CHUNK // 2, waiting=9),  # just no valley
        step(2, 2.0, CHUNK // 2 - 1, waiting=9),
        step(3, 5.0, 1),  # the end: nobody waits
        step(4, 6.0, 1),
    ]
    write_trace(tmp_path, steps)
    found = shown(tmp_path)
    assert (found.num_valley_steps, found.duration_s) == (1, 7.0)
    assert found.valley_share == pytest.approx(3 / 7, abs=1e-4)
    assert sum(found.valley) * found.bin_s == pytest.approx(3.0, abs=1e-2)


@settings(max_examples=examples(30))
@given(
    st.lists(st.tuples(st.floats(1e-3, 10), st.integers(0, CHUNK)), min_size=1, max_size=600),
    st.integers(1, 40),
)
def test_long_runs_keep_their_means_and_peaks(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, int]], num_bins: int
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    start_s, rows = 0.0, []
    for number, (length_s, tokens) in enumerate(steps):
        rows.append(step(number, start_s, tokens, used=tokens % 100))
        start_s += length_s
    write_trace(folder, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timelines, "NUM_BINS", num_bins)
        found = shown(folder)
    assert len(found.kv_used) == len(found.num_decode_tokens) == min(num_bins, len(rows))
    assert max(found.kv_used) == pytest.approx(max(row.num_used_blocks for row in rows) / 100)
    decoded = [row.num_decode_tokens for row in rows]
    assert min(decoded) - 0.1 <= min(found.num_decode_tokens)
    assert max(found.num_decode_tokens) <= max(decoded) + 0.1
    assert found.bin_s * len(found.kv_used) == pytest.approx(found.duration_s, abs=1e-3)


def test_a_long_step_fills_the_bins_that_it_takes(tmp_path: Path) -> None:
    steps = [step(idx, idx / 10, 100, used=90) for idx in range(10)]
    write_trace(tmp_path, [*steps, step(10, 1.0, 700), step(11, 11.9, 200)])
    found = shown(tmp_path)
    assert (found.bin_s, len(found.kv_used)) == (1.0, 12)
    assert found.num_decode_tokens == (100.0, *(700.0,) * 10, 650.0)
    assert found.kv_used == (0.9, *(0.1,) * 11)


def test_engines_of_an_attempt_follow_each_other(tmp_path: Path) -> None:
    write_trace(tmp_path, [step(0, 0.0, 3), step(1, 1.0, 3)], name="b", chunk=500)
    write_trace(tmp_path, [step(0, 0.0, 2), step(1, 1.0, 2)], name="a")
    found = shown(tmp_path)
    assert (found.num_steps, found.chunk_size) == (4, 500)
    assert found.num_decode_tokens[0] == 2.0 and found.num_decode_tokens[-1] == 3.0


def test_of_very_many_steps_the_last_engines_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timelines, "_MOST_STEPS", 3)
    for number in (1, 2, 3):
        write_trace(tmp_path, [step(0, 0.0, number), step(1, 1.0, number)], name=str(number))
    found = shown(tmp_path)
    assert found.num_decode_tokens == (3.0, 3.0)


def test_what_is_no_trace_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_trace(tmp_path, [step(0, 0.0, 8)])
    table = pq.read_table(next(tmp_path.glob("*/*.parquet"))).replace_schema_metadata()
    pq.write_table(table, tmp_path / "attempt-00001" / "trace-no-chunk.parquet")
    (tmp_path / "attempt-00001" / "trace-broken.parquet").write_bytes(b"PAR1")
    (tmp_path / "attempt-00001" / "trace-empty.parquet").write_bytes(b"")
    write_trace(tmp_path, [step(idx, float(idx), 8) for idx in range(50)], name="page")
    path = tmp_path / "attempt-00001" / "trace-page.parquet"
    data, size = path.read_bytes(), pq.read_metadata(path).serialized_size  # the footer is whole
    path.write_bytes(data[:4] + bytes(len(data) - size - 12) + data[-size - 8 :])
    with caplog.at_level(logging.WARNING):
        found = timeline(tmp_path)
    assert found is not None and found.num_steps == 1
    assert len(caplog.records) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("start_s", math.nan),
        ("start_s", math.inf),
        ("start_s", 0.5),
        ("num_decode_tokens", None),
        ("num_decode_tokens", "x"),
        ("num_waiting", -1),
        ("num_used_blocks", 2**62),
    ],
)
def test_a_trace_with_what_no_step_has_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    write_trace(tmp_path, [step(0, 0.0, 8), step(1, 1.0, 8), step(2, 2.0, 8)])
    (path,) = tmp_path.glob("*/*.parquet")
    table = pq.read_table(path)
    column = pa.array(["1", "2", value] if value == "x" else [0, 1, value])
    table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, path)
    with caplog.at_level(logging.WARNING):
        assert timeline(tmp_path) is None
    assert len(caplog.records) == 1


def test_traces_that_cannot_be_listed_cost_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit has published by then, and must not fail."""

    def fail(_: Folder) -> None:
        raise StorageError("no access")

    write_trace(tmp_path, [step(0, 0.0, 100)])
    monkeypatch.setattr(Folder, "find", fail)
    assert timeline(tmp_path) is None
    assert "its traces aren't in the report: no access" in caplog.text


def test_without_a_trace_there_is_no_timeline(tmp_path: Path) -> None:
    assert timeline(tmp_path) is None
    write_trace(tmp_path, [])
    assert timeline(tmp_path) is None
