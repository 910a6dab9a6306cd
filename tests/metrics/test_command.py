"""`batchllm run` with metrics, scraped while it runs."""

import os
import socket
import urllib.request
from pathlib import Path
from urllib.error import URLError

import pytest
from conftest import Batchllm
from prometheus_client.parser import text_string_to_metric_families
from support.demo_job import wait_until
from support.fake_job import DS, document_rows, fake_spec, write_table
from support.fork_server import ForkServer

from batchllm_operator.metrics import ADDRESS_VARIABLE
from batchllm_operator.plan.plan_job import plan_job

NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
CLI = "batchllm_operator"
RUN = ("run", "--plan")


def plan(folder: Path) -> str:
    """The URI of a plan of one shard of 40 rows in 8 parts."""
    write_table(folder / "documents", document_rows(8, 5))
    engine = {"extra_args": {"delay_s": 0.1, "max_in_flight": 2}}
    return plan_job(fake_spec(folder, engine=engine, planner={"num_shards": 1}), DS).folder.uri


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def scrape(port: int) -> dict[str, float]:
    """Values by name and state; none while nobody listens, or before the shard has begun."""
    try:
        with NO_PROXY.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            text = response.read().decode()
    except (URLError, ConnectionError):
        return {}
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    assert {(s.labels["job_name"], s.labels["ds"], s.labels["worker"]) for s in samples} <= {
        ("job", DS, "0")
    }
    return {sample.name + sample.labels.get("state", ""): sample.value for sample in samples}


def test_a_run_is_scraped_while_it_goes_on(tmp_path: Path, commands: ForkServer) -> None:
    check_scraped(tmp_path, commands, by_environment=True)


def check_scraped(tmp_path: Path, commands: ForkServer, *, by_environment: bool) -> None:
    """A run's metrics are served, at the address that an argument or the environment gives."""
    port = free_port()
    arguments = [] if by_environment else ["--metrics-port", str(port)]
    # What the command line says counts.
    variable = {ADDRESS_VARIABLE: f"127.0.0.1:{port}" if by_environment else "0"}
    told: list[dict[str, float]] = []

    def is_half_done() -> bool:
        told.append(scrape(port))
        return 10 <= told[-1].get("batchllm_rows_done_total", 0) < 40

    with (tmp_path / "stderr").open("w") as stderr:
        run = [*RUN, plan(tmp_path), *arguments]
        process = commands.start(CLI, run, env={**os.environ, **variable}, stderr=stderr.fileno())
        wait_until(is_half_done, "some rows are done")
        code = process.wait(timeout=60)
    errors = (tmp_path / "stderr").read_text()
    assert code == 0, errors
    last = told[-1]
    assert last["batchllm_shard_rows"] == 40
    assert last["batchllm_shard_parts"] == 8
    assert last["batchllm_shard_staterunning"] == 1
    assert last["batchllm_output_tokens_total"] > 0
    assert last["batchllm_prompt_tokens_total"] <= last["batchllm_logical_tokens_total"]
    assert f"metrics: http://127.0.0.1:{port}/metrics" in errors
    assert scrape(port) == {}


@pytest.mark.parametrize(
    ("arguments", "variable", "named"),
    [
        (["--metrics-port", "x"], "", "--metrics-port: 'x'"),
        ([], "70000", f"{ADDRESS_VARIABLE}: '70"),
    ],
)
def test_a_wrong_address_is_refused(
    arguments: list[str],
    variable: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    batchllm: Batchllm,
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, variable)
    refused = batchllm("run", "--plan", "nowhere", *arguments)
    assert refused.code == 2
    assert named in refused.err
