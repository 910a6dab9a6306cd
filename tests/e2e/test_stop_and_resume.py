"""Stopping `batchllm run` with a real engine, politely and not, and going on afterwards."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.demo_job import DS, Demo, live_processes, wait_until

STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGKILL]


@pytest.mark.parametrize("how", STOPS, ids=lambda stop: stop.name)
def test_a_stopped_run_leaves_nothing_and_is_resumed(demo: Demo, how: signal.Signals) -> None:
    # Many parts and few requests at a time: there is something left to do at the first part.
    spec = demo.write_spec(
        f"stop-{how.name.lower()}",
        sampling={"max_tokens": 48, "ignore_eos": True},
        engine={"max_num_seqs": 4},
        planner={"part_rows": 10},
        input={"filter": [{"column": "package", "op": "<", "value": "h"}]},
    )
    plan = demo.run("plan", "--job", str(spec), "--ds", DS)
    runs = Path(plan["plan_uri"]) / "runs" / "shard-00000"
    arguments = ["run", "--plan", plan["plan_uri"], "--shard", "0"]

    process = demo.start(*arguments)
    wait_until(lambda: list(runs.glob("*/part-*.json")), "the first part is written")
    os.kill(process.pid, how)
    output, _ = process.communicate(timeout=60)
    expected = -how if how is signal.SIGKILL else 128 + how
    assert process.returncode == expected, output
    wait_until(lambda: not live_processes(process.pid), "the engine's processes are gone", 10.0)
    temporary = [path.name for path in runs.rglob(".*")]
    if how is signal.SIGKILL:  # a thread of the process may have been at its progress just then
        temporary = [name for name in temporary if not name.startswith(".progress.json.")]
    assert not temporary, "no temporary file is left"
    num_parts_kept = len(list(runs.glob("*/part-*.json")))

    report = demo.run(*arguments)
    assert report["num_resumed_parts"] == num_parts_kept < report["num_parts"]
    committed = demo.run("commit", "--plan", plan["plan_uri"])
    table = pq.read_table(demo.folder / f"out-{spec.stem}")
    assert committed["num_rows_out"] == table.num_rows == plan["num_rows"] > 50
    assert len(set(table["snippet_id"].to_pylist())) == table.num_rows
