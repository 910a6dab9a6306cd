"""The pages in a running Airflow, as somebody with a browser gets to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from support.browser import SCHEMES, WIDTHS, Tab
from support.demo_job import wait_until
from support.fake_job import document_rows, job_fields, write_table
from support.standalone import POLL_S, Standalone, free_port, script_env

from batchllm_operator.pipeline.plan import plan_job
from batchllm_operator.spec import load_spec

BEFORE, DAY, SLOW_DAY = "2026-01-30", "2026-01-31", "2026-02-01"
LIMIT_S = 300.0  # for anything; nothing takes a tenth of it on a machine that is quiet
_DAG = """
from airflow.sdk import DAG
from batchllm_operator.operators import batchllm_task_group

with DAG("snippets", schedule=None, is_paused_upon_creation=False):
    batchllm_task_group({spec!r})
"""


@dataclass(frozen=True)
class Snippets(Standalone):
    """An Airflow with one DAG, `snippets`, that has run for two days."""

    folder: Path

    def write_spec(self, **engine: Any) -> None:
        write_spec(self.folder, **engine)

    def trigger(self, ds: str) -> str:
        """Run the DAG for a day; the id of the run."""
        self.command("dags", "trigger", "snippets", "--logical-date", ds, "--run-id", f"of+{ds}")
        return f"of+{ds}"

    def wait_for(self, ds: str) -> None:
        self.wait_for_runs("snippets", lambda run: run["dag_run_id"] == f"of+{ds}", 1, LIMIT_S)

    def report(self, ds: str) -> dict[str, Any]:
        """What the job says of the day."""
        (path,) = (self.folder / "out" / "_batchllm" / "job" / ds).glob("plan-*/report.json")
        return dict(json.loads(path.read_bytes()))


def write_spec(folder: Path, **engine: Any) -> Path:
    path = folder / "job.yaml"
    fields = job_fields(str(folder), engine={"extra_args": engine}, max_failed_fraction=0.9)
    path.write_text(yaml.safe_dump(fields))
    return path


@pytest.fixture(scope="module")
def airflow(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snippets]:
    """Airflow with the pages. Of its second day some rows have failed."""
    folder = tmp_path_factory.mktemp("browser")
    rows = document_rows(6, 5)
    write_table(folder / "documents", rows[:20], ds=BEFORE)
    write_table(folder / "documents", rows, ds=SLOW_DAY)
    rows[3] = {**rows[3], "document": None}
    rows[8] = {**rows[8], "document": "<b>far too long</b> " * 1000}
    write_table(folder / "documents", rows, ds=DAY)
    dags = folder / "dags"
    dags.mkdir()
    (dags / "snippets.py").write_text(_DAG.format(spec=str(write_spec(folder))))
    env = script_env(
        folder / "airflow home",
        free_port(),
        BATCHLLM_SPEC_DIR=str(folder),
        BATCHLLM_DAG_DIR=str(dags),
        BATCHLLM_PROGRESS_OBJECT_INTERVAL_S="0.5",
    )
    # In a new checkout the planner's loops are compiled first, and by each process that needs them.
    plan_job(load_spec(folder / "job.yaml"), BEFORE)
    with Snippets.started(env, folder / "output", folder=folder) as found:
        found.command("dags", "unpause", "snippets", "--yes")
        for ds in (BEFORE, DAY):
            found.trigger(ds)
        for ds in (BEFORE, DAY):
            found.wait_for(ds)
        yield found


@pytest.fixture(scope="module")
def signed_in(airflow: Snippets, chromium: Any) -> Any:
    """What a browser keeps of a login through Airflow's form, begun at one of our pages."""
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{airflow.url}/batchllm/")
    page.wait_for_url("**/auth/login?next=**")
    page.fill("input[name=username]", airflow.printed("user"))
    page.fill("input[name=password]", airflow.printed("password"))
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/batchllm/")
    assert page.get_by_role("heading", name="BatchLLM jobs").is_visible()
    state = context.storage_state()
    context.close()
    return state


