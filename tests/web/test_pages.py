"""What the pages of runs show, and what they say when there is nothing to show."""

import json
import re
from datetime import UTC, datetime
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from support.airflow_records import Records
from support.fake_job import DS, document_rows, fake_spec, planned, write_table
from support.html_page import Page
from support.shard_progress import leave_progress

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.failed_rows import find_failed_rows
from batchllm_operator.cost import MODEL_SHAPES, EngineLimits, find_gpu
from batchllm_operator.errors import FailedRowsError
from batchllm_operator.plan.estimate import Target
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.attempts import ShardProgress

Browser = Any  # the class in conftest.py

RUN = "/dags/job/runs/a"
JOB = f"{RUN}/jobs/batchllm.plan/-1"
DAY_BEFORE = "2026-01-30"
EVIL = "<script>alert(1)</script>"


def check_accessible(html: str, num_scripts: int = 0) -> None:
    """One heading, landmarks, scopes of headers, and regions that a keyboard can scroll."""
    page = Page(html)
    assert len(page.of("h1")) == len(page.of("main")) == len(page.of("header")) == 1
    assert page.of("html")[0]["lang"] == "en"
    assert all(each.get("scope") in ("col", "row") for each in page.of("th"))
    for each in page.of("div"):
        if "scroll" in (each.get("class") or ""):
            assert (each["role"], each["tabindex"]) == ("region", "0") and each["aria-label"]
    assert all(each.get("aria-label") for each in page.of("svg") + page.of("progress"))
    assert len(page.of("script")) == num_scripts
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert "<defs>" in html or len(ids) == len(set(ids))  # plots of a report have their own
    assert not any(name.startswith("on") for _, each in page.elements for name in each)


def leave(plan: Any, shard_idx: int = 0, **changes: Any) -> None:
    """What an attempt has left just now: 6 of 15 rows."""
    now = datetime.now(UTC)
    fields: dict[str, Any] = {
        "host": "host-a",
        "started_at": now,
        "updated_at": now,
        "elapsed_s": 60.0,
        "num_gpus": 0,
        "num_rows_done": 6,
        "num_failed_rows": 0,
        "num_logical_tokens": 1000,
        "num_prompt_tokens": 1000,
        "num_cached_tokens": 600,
        "computed_tokens_per_s": 1234.0,
        "output_tokens_per_s": 321.0,
        "eta_s": 90.0,
    }
    leave_progress(plan, shard_idx, **{**fields, **changes})


def test_a_run_shows_its_progress_until_the_commit(
    anna: Browser, records: Records, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardProgress, "age_s", lambda *_: 0.0)  # the ETA stands still
    records.run().job(plan.folder.uri)
    leave(plan)
    for path in (RUN, JOB):
        html = anna.page(path)
        check_accessible(html, num_scripts=1)
        for shown in ("1,234", "60.0 %", "1 min 30 s", "6 / 15"):
            assert shown in html, shown
    assert 'data-summary="Generating, 20 % of the rows are done."' in html
    news = anna.page(f"{JOB}/live")
    assert "<html" not in news and "6 / 15" in news
    workers = news.partition("<h2>Workers</h2>")[2]  # each with its shards and its host
    assert re.search(r'row">0</th>\s*<td>.*running.*</td>\s*<td>0</td>', workers), workers
    assert "321" in workers and "host-a" in workers
    leave(plan, num_rows_done=12, eta_s=3.0)
    assert "12 / 15" in anna.page(f"{JOB}/live")


def test_a_live_page_has_one_script_which_the_policy_lets_through(
    anna: Browser, records: Records, plan: Any
) -> None:
    records.run().job(plan.folder.uri)
    nonces = set()
    for path in (JOB, JOB, f"{JOB}/shards/0"):
        answer = anna.get(path)
        (script,) = Page(answer.text).of("script")
        policy = answer.headers["content-security-policy"]
        assert f"script-src 'nonce-{script['nonce']}';" in policy
        assert "connect-src 'self'" in policy and "'unsafe-inline'; img" in policy
        assert script["data-url"] == f"/batchllm{path}/live"
        nonces.add(script["nonce"])
        assert 'aria-live="polite"' in answer.text and 'http-equiv="refresh"' not in answer.text
    assert len(nonces) == 3


def test_a_run_that_has_ended_asks_for_no_news(anna: Browser, records: Records, plan: Any) -> None:
    records.run(state="failed").job(plan.folder.uri)
    answer = anna.get(JOB)
    check_accessible(answer.text)
    assert "script-src" not in answer.headers["content-security-policy"]


