"""`batchllm run --worker`, with one engine or with replicas that are processes of their own."""

import argparse
import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import Batchllm
from support.demo_job import live_processes, wait_until
from support.fake_job import DS, document_rows, write_job, write_table
from support.fork_server import ForkServer

from batchllm_operator.commands import replicas
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.spec import load_spec

CLI = "batchllm_operator"
NUM_SHARDS = 8


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., str]:
    """Plans 40 rows in 8 shards, for the fake engine; returns the plan's URI."""

    def make(**engine: Any) -> str:
        write_table(tmp_path / "documents", document_rows(8, 5))
        path = write_job(tmp_path, engine=engine, planner={"num_shards": NUM_SHARDS})
        return plan_job(load_spec(path), DS).folder.uri

    return make


def reports(uri: str) -> list[Path]:
    return sorted((Path(uri) / "runs").glob("*/report.json"))


def check_published(tmp_path: Path) -> None:
    keys = pq.read_table(tmp_path / "out")["row_key"].to_pylist()
    assert keys == [row["row_key"] for row in document_rows(8, 5)]


def test_workers_share_a_plan(
    make_plan: Callable[..., str], batchllm: Batchllm, tmp_path: Path
) -> None:
    uri, result = make_plan(), tmp_path / "result.json"
    done = batchllm("run", "--plan", uri, "--worker", 1, "--num-workers", 2, "--result", result)
    assert done.code == 0
    found = json.loads(result.read_text())
    assert found["num_rows"] == 40
    assert found["shard_idxs"] == list(range(NUM_SHARDS))
    assert found["num_finished"] == found["num_shards"] == NUM_SHARDS
    again = batchllm("run", "--plan", uri, "--worker", 0, "--num-workers", 2)
    assert again.code == 0 and "0 shards" in again.out
    assert batchllm("verify", "--plan", uri, "--worker", 0, "--num-workers", 2).code == 0
    assert batchllm("commit", "--plan", uri).code == 0
    check_published(tmp_path)


def test_a_worker_that_came_later_helps_the_others(
    make_plan: Callable[..., str], batchllm: Batchllm, tmp_path: Path
) -> None:
    """A Job that is scaled up has pods with indexes beyond the number in their arguments."""
    uri, later = make_plan(), ["--worker", 3, "--num-workers", 2]
    done = batchllm("run", "--plan", uri, *later)
    assert done.code == 0 and f"worker 3: {NUM_SHARDS} shards" in done.out
    assert batchllm("verify", "--plan", uri, *later).code == 0
    assert batchllm("status", "--plan", uri).code == 0
    assert batchllm("commit", "--plan", uri).code == 0
    check_published(tmp_path)


def test_replicas_are_workers_in_one_pod(
    make_plan: Callable[..., str], commands: ForkServer, batchllm: Batchllm, tmp_path: Path
) -> None:
    uri, result = make_plan(replicas=2, extra_args={"delay_s": 0.05}), tmp_path / "result.json"
    run = ["run", "--plan", uri, "--worker", "0", "--num-workers", "1", "--result", str(result)]
    done = commands.run(CLI, run)
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert (found["worker"], found["num_workers"], found["num_rows"]) == (0, 1, 40)
    assert sorted(found["shard_idxs"]) == list(range(NUM_SHARDS))
    claims = [json.loads(p.read_bytes()) for p in (Path(uri) / "runs").glob("*/*/claim.json")]
    assert {claim["worker"] for claim in claims} == {0, 1}
    assert len({claim["process_id"] for claim in claims}) == 2
    assert len({claim["owner"].rpartition("/")[0] for claim in claims}) == 1
    assert batchllm("commit", "--plan", uri).code == 0
    check_published(tmp_path)
    shutil.rmtree(Path(uri) / "runs")  # as `gc` removes what a commit no longer needs
    assert commands.run(CLI, run).returncode == 0
    found = json.loads(result.read_text())
    assert (found["num_finished"], found["shard_idxs"]) == (NUM_SHARDS, [])


def test_replicas_that_all_fail_cost_nothing_once_others_have_run_all(
    make_plan: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = make_plan()
    run_worker(uri)
    monkeypatch.setattr(replicas, "start_command", lambda *_: subprocess.Popen(["false"]))
    args = argparse.Namespace(
        worker=0, num_workers=1, owner=None, drain_s=0.0, num_gpus=None, metrics=None
    )
    result = replicas.run_replicas(args, uri, [{}, {}])
    assert (result["num_finished"], result["shard_idxs"]) == (NUM_SHARDS, [])


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_replicas_end_with_their_worker(
    how: signal.Signals,
    make_plan: Callable[..., str],
    commands: ForkServer,
    batchllm: Batchllm,
    tmp_path: Path,
) -> None:
    uri = make_plan(replicas=2, extra_args={"delay_s": 0.1})
    process = commands.start(CLI, ["run", "--plan", uri, "--worker", "0", "--num-workers", "1"])
    wait_until(lambda: reports(uri), "the first shard is finished")
    replicas = live_processes(process.pid)
    process.send_signal(how)
    assert process.wait(timeout=30) == (128 + how if how is signal.SIGTERM else -how)
    wait_until(lambda: not live_processes(process.pid), "no replica is left", 10.0)
    assert len(reports(uri)) < NUM_SHARDS
    assert replicas
    fast = ["run", "--plan", uri, "--worker", "4", "--num-workers", "5"]
    assert batchllm(*fast).code == 0
    assert batchllm("commit", "--plan", uri).code == 0
    check_published(tmp_path)