@pytest.fixture
def tab(airflow: Snippets, chromium: Any, signed_in: Any) -> Iterator[Tab]:
    """A page of somebody who has logged in, as wide as a desk's."""
    yield from open_tab(airflow, chromium, signed_in, 1280, "light")


@pytest.fixture(params=[(width, scheme) for width in WIDTHS for scheme in SCHEMES])
def any_tab(
    request: pytest.FixtureRequest, airflow: Snippets, chromium: Any, signed_in: Any
) -> Iterator[Tab]:
    """The same on a desk and on a phone, light and dark."""
    yield from open_tab(airflow, chromium, signed_in, *request.param)


def open_tab(
    airflow: Snippets, chromium: Any, signed_in: Any, width: int, scheme: str
) -> Iterator[Tab]:
    context = chromium.new_context(
        base_url=airflow.url,
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        storage_state=signed_in,
    )
    context.set_default_timeout(1000 * LIMIT_S)
    yield Tab(context.new_page())
    context.close()


def address(ds: str, more: str = "") -> str:
    return f"/batchllm/dags/snippets/runs/{quote(f'of+{ds}', safe='')}{more}"


def ref(ds: str) -> str:
    return quote(f"snippets/of+{ds}/batchllm.plan/-1", safe="")


def test_from_the_list_of_dags_to_the_report(airflow: Snippets, tab: Tab) -> None:
    page, report = tab.page, airflow.report(DAY)
    page.goto("/")
    page.get_by_role("link", name="Dags", exact=True).first.click()
    page.get_by_role("link", name="snippets", exact=True).first.click()
    page.get_by_role("link", name="Runs", exact=True).click()
    page.get_by_role("link", name=f"of+{DAY}", exact=True).first.click()
    page.get_by_role("link", name="BatchLLM", exact=True).click()
    shown = page.frame_locator("iframe")
    shown.get_by_role("heading", name=f"job, {DAY}").wait_for()
    figures = dict(
        zip(
            shown.locator("dl.figures dt").all_inner_texts(),
            shown.locator("dl.figures dd").all_inner_texts(),
            strict=True,
        )
    )
    assert report["num_rows_failed"] == 2
    assert figures["Rows in"] == "30"
    assert figures["Failed"].split()[0] == "2"
    saved = f"{100 * report['achieved_saving_ratio']:.1f}"
    assert figures["Saved"].startswith(saved)
    assert shown.get_by_role("cell", name="null_value: column 'document' is null").is_visible()
    tab.screenshot("in-airflow")
    tab.check()


def test_from_a_generate_task_to_its_shard(tab: Tab) -> None:
    """Whose run is over, so the link leads to the report."""
    page = tab.page
    page.goto(f"/dags/snippets/runs/of+{DAY}")
    page.get_by_role("link", name="batchllm.generate", exact=True).first.click()
    page.get_by_role("link", name="Details", exact=True).click()
    page.get_by_role("link", name="Live progress").click()
    page.get_by_role("heading", name=f"job, {DAY}").wait_for()
    tab.check()


def test_from_the_menu_to_the_jobs_and_back_to_a_run(airflow: Snippets, tab: Tab) -> None:
    page = tab.page
    page.goto("/")
    page.get_by_role("button", name="Browse").click()
    page.get_by_role("menuitem", name="BatchLLM").click()
    shown = page.frame_locator("iframe")
    card = shown.get_by_role("region", name="job", exact=True)
    assert "committed" in card.inner_text()
    assert f"{100 * airflow.report(DAY)['achieved_saving_ratio']:.1f}" in card.inner_text()
    trend = card.get_by_role("img").first.get_attribute("aria-label")
    assert trend.startswith("Saving ratio of the last 2 partitions")
    card.get_by_text("The last 2 runs of job").click()
    card.get_by_role("link", name=f"Compare of+{DAY} with {BEFORE}").click()
    shown.get_by_role("heading", name=f"job {BEFORE} and job {DAY}").wait_for()
    assert shown.get_by_role("row", name="Rows in").inner_text().split()[2:5] == [
        "20",
        "30",
        "+50.0",
    ]
    shown.get_by_role("link", name="Jobs").click()
    card.get_by_role("link", name="job", exact=True).click()
    shown.get_by_role("heading", name=f"job, {DAY}").wait_for()
    tab.check()