def test_a_committed_run_shows_its_report(anna: Browser, records: Records, committed: Any) -> None:
    records.run(state="success").job(committed.folder.uri, outcome={"num_rows_in": 30})
    for path in (RUN, JOB):
        html = anna.page(path)
        check_accessible(html)
        assert f'href="/batchllm{JOB}/report.html"' in html
    assert anna.get(f"{JOB}/live").status_code == 205
    assert anna.get(f"{JOB}/shards/0/live").status_code == 205
    assert anna.get(f"{JOB}/shards/0").headers["location"] == f"/batchllm{JOB}"
    file = anna.get(f"{JOB}/report.html")
    assert file.headers["content-disposition"] == 'attachment; filename="job-2026-01-31.html"'
    check_accessible(file.text)
    assert "/batchllm" not in re.sub(r"_batchllm/", "", file.text)


def test_html_that_lies_in_the_lake_is_never_served(
    anna: Browser, records: Records, committed: Any
) -> None:
    committed.folder.write_bytes("report.html", EVIL.encode())
    records.run().job(committed.folder.uri)
    for path in (JOB, f"{JOB}/report.html"):
        assert EVIL not in anna.page(path)


def test_a_run_with_several_jobs_lets_choose(anna: Browser, records: Records, plan: Any) -> None:
    records.run().job(plan.folder.uri, group="one").job(None, group="two")
    records.task("many.plan", "running", map_index=0).task("many.plan", None, map_index=1)
    html = anna.page(RUN)
    check_accessible(html)
    for job in ("one.plan/-1", "two.plan/-1", "many.plan/0", "many.plan/1"):
        assert f'href="/batchllm{RUN}/jobs/{job}"' in html
        check_accessible(anna.page(f"{RUN}/jobs/{job}"), num_scripts=1)
    assert anna.get(f"{RUN}/jobs/many.plan/2").status_code == 404
    assert anna.get(f"{RUN}/jobs/one.generate/0").status_code == 404


def test_a_job_that_is_still_planned_or_failed_there_says_so(
    anna: Browser, records: Records
) -> None:
    records.run().task("batchllm.plan", "running")
    assert "planning" in anna.page(RUN)
    assert "Planning." in anna.page(f"{JOB}/live")
    records.run(run_id="b", state="failed").task("batchllm.plan", "failed", run_id="b")
    assert "planning failed" in anna.page("/dags/job/runs/b")
    assert anna.get(f"{JOB}/shards/0").status_code == 404
    assert anna.get(f"{JOB}/report.html").status_code == 404


def test_a_refused_commit_shows_its_reason_the_kinds_and_the_log(
    anna: Browser, records: Records, tmp_path: Path
) -> None:
    rows = document_rows()
    rows[2] = {**rows[2], "document": None, "row_key": EVIL}
    write_table(tmp_path / "documents", rows)
    faulty = {"backend": "fake", "extra_args": {"error_token_id": ord("0")}}
    spec = fake_spec(tmp_path, engine=faulty)
    plan = plan_job(spec.model_copy(update={"max_failed_fraction": 1.0}), DS)
    run_worker(plan)
    plan_job(spec, DS)
    with pytest.raises(FailedRowsError) as caught:
        commit_run(plan.folder.uri)
    records.run(state="failed").job(plan.folder.uri, commit="failed")
    html = anna.page(JOB)
    check_accessible(html)
    assert str(caught.value) in unescape(html) and EVIL not in html
    num_failed = find_failed_rows(plan.folder.uri, 0).num_failed_rows
    failed = f"<dt>Failed rows</dt><dd>{num_failed} <small>1 of them rejected by the plan</small>"
    assert failed in html and num_failed > 5
    assert "<caption>" + f"{num_failed} failed rows, by kind" in html
    assert f"row_key={EVIL}" in unescape(html)
    assert 'href="/dags/job/runs/a/tasks/batchllm.commit">Log of batchllm.commit<' in html
    assert f"batchllm failed --plan {plan.folder.uri}" in html


