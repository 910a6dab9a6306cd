"""The list of jobs: from Airflow's database alone."""

import re
from typing import Any
from urllib.parse import unquote

import pytest
from support.airflow_records import Records

Browser = Any  # the class in conftest.py


def uri(day: int, job: str = "rank") -> str:
    return f"s3://lake/out/_batchllm/{job}/2026-01-{day + 1:02d}/plan-{day:016x}"


def outcome(saving: float = 0.5, **changes: Any) -> dict[str, Any]:
    return {
        "num_rows_in": 1000,
        "num_failed_rows": 2,
        "achieved_saving_ratio": saving,
        "computed_tokens_per_s": 4321.0,
        "output_tokens_per_s": 654.0,
        "rows_per_s": 12.5,
        "predicted_saved_gpu_s": 75.0,
        "predicted_saved_cost_usd": 0.25,
        **changes,
    }


@pytest.fixture(autouse=True)
def no_lake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list opens no folder."""
    from batchllm_operator.storage import Folder

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the lake was read")

    monkeypatch.setattr(Folder, "open", fail)


def test_an_airflow_without_jobs_says_how_they_come(anna: Browser, records: Records) -> None:
    assert "No job has run here yet" in anna.page("/")
    records.run().task("hello", operator="BashOperator", plan_uri=uri(0))
    assert "No job has run here yet" in anna.page("/")


def test_a_job_is_listed_with_its_latest_run_and_the_trend(anna: Browser, records: Records) -> None:
    for day in range(35):
        records.run(run_id=f"r{day}", state="success", day=day)
        records.job(uri(day), run_id=f"r{day}", outcome=outcome(0.4 + day / 100))
    records.run(run_id="now", day=40).job(uri(40), run_id="now")
    html = anna.page("/")
    assert '<a href="/batchllm/dags/job/runs/now/jobs/batchllm.plan/-1">rank</a>' in html
    for shown in (
        *("generating", "74.0 %", "as of 2026-01-35", "4,321", "654", "12.5"),
        *("1 min 15 s", "$0.25", "1,000"),
    ):
        assert shown in html, shown
    assert "The last 30 runs of rank" in html and ">r5<" not in html and ">r6<" in html
    text = (
        "Prompt tokens saved of the last 30 partitions: from 46.0 % to 74.0 %, between 46.0 % and"
        " 74.0 %"
    )
    assert f'aria-label="{text}; unknown for 1"' in html


def test_a_job_whose_first_planning_failed_is_listed(anna: Browser, records: Records) -> None:
    records.run(state="failed").task(
        "batchllm.plan", operator="BatchLLMPlanOperator", state="failed"
    )
    html = anna.page("/")
    assert "planning failed" in html and "not planned" in html
    assert "/batchllm/dags/job/runs/" in html


def test_jobs_of_one_dag_have_their_own_numbers(anna: Browser, records: Records) -> None:
    records.run(state="success").job(uri(0, "one"), group="one", outcome=outcome(0.11))
    records.job(uri(0, "two"), group="two", outcome=outcome(0.22))
    records.job(uri(0, "three"), group="", outcome=outcome(0.33, gpu_s=7200.0, cost_usd=5.5))
    one, three, two = anna.page("/").split('<section class="card"')[1:]
    assert "11.0 %" in one and "22.0 %" not in one
    assert "22.0 %" in two and "11.0 %" not in two
    assert "33.0 %" in three and "2 h 00 min" in three and "$5.50" in three


def listed(html: str) -> list[str]:
    """Ids of runs in the table, from above."""
    return re.findall(r'<th scope="row"><a href="[^"]*">([^<]*)</a>', html)


def test_runs_are_listed_compared_and_plotted_by_partition(anna: Browser, records: Records) -> None:
    """A day that is run again, by hand, later than the day after it."""
    for run_id, due, day, saving in (
        *(("r18", 18, 17, 0.1), ("r19", 19, 18, 0.2), ("r20", 20, 19, 0.3), ("r21", 21, 20, 0.4)),
        *(("r19-again", 22, 18, 0.5), ("r20-again", 23, 19, 0.6)),
    ):
        records.run(run_id=run_id, state="success", day=due)
        records.job(uri(day), run_id=run_id, outcome=outcome(saving))
    records.run(run_id="r20-failed", state="failed", day=24)
    records.job(uri(19), run_id="r20-failed")
    html = anna.page("/")
    assert listed(html) == [
        *("r21", "r20-failed", "r20-again", "r20", "r19-again", "r19", "r18"),
    ]
    compared = re.findall(r'aria-label="Compare ([^"]*)"', html)
    assert compared == [
        "r21 with 2026-01-20",
        "r20-again with 2026-01-19",
        "r20 with 2026-01-19",
        "r19-again with 2026-01-18",
        "r19 with 2026-01-18",
    ]
    first = html.index('aria-label="Compare r21')
    link = unquote(html[html.rindex("<a ", 0, first) : first])
    assert "before=job/r20-again/" in link and "after=job/r21/" in link
    assert "latest run\nr21, partition 2026-01-21" in html
    assert (
        "Prompt tokens saved of the last 4 partitions: from 10.0 % to 40.0 %, between 10.0 %"
        in html
    )
    assert "and 60.0 %" in html


def test_a_run_before_its_plan_stands_where_its_partition_will(
    anna: Browser, records: Records
) -> None:
    records.run(run_id="r20", state="success", day=20)
    records.job(uri(19), run_id="r20", outcome=outcome())
    plan = {"task_id": "batchllm.plan", "state": "running"}
    records.run(run_id="conf", day=21, conf={"ds": "2026-01-18"}).task(**plan, run_id="conf")
    records.run(run_id="logical", day=22, logical_day=20).task(**plan, run_id="logical")
    records.run(run_id="rendered", day=23, conf={"ds": "2027-01-01"})
    records.task(**plan, run_id="rendered", rendered={"ds": "2026-01-19"})
    records.run(run_id="nobody-knows", day=24, conf={"ds": ["2026"]}).task(
        **plan, run_id="nobody-knows", rendered={"ds": 7}
    )
    html = anna.page("/")
    assert listed(html) == ["logical", "r20", "rendered", "conf", "nobody-knows"]
    assert "2026-01-21, not planned" in html and "unknown, not planned" in html
    assert "latest run\nlogical, partition 2026-01-21" in html
    assert "as of 2026-01-20" in html


def test_a_mistyped_partition_is_the_latest_run_until_the_next(
    anna: Browser, records: Records
) -> None:
    plan = {"task_id": "batchllm.plan", "state": "failed"}
    records.run(run_id="r20", state="success", day=20)
    records.job(uri(19), run_id="r20", outcome=outcome())
    records.run(run_id="typo", state="failed", day=21, conf={"ds": "2062-01-31"})
    records.task(**plan, run_id="typo")
    html = anna.page("/")
    assert "latest run\ntypo, partition 2062-01-31" in html and "planning failed" in html
    records.run(run_id="r21", day=22).job(uri(20), run_id="r21")
    html = anna.page("/")
    assert listed(html) == ["typo", "r21", "r20"]
    assert "latest run\nr21, partition 2026-01-21" in html
    assert ">generating</span>" in html and "planning failed" not in html
    records.run(run_id="again", state="failed", day=23, conf={"ds": "2026-01-19"})
    records.task(**plan, run_id="again")
    assert "latest run\nr21, partition 2026-01-21" in anna.page("/")


def test_days_that_are_run_again_dont_push_the_newest_out(anna: Browser, records: Records) -> None:
    records.run(run_id="newest").job(uri(99), outcome=outcome(), run_id="newest")
    for idx in range(40):
        records.run(run_id=f"again-{idx}", day=50 + idx).job(uri(3), run_id=f"again-{idx}")
    found = listed(anna.page("/"))
    assert len(found) == 30
    assert found[:2] == ["newest", "again-39"]


def test_what_no_gpu_ran_is_marked_as_predicted(anna: Browser, records: Records) -> None:
    predicted = {"predicted_gpu_s": 7200.0, "predicted_cost_usd": 5.5}
    records.run(state="success").job(uri(0), outcome=outcome(gpu_s=None, **predicted))
    html = anna.page("/")
    assert "<dt>GPU time, predicted</dt>" in html
    assert "$5.50; none was measured" in html
    assert html.count('<small class="muted">predicted</small>') == 2
    records.run(run_id="b", day=1).job(
        uri(1), run_id="b", outcome=outcome(gpu_s=60.0, cost_usd=1.25, **predicted)
    )
    html = anna.page("/")
    assert "<dt>GPU time</dt>" in html and "<dt>GPU time, predicted</dt>" not in html
    assert "1 min 00 s" in html and "$1.25" in html


@pytest.mark.parametrize(
    ("plan", "generate", "commit", "shown"),
    [
        ("running", None, None, "planning"),
        ("queued", None, None, "waiting for planning"),
        ("failed", None, None, "planning failed"),
        ("up_for_retry", None, None, "planning again"),
        ("success", None, None, "waiting for generating"),
        ("success", "deferred", None, "generating"),
        ("success", "failed", "upstream_failed", "generating failed"),
        ("success", "success", None, "generated"),
        ("success", "success", "running", "committing"),
        ("success", "success", "failed", "committing failed"),
        ("success", "skipped", "success", "committed"),
    ],
)
def test_the_stage_of_a_job(
    anna: Browser,
    records: Records,
    plan: str,
    generate: str | None,
    commit: str | None,
    shown: str,
) -> None:
    noted = {"plan_uri": uri(1)} if plan == "success" else {}
    records.run(run_id="old").task("j.plan", run_id="old", plan_uri=uri(0))
    records.run(logical_day=1).task("j.plan", plan, **noted).task("j.commit", commit)
    records.task("j.generate", generate)
    assert f">{shown}</span>" in anna.page("/")


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        (("failed", "running", "success"), "generating failed"),
        (("success", "running", "queued"), "generating"),
        (("success", None, "success"), "waiting for generating"),
        (("success", "success", "skipped"), "generated"),
    ],
)
def test_a_mapped_generate_task_is_done_once_all_are(
    anna: Browser, records: Records, states: tuple[str | None, ...], shown: str
) -> None:
    records.run().task("j.plan", plan_uri=uri(0))
    for idx, state in enumerate(states):
        records.task("j.generate", state, map_index=idx)
    assert f">{shown}</span>" in anna.page("/")


def test_what_xcoms_hold_need_not_be_what_we_wrote(anna: Browser, records: Records) -> None:
    for day, noted in enumerate((17, None, ["x"], {"plan_uri": 1}, "/etc/passwd", "[" * 5000)):
        records.run(run_id=f"r{day}", day=day)
        records.job(noted, run_id=f"r{day}", outcome=outcome("x", num_rows_in=True))
    records.run(run_id="r9", day=9).task("batchllm.plan", run_id="r9", plan_uri=uri(9))
    records.task("batchllm.commit", run_id="r9", return_value=[uri(9)])
    records.task("batchllm.report", run_id="r9", return_value={"plan_uri": [uri(9)]})
    html = anna.page("/")
    assert "unknown" in html and ">r0<" in html and "/etc/passwd" not in html


def test_mapped_plans_are_runs_of_one_job(anna: Browser, records: Records) -> None:
    records.run()
    for idx in range(3):
        records.task("m.plan", map_index=idx, plan_uri=uri(idx))
    html = anna.page("/")
    assert html.count('<section class="card"') == 1 and "The last 3 runs of rank" in html
    assert "/jobs/m.plan/2" in html


def test_numbers_that_no_float_holds_are_unknown(anna: Browser, records: Records) -> None:
    records.run(run_id="r", state="success")
    records.job(uri(0), run_id="r", outcome=outcome(num_rows_in=10**400, rows_per_s=1e300))
    html = anna.page("/")
    assert '<td class="number">unknown</td>' in html


def test_rounds_of_a_job_are_one_job(anna: Browser, records: Records) -> None:
    """The last that has begun; the links of earlier ones lead to it."""
    from batchllm_operator.web.routes import find_job

    plan, generate = ({"operator": f"BatchLLM{each}Operator"} for each in ("Plan", "Generate"))
    records.run().task("b.plan", plan_uri=uri(0), **plan).task("b.generate", "running", **generate)
    records.task("b.plan_2", None, **plan).task("b.generate_2", None, **generate)
    first, second = (f"/batchllm/dags/job/runs/a/jobs/b.plan{each}/-1" for each in ("", "_2"))
    html = anna.page("/")
    assert first in html and second not in html and "generating" in html

    records.clear()
    records.run(state="success").task("b.plan", plan_uri=uri(0), **plan)
    records.task("b.generate", **generate).task("b.generate_2", **generate)
    records.task("b.plan_2", plan_uri=uri(1), **plan)
    done = {"plan_uri": uri(1), **outcome(0.44)}
    records.task("b.commit", return_value=done, operator="BatchLLMCommitOperator")
    html = anna.page("/")
    assert html.count('<section class="card"') == 1 and second in html and "44.0 %" in html
    assert "committed" in html
    assert find_job("job", "a", "b.plan", -1).ref.task_id == "b.plan_2"


def test_jobs_that_are_numbered_are_no_rounds(anna: Browser, records: Records) -> None:
    records.run(state="success")
    for idx, name in enumerate(("titles", "titles_2")):
        records.task(name, plan_uri=uri(idx), operator="BatchLLMPlanOperator")
    html = anna.page("/")
    for name in ("titles", "titles_2"):
        assert f"/batchllm/dags/job/runs/a/jobs/{name}/-1" in html


def test_a_second_round_that_fails_to_plan_is_its_jobs_state(
    anna: Browser, records: Records
) -> None:
    records.run(state="failed").task("plan", plan_uri=uri(0), operator="BatchLLMPlanOperator")
    records.task("plan_2", "failed", operator="BatchLLMPlanOperator")
    assert "planning failed" in anna.page("/")