def test_a_report_is_downloaded_as_the_file_that_it_is(tab: Tab) -> None:
    page = tab.page
    page.goto(address(DAY))
    with page.expect_download() as download:
        page.get_by_role("link", name="Download this report").click()
    assert download.value.suggested_filename == f"job-{DAY}.html"
    html = Path(download.value.path()).read_text()
    assert f"job, {DAY}" in html and "<script" not in html
    tab.check()


PAGES = {
    "jobs": "/batchllm/",
    "report": address(DAY),
    "comparison": f"/batchllm/compare?before={ref(BEFORE)}&after={ref(DAY)}",
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_can_be_read_by_everybody_everywhere(any_tab: Tab, name: str) -> None:
    any_tab.page.goto(PAGES[name])
    for each in any_tab.page.locator("summary").all():
        each.click()
    assert any_tab.serious_findings() == []
    assert any_tab.sideways_px() <= 0
    any_tab.screenshot(name)
    any_tab.page.keyboard.press("Tab")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert any_tab.page.evaluate(outline) == "solid", "it is seen where the keyboard is"
    any_tab.check()


@pytest.mark.parametrize(
    "path",
    [
        *PAGES.values(),
        address(DAY, "/jobs/batchllm.plan/-1"),
        address(DAY, "/jobs/batchllm.plan/-1/report.html"),
        address(DAY, "/jobs/batchllm.plan/-1/shards/0"),
        address(DAY, "/tasks/batchllm.generate/0"),
    ],
)
def test_without_a_login_every_page_is_airflows_login(
    airflow: Snippets, chromium: Any, path: str
) -> None:
    context = chromium.new_context(base_url=airflow.url)
    page = context.new_page()
    page.goto(path)
    page.wait_for_url("**/auth/login?next=**")
    assert "null_value" not in page.content()
    context.close()


def test_progress_moves_until_the_report_takes_its_place(airflow: Snippets, tab: Tab) -> None:
    airflow.write_spec(delay_s=4, max_in_flight=1)
    run_id = airflow.trigger(SLOW_DAY)

    def is_generating() -> bool:
        return any(
            task["task_id"] == "batchllm.generate" and task["state"] == "running"
            for task in airflow.tasks("snippets", run_id)
        )

    wait_until(is_generating, "a shard is being generated", limit_s=LIMIT_S, poll_s=POLL_S)
    page = tab.page
    page.goto(address(SLOW_DAY))
    page.evaluate("window.loadedOnce = true")
    done = page.locator("#live progress").first
    seen: list[float] = []

    def has_moved() -> bool:
        seen.append(float(done.get_attribute("value") or 0))
        return 0 < seen[-1] < 30 and len({*seen}) > 2

    wait_until(has_moved, "rows are done", limit_s=LIMIT_S, poll_s=POLL_S)
    assert page.evaluate("window.loadedOnce")
    assert "Tokens per second" in page.locator("#live").inner_text()
    assert tab.serious_findings() == []
    tab.screenshot("progress")
    page.set_viewport_size({"width": 390, "height": 900})
    assert tab.sideways_px() <= 0
    tab.screenshot("progress")
    page.goto(address(SLOW_DAY, "/tasks/batchllm.generate/0"))
    page.get_by_role("heading", name="Shard 0 of").wait_for()
    page.emulate_media(color_scheme="dark")
    assert tab.serious_findings() == []
    assert tab.sideways_px() <= 0
    tab.screenshot("shard")
    page.go_back()
    page.get_by_role("heading", name=f"job, {SLOW_DAY}").wait_for()
    page.get_by_role("heading", name="What was saved").wait_for()
    tab.check()
