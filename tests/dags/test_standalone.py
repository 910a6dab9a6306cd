"""`make airflow` from outside: API, lake table, pods, and the pages in a browser.

One Airflow for all, so its runs lead from test to test.
"""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from support.browser import LOOKS, Tab
from support.demo_job import wait_until
from support.fake_job import document_rows
from support.pod_runs import KEY, LIMIT_S, PodRun, freeze, secrets_of_jobs
from support.standalone import API_S, POLL_S, Standalone, free_port, script_env, start_script

ARRIVED = "2026-02-01"
POD_DAY = "2026-03-01"


@pytest.fixture(scope="module")
def arrival(standalone: Standalone) -> None:
    """A partition arrives, of whose rows two can't be answered. Two days are at work at a time."""
    rows = document_rows(6, 5)
    rows[3] = {**rows[3], "document": None}
    rows[8] = {**rows[8], "document": "<b>far too long</b> " * 1000}
    standalone.job.write_rows(ARRIVED, rows)
    standalone.trigger("documents_arrive", conf={"ds": ARRIVED})


@pytest.fixture(scope="module")
def scheduled(standalone: Standalone, arrival: None) -> str:
    """The run of yesterday, which has started by itself and succeeded."""
    (run,) = standalone.wait_for_runs("daily_snippets", lambda run: run["run_type"] == "scheduled")
    return str(run["dag_run_id"])


@pytest.fixture(scope="module")
def arrived(standalone: Standalone, arrival: None) -> str:
    """The run of that partition, which an event has started."""
    (run,) = standalone.wait_for_runs(
        "snippets_on_arrival", lambda run: run["conf"] == {"ds": ARRIVED}
    )
    return str(run["dag_run_id"])


@pytest.fixture(scope="module")
def in_pods(standalone: Standalone) -> PodRun:
    """A run whose pods have been frozen, each after a part."""
    return PodRun.started(standalone, "deferring", POD_DAY)


def test_the_printed_password_is_the_only_one_that_lets_in(standalone: Standalone) -> None:
    password = standalone.printed("password")
    assert standalone.log_in(password).status_code == 201
    assert standalone.log_in(password + "x").status_code == 401
    assert httpx.get(standalone.url + "/api/v2/dags", trust_env=False).status_code == 401


def test_a_day_that_is_over_is_run_and_committed(standalone: Standalone, scheduled: str) -> None:
    (run,) = standalone.runs("daily_snippets")
    standalone.job.check_published("daily_snippets", run["logical_date"][:10])
    tasks = standalone.tasks("daily_snippets", scheduled)
    assert {task["task_id"].rpartition(".")[2]: task["pool"] for task in tasks} == {
        "plan": "default_pool",
        "generate": "batchllm_gpu",
        "commit": "default_pool",
        "report": "default_pool",
    }


def test_a_partition_that_arrives_is_run(standalone: Standalone, arrived: str) -> None:
    rows = standalone.job.published("daily_snippets", ARRIVED)
    assert (len(rows), sum(row["error"] is not None for row in rows)) == (30, 2)
    (extra,) = [
        event["extra"] for event in standalone.events("snippets") if event["extra"]["ds"] == ARRIVED
    ]
    counts = ("num_rows_in", "num_rows_out", "num_failed_rows")
    assert tuple(extra[name] for name in counts) == (30, 28, 2)
    plan = standalone.job.plan("daily_snippets", ARRIVED)
    assert (extra["plan_uri"], extra["report_uri"]) == (str(plan), f"{plan}/report.json")


def test_the_plugin_is_whole_and_links_a_task_to_its_page(
    standalone: Standalone, scheduled: str
) -> None:
    plugins = standalone.api("GET", "/api/v2/plugins")["plugins"]
    (plugin,) = (each for each in plugins if each["name"] == "batchllm")
    assert len(plugin["external_views"]) == 2
    assert standalone.api("GET", "/api/v2/plugins/importErrors")["total_entries"] == 0
    task = f"dagRuns/{scheduled}/taskInstances/snippets.generate"
    links = standalone.api("GET", f"/api/v2/dags/daily_snippets/{task}/links")["extra_links"]
    run = f"/batchllm/dags/daily_snippets/runs/{quote(scheduled, safe='')}"
    assert links == {"Live progress": f"{run}/tasks/snippets.generate/-1"}
    report = standalone.page(run)
    assert "report.html" in report and "<script" not in report
    assert standalone.page(links["Live progress"]) == report  # after the commit
    stranger = httpx.get(
        standalone.url + run,
        headers={"accept": "text/html"},
        follow_redirects=True,
        timeout=API_S,
        trust_env=False,
    )
    assert stranger.url.path == "/auth/login" and "daily_snippets" not in stranger.text


