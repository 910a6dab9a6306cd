"""`batchllm job`: all stages in one command, and what a second call does again."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
import yaml
from support.demo_job import live_processes, wait_until
from support.fake_job import DS, JobFolder
from support.fork_server import ForkServer

from batchllm_operator import commit_run, load_spec, plan_job, run_worker

CLI = "batchllm_operator"


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    job = JobFolder(tmp_path)
    job.write_rows(DS)
    return job


def test_one_command_does_a_whole_job_and_another_nothing_again(
    job: JobFolder, commands: ForkServer
) -> None:
    spec, result = job.write_spec("job"), job.path / "result.json"
    arguments = ["job", "--job", spec, "--ds", DS, "--result", str(result)]
    first = commands.run(CLI, arguments)
    assert first.returncode == 0, first.stderr
    job.check_published("job")
    worker, published = (
        line for line in first.stdout.splitlines() if line.startswith(("worker ", "published"))
    )
    assert worker.startswith("worker 0: 2 shards, 12 rows, 0 failed; ")
    assert published.startswith("published in ")
    figures = json.loads(result.read_bytes())
    assert (figures["num_shards"], figures["num_rows_out"]) == (2, 12)
    (file,) = job.partition("job").iterdir()
    before = file.stat().st_mtime_ns
    second = commands.run(CLI, arguments)
    assert second.returncode == 0, second.stderr
    assert file.stat().st_mtime_ns == before


def test_one_command_goes_through_all_rounds(job: JobFolder, commands: ForkServer) -> None:
    spec = yaml.safe_load(Path(job.write_spec("job")).read_text())
    del spec["prompt"], spec["sampling"]
    spec["prompts"] = {
        "topic": {"template": "{document} {query}"},
        "title": {"template": "{document} {topic}", "when": "topic.num_output_tokens > 0"},
    }
    (job.path / "rounds.yaml").write_text(yaml.safe_dump(spec))
    arguments = ["--job", str(job.path / "rounds.yaml"), "--ds", DS]
    done = commands.run(CLI, ["job", *arguments])
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("round ")] == [
        "round 1 of 2: topic",
        *(line for line in done.stdout.splitlines() if line.startswith("round 2 of 2: title; ")),
    ]
    assert "24 answers to 2 prompts: 24 out, 0 failed" in done.stdout
    status = commands.run(CLI, ["status", *arguments])
    assert "round 2 of 2, 12/12 (100 %) answers, committed" in status.stdout


def test_one_prompt_is_asked_again_by_command(job: JobFolder, commands: ForkServer) -> None:
    spec = yaml.safe_load(Path(job.write_spec("job")).read_text())
    del spec["prompt"], spec["sampling"]
    path, result = job.path / "job.yaml", job.path / "result.json"
    arguments = ["job", "--job", str(path), "--ds", DS, "--result", str(result)]
    published = []
    for template, only in (("{document}", []), ("{query}", ["--only", "topic"])):
        spec["prompts"] = {"topic": {"template": template}, "title": {"template": "{document}"}}
        path.write_text(yaml.safe_dump(spec))
        done = commands.run(CLI, [*arguments, *only])
        assert done.returncode == 0, done.stderr
        published.append(job.published("job"))
    assert "12 rows published, 0 of 24 answers failed" in done.stdout
    figures = json.loads(result.read_bytes())
    assert (figures["num_reused_rows"], figures["num_requests"]) == (12, 3)
    for before, after in zip(*published, strict=True):
        assert after["title"] == before["title"]
        assert after["topic"]["generated_text"] != before["topic"]["generated_text"]


def test_a_shard_that_fails_ends_the_job_with_its_reason_and_exit_code(
    job: JobFolder, commands: ForkServer
) -> None:
    rows = [
        {"row_key": f"{idx}", "document": f"{'AB'[idx // 6]} text", "query": f"q{idx}"}
        for idx in range(12)
    ]
    job.write_rows(DS, rows)
    deadly = {"fatal_token_id": ord("B"), "max_in_flight": 1}
    arguments = ["--job", job.write_spec("job", engine={"extra_args": deadly}), "--ds", DS]
    assert commands.run(CLI, ["plan", *arguments]).returncode == 0
    runs = job.plan("job") / "runs"
    alone = commands.run(CLI, ["run", *arguments])
    run = commands.run(CLI, ["job", *arguments])
    assert run.returncode == alone.returncode != 0
    (error,) = [line for line in run.stderr.splitlines() if "error: " in line]
    assert "engine died" in error
    assert error.partition(";")[0] in alone.stderr
    assert (runs / "shard-00000" / "report.json").exists()
    assert not (runs / "shard-00001" / "report.json").exists()
    assert not job.partition("job").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_job_leaves_no_process_and_goes_on(
    job: JobFolder, commands: ForkServer, number: signal.Signals
) -> None:
    spec = job.write_spec(
        "job",
        engine={"extra_args": {"delay_s": 0.3, "max_in_flight": 1}},
        planner={"num_shards": 1, "part_rows": 3},
    )
    process = commands.start(CLI, ["job", "--job", spec, "--ds", DS])
    outputs = job.path / "job" / "_batchllm" / "job" / DS
    wait_until(lambda: list(outputs.rglob("part-*.json")), "the first part is written")
    process.send_signal(number)
    assert process.wait() == 128 + number
    assert not live_processes(process.pid)
    done = len(list(outputs.rglob("part-*.json")))
    assert 0 < done < 4
    again = commands.run(CLI, ["job", "--job", spec, "--ds", DS])
    assert again.returncode == 0, again.stderr
    (report,) = (json.loads(each.read_bytes()) for each in outputs.rglob("runs/*/report.json"))
    assert (report["num_parts"], report["num_resumed_parts"]) == (4, done)
    job.check_published("job")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_stopped_while_its_worker_starts_ends_with_one_line(
    job: JobFolder, commands: ForkServer, number: signal.Signals
) -> None:
    spec = job.write_spec("job", engine={"extra_args": {"delay_s": 0.3}})
    with (job.path / "stderr").open("w") as stderr:
        arguments = ["job", "--job", spec, "--ds", DS]
        process = commands.start(CLI, arguments, stderr=stderr.fileno())
        wait_until(lambda: len(live_processes(process.pid)) > 1, "the worker's process starts")
        process.send_signal(number)
        code = process.wait()
    lines = (job.path / "stderr").read_text().splitlines()
    assert code == 128 + number, lines
    assert not any("Traceback" in line for line in lines), lines
    assert len([line for line in lines if f"stopped by signal {number}" in line]) == 1


def test_stages_are_imported_from_the_top_which_is_light() -> None:
    code = (
        "import sys, batchllm_operator\n"
        "assert not {'pydantic', 'numpy', 'pyarrow'} & {*sys.modules}\n"
        "assert {*batchllm_operator.__all__} <= {*dir(batchllm_operator)}\n"
        "from batchllm_operator import commit_run, load_spec, plan_job, run_worker\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("form", [str, Path, "fields", "spec"])
def test_stages_take_a_spec_in_any_form_a_date_and_the_plan(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch, form: Callable[[str], object] | str
) -> None:
    monkeypatch.chdir(job.path)  # where relative paths of fields start
    file = job.write_spec("job")
    forms = {"fields": yaml.safe_load(Path(file).read_text()), "spec": load_spec(file)}
    spec = forms[form] if isinstance(form, str) else form(file)
    plan = plan_job(spec, date.fromisoformat(DS))
    assert run_worker(plan).num_finished == 2
    assert commit_run(plan).num_rows_out == 12
    assert commit_run(Path(plan.folder.uri)) == commit_run(plan.folder.uri)
    job.check_published("job")
