"""Which partition a run plans by default, with the timetables and mappers of Airflow itself."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pendulum
import pytest
from airflow.partition_mappers.identity import IdentityMapper
from airflow.partition_mappers.product import ProductMapper
from airflow.partition_mappers.temporal import StartOfDayMapper
from airflow.sdk import DAG
from airflow.timetables.base import DagRunInfo, TimeRestriction
from airflow.timetables.interval import CronDataIntervalTimetable
from airflow.timetables.trigger import CronPartitionTimetable, CronTriggerTimetable

from batchllm_operator.operators import BatchLLMPlanOperator, batchllm_task_group

BERLIN, TOKYO = "Europe/Berlin", "Asia/Tokyo"
SHORT, LONG = datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 10, 25, tzinfo=UTC)
"""Berlin's days of 23 and of 25 hours."""


def planned(context: dict[str, Any], **arguments: Any) -> str:
    """The partition that the group's plan task takes in a run with this context."""
    with DAG("job", schedule=None) as dag:  # whose templates are strict
        batchllm_task_group("job.yaml", **arguments)
    plan = dag.get_task("batchllm.plan")
    assert isinstance(plan, BatchLLMPlanOperator)
    run = SimpleNamespace(partition_key=None, conf={})
    plan.render_template_fields(cast(Any, {"dag_run": run, **context}))
    return plan.ds


def context_of(info: DagRunInfo) -> dict[str, Any]:
    """What Airflow tells a task of the run that a timetable makes."""
    context: dict[str, Any] = {
        "dag_run": SimpleNamespace(partition_key=info.partition_key, conf={}),
        "partition_date": info.partition_date,
    }
    if info.logical_date is not None:
        context |= {"logical_date": info.logical_date, "ds": f"{info.logical_date:%Y-%m-%d}"}
    return context


def runs_around(timetable: Any, day: datetime) -> Iterable[DagRunInfo]:
    """The runs for the five days around a day, as a backfill or a catch-up makes them."""
    first, last = day - timedelta(days=2, hours=12), day + timedelta(days=3, hours=12)
    if isinstance(timetable, CronPartitionTimetable):
        if not hasattr(timetable, "iter_partition_dagrun_infos"):
            pytest.skip("Airflow 3.2 tells a task no partition date")
        return timetable.iter_partition_dagrun_infos(earliest=first, latest=last)
    runs: list[DagRunInfo] = []
    wanted = TimeRestriction(pendulum.instance(first), pendulum.instance(last), catchup=True)
    interval = None
    while run := timetable.next_dagrun_info(
        last_automated_data_interval=interval, restriction=wanted
    ):
        runs.append(run)
        interval = run.data_interval
    return runs


@pytest.mark.parametrize("zone", [BERLIN, TOKYO, "America/New_York", "UTC"])
@pytest.mark.parametrize(
    "kind", [CronDataIntervalTimetable, CronTriggerTimetable, CronPartitionTimetable]
)
@pytest.mark.parametrize("change", [SHORT, LONG], ids=["short", "long"])
def test_each_local_day_is_planned_once_when_clocks_change(
    change: datetime, kind: Any, zone: str
) -> None:
    runs = list(runs_around(kind("@daily", timezone=zone), change))
    days = [planned(context_of(run), ds_timezone=zone) for run in runs]
    first = datetime.fromisoformat(days[0])
    assert len(days) >= 5 and f"{change:%Y-%m-%d}" in days
    assert days == [f"{first + timedelta(days=idx):%Y-%m-%d}" for idx in range(len(days))]
    if zone == BERLIN:
        moments: list[Any] = [run.partition_date or run.logical_date for run in runs]
        hours = {(b - a).total_seconds() / 3600 for a, b in pairwise(moments)}
        assert hours == {24, 23 if change == SHORT else 25}


def test_without_a_time_zone_the_day_is_that_of_utc() -> None:
    """So midnight in Tokyo is the day before, and Airflow's own `ds` says the same."""
    (run, *_) = runs_around(CronDataIntervalTimetable("@daily", timezone=TOKYO), SHORT)
    assert planned(context_of(run)) == context_of(run)["ds"] == "2026-03-26"
    assert planned(context_of(run), ds_timezone=TOKYO) == "2026-03-27"


@pytest.mark.parametrize("logical_ds", [{}, {"ds": "2026-02-01"}])
def test_a_partition_key_comes_before_the_logical_date(logical_ds: dict[str, str]) -> None:
    run = SimpleNamespace(partition_key="2026-01-31")
    assert planned({"dag_run": run, **logical_ds}) == "2026-01-31"
    month = "{{ dag_run.partition_key[:7] }}"
    assert planned({"dag_run": run, **logical_ds}, ds=month) == "2026-01"


def test_keys_with_a_time_name_days_by_the_timetables_format_or_a_time_zone() -> None:
    timed = CronPartitionTimetable("@daily", timezone=TOKYO)
    daily = CronPartitionTimetable("@daily", timezone=TOKYO, key_format="%Y-%m-%d")
    contexts = [context_of(next(iter(runs_around(each, SHORT)))) for each in (timed, daily)]
    assert planned(contexts[0]).endswith("T00:00:00")
    day = planned(contexts[1])
    assert [planned(each, ds_timezone=TOKYO) for each in contexts] == [day, day]
    assert StartOfDayMapper(timezone=TOKYO).to_downstream(planned(contexts[0])) == day


def test_of_a_composite_key_a_template_takes_a_segment() -> None:
    mapper = ProductMapper(IdentityMapper(), StartOfDayMapper())
    run = SimpleNamespace(partition_key=mapper.to_downstream("eu|2026-01-31T05:00:00"))
    assert planned({"dag_run": run}) == "eu|2026-01-31"
    assert planned({"dag_run": run}, ds="{{ dag_run.partition_key.split('|')[1] }}") == "2026-01-31"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ds_timezone": "Mars/Phobos"}, "write one such as Europe/Berlin"),
        ({"ds_timezone": TOKYO, "ds": "{{ ds }}"}, "give ds or ds_timezone"),
    ],
)
def test_a_time_zone_that_says_nothing_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchLLMPlanOperator(task_id="plan", spec_path="job.yaml", **arguments)