# The browser


def address(dag_id: str, run_id: str, more: str = "") -> str:
    return f"/batchllm/dags/{dag_id}/runs/{quote(run_id, safe='')}{more}"


@pytest.fixture(scope="module")
def signed_in(standalone: Standalone, chromium: Any) -> Any:
    """What a browser keeps of a login through Airflow's form, begun at one of our pages."""
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{standalone.url}/batchllm/")
    page.wait_for_url("**/auth/login?next=**")
    page.fill("input[name=username]", standalone.printed("user"))
    page.fill("input[name=password]", standalone.printed("password"))
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/batchllm/")
    assert page.get_by_role("heading", name="BatchLLM jobs").is_visible()
    state = context.storage_state()
    context.close()
    return state


@pytest.fixture(params=LOOKS[:1])
def tab(
    request: pytest.FixtureRequest, standalone: Standalone, chromium: Any, signed_in: Any
) -> Iterator[Tab]:
    """A page of somebody who has logged in."""
    width, scheme = request.param
    context = chromium.new_context(
        base_url=standalone.url,
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        storage_state=signed_in,
    )
    context.set_default_timeout(1000 * LIMIT_S)
    yield Tab(context.new_page())
    context.close()


def test_from_airflows_pages_to_the_report(tab: Tab, arrived: str) -> None:
    page = tab.page
    page.goto("/")
    page.get_by_role("link", name="Dags", exact=True).first.click()
    page.locator("a[href$='/dags/snippets_on_arrival']").first.click()
    page.get_by_role("link", name="Runs", exact=True).click()
    page.get_by_role("link", name=arrived, exact=True).first.click()
    page.get_by_role("link", name="BatchLLM", exact=True).click()
    shown = page.frame_locator("iframe")
    shown.get_by_role("heading", name=f"daily_snippets, {ARRIVED}").wait_for()
    terms = shown.locator("dl.figures dt").all_inner_texts()
    figures = dict(zip(terms, shown.locator("dl.figures dd").all_inner_texts(), strict=True))
    assert figures["Rows in"] == "30"
    assert figures["Failed"].split()[0] == "2"
    assert shown.get_by_role("cell", name="column 'document' is null").first.is_visible()
    tab.screenshot("in-airflow")

    page.get_by_role("button", name="Browse").click()
    page.get_by_role("menuitem", name="BatchLLM").click()
    card = shown.get_by_role("region", name="daily_snippets").filter(has_text="on_arrival").first
    assert "committed" in card.inner_text()
    card.get_by_role("link", name="daily_snippets", exact=True).click()
    shown.get_by_role("heading", name=f"daily_snippets, {ARRIVED}").wait_for()

    page.goto(f"/dags/snippets_on_arrival/runs/{arrived}")
    task = page.get_by_role("link", name="snippets.generate", exact=True).first
    page.goto(task.get_attribute("href"))  # where it stands changes
    page.get_by_role("link", name="Details", exact=True).click()
    page.get_by_role("link", name="Live progress").click()
    page.get_by_role("heading", name=f"daily_snippets, {ARRIVED}").wait_for()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download this report").click()
    assert download.value.suggested_filename == f"daily_snippets-{ARRIVED}.html"
    html = Path(download.value.path()).read_text()
    assert f"daily_snippets, {ARRIVED}" in html and "<script" not in html
    tab.check()


@pytest.mark.parametrize("tab", LOOKS, indirect=True)
def test_pages_can_be_read_by_everybody_everywhere(tab: Tab, scheduled: str, arrived: str) -> None:
    ref, other = (
        quote(f"{dag_id}/{run_id}/snippets.plan/-1", safe="")
        for dag_id, run_id in (("daily_snippets", scheduled), ("snippets_on_arrival", arrived))
    )
    for name, path in (
        ("jobs", "/batchllm/"),
        ("report", address("snippets_on_arrival", arrived)),
        ("comparison", f"/batchllm/compare?before={ref}&after={other}"),
    ):
        tab.page.goto(path)
        for each in tab.page.locator("summary").all():
            each.click()
        assert tab.serious_findings() == []
        assert tab.sideways_px() <= 0
        tab.screenshot(name)
        tab.page.keyboard.press("Tab")
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert tab.page.evaluate(outline) == "solid", "it is seen where the keyboard is"
    tab.check()


# Pods


@pytest.fixture(scope="module")
def frozen(in_pods: PodRun) -> list[str]:
    """Its pods, one for each worker, while the task is deferred."""
    pods = freeze(in_pods)
    in_pods.wait_until_parked()
    return pods


