"""A run with a real engine that is stopped, and another that takes it up."""

import json
import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
from support.demo_job import DS, Demo, live_processes, wait_until


def check_stop_and_resume(demo: Demo, how: signal.Signals) -> None:
    """Nothing is left of what was stopped, and nothing that it finished is generated twice.

    The texts are those of a run that isn't stopped.
    """
    # Many parts and few requests at a time: there is something left to do at the first part.
    name = f"stop-{how.name.lower()}"
    changes = {
        "sampling": {"max_tokens": 16, "ignore_eos": True},
        "planner": {"part_rows": 4},
        "max_failed_fraction": 0.1,
    }
    spec = demo.write_spec(name, engine={"max_num_seqs": 4}, **changes)
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
    names = ["snippet_id", "generated_text"]
    table = pq.read_table(demo.folder / f"out-{name}", columns=names)
    assert committed["num_rows_out"] + committed["num_failed_rows"] == table.num_rows
    assert table.equals(demo.run_job(f"whole-{name}", **changes).table.select(names))
