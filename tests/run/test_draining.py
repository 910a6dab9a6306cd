"""SIGTERM to a run that has been told to finish its open parts."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.demo_job import wait_until
from support.fake_job import DS, document_rows, fake_spec, planned, write_table
from support.fork_server import ForkServer
from support.staged_job import NUM_PARTS, NUM_ROWS, Engines, plan_one_shard

from batchllm_operator.engine.fake import FakeEngine
from batchllm_operator.errors import Interrupted, SpecError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run import run_shards as run_module
from batchllm_operator.run.draining import Drain
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.reports import ShardReport
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan


@pytest.fixture
def plan_uri(tmp_path: Path) -> str:
    """One shard of six parts of five requests."""
    return plan_one_shard(str(tmp_path)).folder.uri


def parts(plan_uri: str) -> list[str]:
    return sorted(p.name for p in Path(plan_uri).glob("runs/shard-00000/*/part-?????.json"))


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def run(
    plan_uri: str, at: int, act: Callable[[], object] = terminate, limit_s: float = 60.0
) -> ShardReport:
    with Drain().on_sigterm(limit_s) as drain:
        return run_worker(plan_uri, start=Engines(at, act), drain=drain).shards[0]


def test_the_open_part_is_finished_and_no_other_begun(plan_uri: str) -> None:
    with pytest.raises(Interrupted):
        run(plan_uri, at=6)
    assert parts(plan_uri) == ["part-00000.json", "part-00001.json"]
    assert not (Path(plan_uri) / "runs/shard-00000/report.json").exists()
    report = run_worker(plan_uri).shards[0]
    assert report.num_resumed_parts == 2


def test_a_shard_that_is_finished_while_it_stops_is_finished(plan_uri: str) -> None:
    report = run(plan_uri, at=NUM_ROWS - 1)
    assert report.num_parts == NUM_PARTS == len(parts(plan_uri))


def terminate_twice() -> None:
    terminate()
    terminate()


def terminate_and_stay() -> None:
    terminate()
    threading.Event().wait(60)  # ended by the limit's signal


@pytest.mark.parametrize("act", [terminate_twice, terminate_and_stay])
def test_a_second_signal_and_the_limit_end_it_at_once(
    plan_uri: str, act: Callable[[], None]
) -> None:
    with pytest.raises(Interrupted):
        run(plan_uri, at=6, act=act, limit_s=60.0 if act is terminate_twice else 0.05)
    assert parts(plan_uri) == ["part-00000.json"]


def test_without_an_open_part_it_ends_at_once(plan_uri: str) -> None:
    def start(spec: Any, job: Any) -> FakeEngine:
        terminate()  # while the model is loaded
        raise AssertionError("went on")

    with pytest.raises(Interrupted), Drain().on_sigterm(60.0) as drain:
        run_worker(plan_uri, start=start, drain=drain)
    assert parts(plan_uri) == []


def test_signals_are_handled_as_before_afterwards(plan_uri: str) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)]
    with pytest.raises(Interrupted):
        run(plan_uri, at=6)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_number_of_gpus_is_the_tasks_unless_the_spec_has_its_own(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows())
    seen: list[int] = []

    def start(spec: Any, job: Any) -> FakeEngine:
        seen.append(spec.engine.tensor_parallel_size)
        return FakeEngine(spec, job.max_model_len)

    spec = fake_spec(tmp_path, engine={"tensor_parallel_size": 4})
    run_worker(plan_job(fake_spec(tmp_path), DS), start=start, num_gpus=2)
    run_worker(plan_job(fake_spec(tmp_path, name="planned"), DS), start=start)
    assert seen == [2, 1]
    fixed = plan_job(spec.model_copy(update={"name": "fixed"}), DS)
    with pytest.raises(SpecError, match="tensor_parallel_size is 4, but the task has 2 GPUs"):
        run_worker(fixed, start=start, num_gpus=2)
    run_worker(fixed, start=start, num_gpus=4)
    assert seen == [2, 1, 4]


@pytest.mark.parametrize(
    ("engine", "num_gpus", "expected"),
    [
        ({"replicas": 2}, 2, 1),
        ({"replicas": 2}, 4, 2),
        ({"replicas": 2, "extra_args": {"pipeline_parallel_size": 2}}, 4, 1),
        ({"extra_args": {"pipeline_parallel_size": 2}}, 4, 2),
        ({"replicas": 2, "tensor_parallel_size": 2}, 4, 2),
    ],
)
def test_replicas_share_the_tasks_gpus(
    tmp_path: Path, engine: dict[str, Any], num_gpus: int, expected: int
) -> None:
    plan = with_engine(tmp_path, engine)
    spec = run_module._with_gpus(plan, num_gpus).manifest.spec
    assert spec.engine.tensor_parallel_size == expected
    with pytest.raises(SpecError, match=r"has 3 GPUs, which they can't share|but the task has 3"):
        run_module._with_gpus(plan, 3)


def test_replicas_of_several_gpus_do_without_chains(tmp_path: Path) -> None:
    """The plan was to use them: a replica has to accept the spec of such a run."""
    planner = {"runahead": "on", "link_bytes_per_s": 1e9}
    plan = with_engine(tmp_path, {"replicas": 2}, planner)
    spec = run_module._with_gpus(plan, 4).manifest.spec
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert spec.engine.reason_against_chains is not None
    assert run_module._with_gpus(plan, 2) is plan


def with_engine(
    folder: Path, engine: dict[str, Any], planner: dict[str, Any] | None = None
) -> StoredPlan:
    """A plan, of which the manifest says that it is for vLLM with these settings."""
    plan = planned(folder, document_rows())
    spec = fake_spec(folder, engine={"backend": "vllm", **engine}, planner=planner or {})
    return replace(plan, manifest=plan.manifest.model_copy(update={"spec": spec}))


def test_the_command_drains_and_says_how_it_ended(tmp_path: Path, commands: ForkServer) -> None:
    engine = {"extra_args": {"delay_s": 0.1}}
    plan_uri = plan_one_shard(str(tmp_path), engine=engine).folder.uri
    command = ["run", "--plan", plan_uri, "--drain-s", "60"]
    with (tmp_path / "stderr").open("w") as stderr:
        process = commands.start("batchllm_operator", command, stderr=stderr.fileno())
        # The fake engine has requests of three parts by then.
        wait_until(lambda: parts(plan_uri), "the first part is finished")
        process.terminate()
        code = process.wait(timeout=60)
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert code == 143
    assert any("asked to stop: finishing" in line for line in lines), lines
    assert any("rows are finished and kept: give the same command" in line for line in lines)
    assert 1 < len(parts(plan_uri)) < 6


def test_a_part_that_is_being_written_is_finished(
    plan_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM while the last open part is uploaded."""
    publish = Folder.publish_file
    hit: list[str] = []

    def slow_upload(self: Folder, source: Path, name: str) -> None:
        if "/part-" in name and not hit:
            hit.append(name)
            terminate()
        publish(self, source, name)

    monkeypatch.setattr(Folder, "publish_file", slow_upload)
    with pytest.raises(Interrupted):
        run(plan_uri, at=-1)
    assert parts(plan_uri) == ["part-00000.json"]