def test_shards_are_generated_while_their_task_is_deferred(
    standalone: Standalone, in_pods: PodRun, frozen: list[str]
) -> None:
    in_pods.wait(
        lambda: any("of 2 workers run" in line for line in in_pods.log()), "a line of progress"
    )
    assert in_pods.task["state"] == "deferred"
    (secret,) = secrets_of_jobs(standalone)
    assert all(pod.startswith(secret) for pod in frozen)


@pytest.fixture(scope="module")
def replacement(in_pods: PodRun, frozen: list[str]) -> str:
    """The pod in place of worker 1's, which has been evicted; it waits for its image.

    Worker 0 stands still until then, or it would do the shard itself.
    """
    agent = in_pods.airflow.cluster.agent
    agent.hold_images("job:1")
    agent.evict(frozen[1])
    in_pods.wait(lambda: len(in_pods.pods(1)) == 2, "another pod")
    return in_pods.pod(1)


def test_progress_moves_until_the_report_takes_its_place(
    tab: Tab, in_pods: PodRun, frozen: list[str], replacement: str
) -> None:
    """The replacement goes on, and then the other pod."""
    page, run = tab.page, address("deferring", in_pods.run_id)
    page.goto(f"{run}/tasks/job.generate/-1")
    page.wait_for_url("**/jobs/**")
    page.emulate_media(color_scheme="dark")
    assert tab.serious_findings() == []
    page.goto(run)
    page.evaluate("window.loadedOnce = true")
    assert "Output tokens per second" in page.locator("#live").inner_text()
    assert tab.serious_findings() == []
    tab.screenshot("progress")
    page.set_viewport_size({"width": 390, "height": 900})
    assert tab.sideways_px() <= 0
    tab.screenshot("progress")
    done = page.locator("#live progress").first
    before = float(done.get_attribute("value") or 0)
    in_pods.airflow.cluster.agent.release_images("job:1")
    in_pods.wait(lambda: float(done.get_attribute("value") or 0) > before, "more rows are done")
    assert page.evaluate("window.loadedOnce")
    in_pods.thaw(frozen[0])
    in_pods.check_success()
    page.get_by_role("heading", name="What was saved").wait_for()
    tab.check()


def test_a_pod_that_is_evicted_is_replaced(
    standalone: Standalone, in_pods: PodRun, frozen: list[str], replacement: str
) -> None:
    """In the same try, and it goes on where the other one was."""
    if not in_pods.is_ending(0, frozen[0]):
        before = in_pods.parts(1)
        standalone.cluster.agent.release_images("job:1")
        in_pods.wait(lambda: in_pods.parts(1) != before, "the replacement has gone on")
        in_pods.thaw(frozen[0])
    in_pods.check_success()
    assert in_pods.num_resumed_parts(1) >= 1
    assert replacement not in frozen
    assert in_pods.task["try_number"] == 1
    assert sum(line.startswith("Made Job ") for line in in_pods.log()) == 1


def test_neither_database_nor_logs_hold_a_credential(standalone: Standalone) -> None:
    """After all the runs above."""
    tokens = [standalone.cluster.proxy.token, KEY]
    files = [*standalone.home.glob("airflow.db*"), *standalone.home.rglob("*.log")]
    assert len(files) > 10
    for file in files:
        content = file.read_bytes()
        assert [token for token in tokens if token.encode() in content] == [], file
    wait_until(lambda: not secrets_of_jobs(standalone), "Secrets go with their Jobs", poll_s=POLL_S)


# What the script refuses


def test_a_second_one_in_the_same_place_is_refused(standalone: Standalone) -> None:
    run = start_script({**standalone.env, "PORT": str(free_port())})
    assert run.returncode == 1
    assert f"running in {standalone.home}" in run.stderr
    assert standalone.process.poll() is None


def test_a_busy_port_is_said_at_once(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        run = start_script(script_env(tmp_path / "home", port))
    assert run.returncode == 1
    assert run.stderr == f"airflow: port {port} is in use; choose another one with PORT=\n"
    assert not (tmp_path / "home" / "airflow.db").exists()


@pytest.mark.parametrize("port", ["http", "0", "65536", "80 80", " "])
def test_what_is_no_port_is_refused_and_a_command_needs_an_airflow(
    tmp_path: Path, port: str
) -> None:
    run = start_script({**script_env(tmp_path / "home", 1), "PORT": port})
    assert (run.returncode, "is not a port" in run.stderr) == (2, True)
    run = start_script(script_env(tmp_path / "home", 8080), "dags", "list")
    assert (run.returncode, "make airflow" in run.stderr) == (1, True)
