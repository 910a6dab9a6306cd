"""Which plan a command takes: the one whose URI it is given, or the newest of a job's partition."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Batchllm
from support.fake_job import DS, document_rows, write_job, write_table

from batchllm_operator.errors import PlanError
from batchllm_operator.inspect import simulations as simulate


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "with a space"
    write_table(folder / "documents", document_rows())
    return write(folder)


def write(folder: Path, **changes: Any) -> Path:
    return write_job(folder, planner={"num_shards": 1}, **changes)


def test_every_command_finds_the_newest_plan(
    job: Path, batchllm: Batchllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = job.parent / "result.json"
    of_job = ("--job", job, "--ds", DS)
    first = batchllm("plan", *of_job).out.splitlines()[-1]
    write(job.parent, sampling={"max_tokens": 9})
    second = batchllm("plan", *of_job, "--result", result).out.splitlines()[-1]
    assert json.loads(result.read_text())["plan_uri"] == second != first
    assert batchllm("verify", *of_job).code == 5
    for command in (["run"], ["verify"], ["commit"], ["status"]):
        done = batchllm(*command, *of_job, "--result", result)
        assert done.code == 0, done.err
        assert json.loads(result.read_text())["plan_uri"] == second
        assert f"INFO: newest plan of job job, partition {DS}: {second}\n" in done.err
        assert "differ in" not in done.err
    write(job.parent)
    assert batchllm("plan", *of_job).out.splitlines()[-1] == first, "planned again, it is newest"
    asked: list[str] = []

    def ask(uri: str, *_: object) -> None:
        asked.append(uri)
        raise PlanError("enough")

    monkeypatch.setattr(simulate, "shard_to_simulate", ask)
    assert batchllm("simulate", *of_job).err.endswith("error: enough\n")
    assert asked == [first]
    done = batchllm("report", *of_job, "--result", result)
    assert json.loads(result.read_text())["plan_uri"] == second, "the one that is published"
    assert f"published plan of job job, partition {DS}: {second}\n" in done.err


def test_a_spec_that_has_changed_since_is_told(job: Path, batchllm: Batchllm) -> None:
    batchllm("plan", "--job", job, "--ds", DS)
    changes = {"engine": {"max_num_seqs": 7}, "prompt": {"template": "{query}"}}
    write(job.parent, **changes, max_failed_fraction=0.25)
    done = batchllm("status", "--job", job, "--ds", DS)
    assert done.code == 0
    assert (
        f"WARNING: {job} and that plan differ in engine.max_num_seqs, max_failed_fraction,"
        " prompt.template: the file has changed, or another release" in done.err
    )


def test_no_plan_yet(job: Path, batchllm: Batchllm) -> None:
    done = batchllm("run", "--job", job, "--ds", DS)
    assert done.code == 2
    assert done.err == (
        f"batchllm: error: job job, partition {DS}: there is no plan; run `batchllm plan --job"
        f" '{job}' --ds {DS}`\n"
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["run", "--job", "x"], "run: --job needs --ds"),
        (["commit", "--plan", "x", "--ds", DS], "commit: --ds goes with --job"),
        (["commit", "--plan", "x", "--job", "y"], "not allowed with argument --plan"),
        (["report", "--compare", "a", "b", "--ds", DS], "report: --ds goes with --job"),
        (["status"], "one of the arguments --plan --job is required"),
        ([], "arguments are required: COMMAND"),
        (
            ["gc", "--job", "x", "--dry"],
            "[--yes]\nbatchllm: error: gc: unrecognized arguments: --dry",
        ),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["schema", "nonsense"], "invalid choice: 'nonsense'"),
        (["report", "--compare", "a"], "--compare: expected 2 arguments"),
        (["run", "--plan", "x", "--worker", "-1"], "argument --worker: -1 isn't at least 0"),
        (["verify", "--plan", "x", "--num-workers", "0"], "--num-workers: 0 isn't at least 1"),
        (["run", "--plan", "x", "--worker", "x"], "--worker: invalid int value: 'x'"),
        (["simulate", "--ds", DS], "simulate: --ds goes with --job"),
        (["simulate", "--job", "x", "--ds", DS, "--degree", "2"], "--degree is for made-up"),
        (["verify", "--job", "x"], "verify: give --plan, or --job and --ds; or --record"),
        (["verify", "--job-json", "{}", "--ds", DS], "verify: give --plan, or --job"),
    ],
)
def test_arguments_that_do_not_go_together(
    batchllm: Batchllm, arguments: list[str], reason: str
) -> None:
    done = batchllm(*arguments)
    assert done.code == 2 and reason in done.err and "usage: batchllm" in done.err