def test_while_a_job_generates_its_predictions_stand_where_nothing_is_known(
    anna: Browser, records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(find_gpu("H100"), MODEL_SHAPES["Mistral-7B"], EngineLimits())
    monkeypatch.setattr("batchllm_operator.plan.given.find_target", lambda spec: target)
    plan = planned(tmp_path, document_rows())
    estimate = plan.manifest.estimate
    assert estimate is not None
    predicted = {"predicted_gpu_s": estimate.gpu_s, "predicted_cost_usd": 7.25, "num_rows": 30}
    figures = {**predicted, "planned_saving_ratio": 0.125}
    records.run().job(plan.folder.uri, planned=figures)
    for path in ("/", JOB, f"{JOB}/shards/1"):
        html = anna.page(path)
        assert "unknown" not in html.partition("<details>")[0], path
        assert "GPU time, predicted</dt>" in html, path
    html = anna.page("/")
    assert "Rows, planned</dt><dd>30" in html and "12.5 %" in html and "$7.25" in html
    html = anna.page(JOB)
    for shown in ("GPU time left, predicted", "Cost, predicted", "Prompt tokens saved, planned"):
        assert shown in html, shown
    leave(plan, num_gpus=2)
    assert "2 min 00 s so far" in anna.page(JOB) and "$0.10 so far" in anna.page(JOB)


def test_failed_tasks_show_why_and_lead_to_their_logs(
    anna: Browser, records: Records, plan: Any
) -> None:
    records.run().task("batchllm.plan", plan_uri=plan.folder.uri)
    records.task("batchllm.generate", "failed")
    leave(plan, 1, state="failed", error=f"s3://me:pass@lake/x: {EVIL}")
    html = anna.page(JOB)
    assert "Shard 1: s3://***@lake/x: &lt;script&gt;" in html
    log = "/dags/job/runs/a/tasks/batchllm.generate"
    assert f'href="{log}">Log of batchllm.generate<' in html
    records.run(run_id="b", state="failed").task("batchllm.plan", "failed", run_id="b")
    assert 'href="/dags/job/runs/b/tasks/batchllm.plan"' in anna.page("/dags/job/runs/b")


def test_a_task_leads_to_its_job(anna: Browser, records: Records, plan: Any) -> None:
    uri = plan.folder.uri
    task = f"{RUN}/tasks/batchllm.generate"
    records.run(run_id="b").task("batchllm.plan", run_id="b", plan_uri=uri)
    records.task("batchllm.generate", "scheduled", run_id="b")
    waits = anna.get(f"{task.replace('runs/a', 'runs/b')}/-1")
    assert waits.headers["location"] == f"/batchllm{JOB.replace('runs/a', 'runs/b')}"
    records.run().job(uri)
    assert anna.get(f"{task}/-1").headers["location"] == f"/batchllm{JOB}"
    records.job(uri + "x", group="two")
    assert anna.get(f"{task}/-1").headers["location"] == f"/batchllm{JOB}"
    rendered = {"plan_uri": uri, "num_workers": "8"}
    records.task("alone.generate", "running", rendered=rendered)
    alone = anna.get(f"{RUN}/tasks/alone.generate/-1")
    assert alone.headers["location"] == f"/batchllm{JOB}"
    for wrong in ("batchllm.generate/2", "batchllm.plan/-1", "nothing/0"):
        assert anna.get(f"{RUN}/tasks/{wrong}").status_code == 404


def test_a_shards_page(anna: Browser, records: Records, plan: Any) -> None:
    records.run().job(plan.folder.uri)
    leave(plan, state="failed", error=f"s3://me:pass@lake/x: {EVIL}")
    html = anna.page(f"{JOB}/shards/0")
    check_accessible(html, num_scripts=1)
    assert "host-a" in html and "failed" in html
    assert "s3://***@lake/x: &lt;script&gt;" in html and EVIL not in html
    assert "waiting" in anna.page(f"{JOB}/shards/1")
    assert anna.get(f"{JOB}/shards/2").status_code == 404


def test_what_is_missing_or_broken_is_said(
    anna: Browser, records: Records, committed: Any, tmp_path: Path
) -> None:
    folder = Path(committed.folder.path)
    records.run().job(str(folder))
    report = (folder / "report.json").read_bytes()

    def said(path: str = JOB) -> tuple[int, str]:
        answer = anna.get(path)
        assert answer.headers["cache-control"] == "no-store"
        check_accessible(answer.text)
        return answer.status_code, answer.text

    (folder / "report.json").write_bytes(b'{"report_version": 3}')
    status, text = said()
    assert status == 409 and "this release reads 1" in text
    (folder / "report.json").write_bytes(json.dumps({**json.loads(report), "run_id": "x"}).encode())
    status, text = said()
    assert status == 409 and "belongs elsewhere" in text
    (folder / "report.json").unlink()
    status, text = said(f"{JOB}/report.html")
    assert status == 404 and "report.json" in text
    (folder / "report.json").mkdir()
    assert said()[0] == 503
    (folder / "manifest.json").write_bytes(b"{}")
    assert said()[0] == 409
    (folder / "manifest.json").unlink()
    status, text = said(RUN)
    assert status == 404 and "batchllm gc" in text


def test_what_comes_from_outside_is_escaped(
    anna: Browser, records: Records, committed: Any
) -> None:
    records.run(EVIL, EVIL).job(
        committed.folder.uri, dag_id=EVIL, run_id=EVIL, group=EVIL.replace("/", ""), outcome={}
    )
    html = anna.page("/")
    assert "<script" not in html and "&lt;script&gt;" in html
    records.run("job", "<b>").task(f"{EVIL[:8]}.plan", "running", run_id="<b>")
    records.task("x.plan", "running", run_id="<b>")
    html = anna.page("/dags/job/runs/%3Cb%3E")
    assert "<b>" not in html and "<script" not in html


def test_two_runs_are_compared(
    anna: Browser, records: Records, committed: Any, tmp_path: Path
) -> None:
    write_table(tmp_path / "documents", document_rows(2, 1), ds=DAY_BEFORE)
    earlier = plan_job(fake_spec(tmp_path, planner={"num_shards": 1}), DAY_BEFORE)
    run_worker(earlier)
    commit_run(earlier.folder.uri)
    for day, (run_id, plan) in enumerate((("a", earlier), ("b", committed), ("c", committed))):
        records.run(run_id=run_id, day=day)
        records.job(plan.folder.uri, run_id=run_id, outcome={} if day < 2 else None)
    found = re.findall(r'href="(/batchllm/compare[^"]*)"', anna.page("/"))
    assert len(found) == 1
    html = anna.page(unescape(found[0]).removeprefix("/batchllm"))
    check_accessible(html)
    ref = "job/a/batchllm.plan/-1"
    for wrong in (
        "",
        "job/a/batchllm.plan",
        "job/a/batchllm.plan/-2",
        "job/a/batchllm.plan/x",
        f"{ref}/x",
        f"{ref}/..",
        "job/x/batchllm.plan/-1",
        "job/a%00/batchllm.plan/-1",
        "../../etc/passwd",
        "/etc/passwd//-1",
    ):
        answer = anna.get(f"/compare?before={ref}&after={wrong}")
        assert answer.status_code == 404 and "root:" not in answer.text, wrong
    assert anna.get(f"/compare?before={ref}").status_code == 404


def test_paths_lead_nowhere_but_to_pages(anna: Browser, records: Records, committed: Any) -> None:
    records.run().job(committed.folder.uri)
    for path in (
        "/dags/..%2F..%2Fetc/runs/a",
        "/dags/../../etc/passwd",
        "/dags/job/runs/%2E%2E",
        "/dags/job/runs/..%2F..%2Fetc%2Fpasswd",
        "/dags/job/runs/a%00",
        "/dags/%00/runs/a",
        "/dags/job/runs/a/jobs/%2Fetc%2Fpasswd/-1",
        "/dags/job/runs/a/jobs/..%5C..%5Cetc/-1",
        "/dags/job/runs/a/jobs/batchllm.plan%00/-1",
        "/dags/job/runs/a/jobs/batchllm.plan/..",
        "/dags/job/runs/a/jobs/batchllm.plan/-2",
        "/dags/job/runs/a/jobs/batchllm.plan/99999999999999999999",
        "/dags/job/runs/a/jobs/batchllm.plan/-1/shards/..%2Freport",
        "/dags/job/runs/a/jobs/batchllm.plan/-1/shards/-1",
        "/dags/job/runs/a/jobs/batchllm.plan/-1/manifest.json",
        "/dags/job/runs/a/jobs/batchllm.plan/-1/report.html/..%2Fmanifest.json",
        "/dags/job/runs/a/tasks/%2e%2e/0",
        "/dags/job/runs/" + 300 * "a",
    ):
        answer = anna.get(path)
        assert answer.status_code == 404, path
        assert "root:" not in answer.text and "plan_id" not in answer.text, path


def test_all_answers_have_the_headers(
    anna: Browser, nobody: Browser, records: Records, committed: Any
) -> None:
    records.run().job(committed.folder.uri).run("bad").job("/etc", dag_id="bad")
    good, bad = JOB, JOB.replace("job/runs", "bad/runs")
    for browser, path, status in (
        (anna, "/", 200),
        (anna, good, 200),
        (anna, f"{good}/live", 205),
        (anna, f"{good}/report.html", 200),
        (anna, bad, 409),
        (anna, "/nothing", 404),
        (anna, "/dags/job/runs/b", 404),
        (nobody, "/", 302),
    ):
        answer = browser.get(path)
        assert answer.status_code == status, path
        headers = answer.headers
        assert headers["content-security-policy"].startswith("default-src 'none'; style-src")
        assert "frame-ancestors 'self'" in headers["content-security-policy"]
        assert "script-src" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"


def test_a_fault_of_ours_says_nothing_of_itself(
    anna: Browser, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchllm_operator.web import routes

    def fail(*_: Any) -> None:
        raise RuntimeError("the secret")

    monkeypatch.setattr(routes, "list_jobs", fail)
    answer = anna.get("/")
    assert answer.status_code == 500 and "the secret" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
    check_accessible(answer.text)
