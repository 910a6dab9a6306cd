"""The row that the scheduler writes for each step."""

from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.engine_steps import EngineSteps

from batchllm_operator.vllm_plugin.scheduler import trace as trace_module
from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings
from batchllm_operator.vllm_plugin.scheduler.trace import TRACE_SCHEMA, StepRow, StepTrace


def row(step: int) -> StepRow:
    return StepRow(step, step / 10, 0.001, *[step] * (len(TRACE_SCHEMA) - 3))


def test_rows_come_out_in_order_over_several_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "_ROWS_IN_MEMORY", 10)
    with closing(StepTrace(tmp_path / "trace.parquet", 64)) as trace:
        for step in range(25):
            trace.add(row(step))
    file = pq.ParquetFile(tmp_path / "trace.parquet")
    assert file.metadata.num_row_groups == 3
    table = file.read()
    assert table.schema.equals(TRACE_SCHEMA)
    assert table["step"].to_pylist() == table["num_blocks"].to_pylist() == list(range(25))
    assert table["start_s"].to_pylist() == [step / 10 for step in range(25)]


def test_a_trace_of_nothing_can_be_read(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "trace.parquet", 64)
    trace.close()
    trace.close()
    assert pq.read_table(tmp_path / "trace.parquet").num_rows == 0


def traced(tmp_path: Path, lag: int) -> tuple[EngineSteps, pa.Table]:
    """Two groups, one prefix in several chunks, one member that is preempted."""
    path = tmp_path / "trace.parquet"
    settings = SchedulerSettings(pace=False, trace_path=str(path))
    engine = EngineSteps(num_blocks=20, chunk=48, lag=lag, settings=settings)
    engine.add_group(0, 3, prefix=96, distinct=10, output=60, estimate=5)
    engine.add_group(1, 2, prefix=32, distinct=40, output=20, estimate=5)
    engine.run()
    engine.scheduler.shutdown()
    return engine, pq.read_table(path)


@pytest.mark.parametrize("lag", [0, 1])
def test_every_token_of_every_step_is_of_one_kind(tmp_path: Path, lag: int) -> None:
    engine, table = traced(tmp_path, lag)
    columns = table.to_pydict()
    assert columns["step"] == list(range(1, engine.num_steps + 1))
    kinds = [columns[f"num_{kind}_tokens"] for kind in ("decode", "distinct", "prefix")]
    assert [*map(sum, zip(*kinds, strict=True))] == [
        output.total_num_scheduled_tokens for output in engine.outputs
    ]
    assert columns["num_scheduled"] == [
        len(output.num_scheduled_tokens) for output in engine.outputs
    ]
    assert min(columns["num_decode_tokens"]) >= 0


def test_a_steps_prefixes_blocks_and_times(tmp_path: Path) -> None:
    engine, table = traced(tmp_path, lag=0)
    columns = table.to_pydict()
    assert columns["num_prefix_tokens"][:3] == [48, 48, 18]  # the second group's, in part
    assert columns["num_distinct_tokens"][:3] == [0, 0, 30]
    assert columns["num_cached_tokens"][2] == 2 * 96
    assert columns["num_decode_tokens"][3] == 3
    assert sum(columns["num_preempted"]) == len(engine.preempted) > 0
    prompts = 3 * 106 + 2 * 72
    assert sum(columns["num_distinct_tokens"]) + sum(columns["num_prefix_tokens"]) >= prompts - (
        sum(columns["num_cached_tokens"])
    )
    assert set(columns["num_blocks"]) == {20}
    assert max(columns["num_used_blocks"]) <= 20
    assert columns["num_used_blocks"][0] == 3
    assert columns["start_s"] == sorted(columns["start_s"])
    assert columns["start_s"][0] == 0.0 < min(columns["scheduling_s"])


@pytest.mark.parametrize(
    ("name", "text"), [("no/trace", "aren't traced:"), ("trace", "aren't traced any more")]
)
def test_a_trace_that_cannot_be_opened_or_breaks_off_costs_a_warning(
    name: str,
    text: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(self: StepTrace) -> None:
        raise OSError(28, "No space left on device")

    engine = EngineSteps(settings=SchedulerSettings(trace_path=str(tmp_path / name)))
    if name == "trace":
        monkeypatch.setattr(trace_module, "_ROWS_IN_MEMORY", 1)
        monkeypatch.setattr(StepTrace, "_flush", full)
    engine.add_group(0, 2, prefix=32, distinct=8, output=3)
    engine.run()
    engine.scheduler.shutdown()
    assert text in caplog.text
