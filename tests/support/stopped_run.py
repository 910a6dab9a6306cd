"""A run with a real engine that is stopped, and another that takes it up."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
from support.demo_job import DS, Demo, live_processes, wait_until


def check_stop_and_resume(demo: Demo, how: signal.Signals) -> None:
    """Nothing is left of what was stopped, and nothing that it finished is generated twice."""
    # Many parts and few requests at a time: there is something left to do at the first part.
    name = f"stop-{how.name.lower()}"
    spec = demo.write_spec(
        name,
        sampling={"max_tokens": 48, "ignore_eos": True},
        engine={"max_num_seqs": 4},
        planner={"part_rows": 10},
        input={"filter": [{"column": "package", "op": "<", "value": "h"}]},
    )
    plan = demo.run("plan", "--job", str(spec), "--ds", DS)
    runs = Path(plan["plan_uri"]) / "runs" / "shard-00000"
    arguments = ["run", "--plan", plan["plan_uri"]]

    process = demo.start(*arguments)
    wait_until(lambda: list(runs.glob("*/part-*.json")), "the first part is written")
    os.kill(process.pid, how)
    code, output = process.end()
    assert code == (-how if how is signal.SIGKILL else 128 + how), output
    wait_until(lambda: not live_processes(process.pid), "the engine's processes are gone", 10.0)
    if how is not signal.SIGKILL:  # which may have come while a file was written
        assert not list(runs.rglob(".*")), "no temporary file is left"
    num_parts_kept = len(list(runs.glob("*/part-*.json")))

    demo.run(*arguments)
    report = json.loads((runs / "report.json").read_bytes())
    assert report["num_resumed_parts"] == num_parts_kept < report["num_parts"]
    committed = demo.run("commit", "--plan", plan["plan_uri"])
    table = pq.read_table(demo.folder / f"out-{name}")
    assert committed["num_rows_out"] == table.num_rows == plan["num_rows"] > 50
    assert len(set(table["snippet_id"].to_pylist())) == table.num_rows
