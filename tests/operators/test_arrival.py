"""Which partition a run is for, and which runs it starts."""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.configuration import conf
from airflow.providers.common.compat.sdk import AirflowFailException, DownstreamTasksSkipped
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Asset, Context

from batchllm_operator.operators import BatchLLMArrivalOperator, one_run_per_partition

DOCUMENTS, USERS = Asset("documents"), Asset("users")
START = datetime(2026, 2, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Event:
    second: int
    extra: dict[str, Any]
    asset: Any = DOCUMENTS

    @property
    def timestamp(self) -> datetime:
        return START + timedelta(seconds=self.second)


def arrived(second: int, ds: str) -> Event:
    return Event(second, {"ds": ds})


class Inlets(list[Event]):
    """All events of an asset, as Airflow gives them."""

    def after(self, time: str) -> "Inlets":
        return Inlets(event for event in self if event.timestamp >= datetime.fromisoformat(time))


@dataclass
class Run:
    """A run of an asset-triggered DAG. Events are by the assets' names."""

    triggering: dict[str, list[Event]] = field(default_factory=dict)
    all_events: dict[str, list[Event]] = field(default_factory=dict)
    conf: dict[str, Any] | None = None
    partition_key: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    logical_ds: str | None = None
    pushed: dict[str, Any] = field(default_factory=dict)

    def execute(self, *assets: Asset) -> list[dict[str, Any]]:
        context: dict[str, Any] = {
            "dag_run": SimpleNamespace(conf=self.conf, partition_key=self.partition_key),
            "params": self.params,
            "triggering_asset_events": {Asset(n): of for n, of in self.triggering.items()},
            "inlet_events": {
                Asset(name): Inlets(of)
                for name, of in {**self.triggering, **self.all_events}.items()
            },
            "ti": SimpleNamespace(xcom_push=lambda key, value: self.pushed.__setitem__(key, value)),
        }
        if self.logical_ds is not None:  # Airflow gives no `ds` to a run without a logical date
            context["ds"] = self.logical_ds
        task = BatchLLMArrivalOperator(task_id="partition", assets=assets or (DOCUMENTS,))
        execute: Any = BatchLLMArrivalOperator.execute
        return list(execute.__wrapped__(task, context))


NONE = {"ds": ""}
"""What a run pushes that starts others."""


def runs_of(run: Run, *assets: Asset) -> list[str]:
    """The ids of the runs that are started, which name the partitions of their conf."""
    started = run.execute(*assets)
    assert run.pushed == NONE
    for one in started:
        assert one["trigger_run_id"].startswith(f"arrival__{one['conf']['ds']}__20260201T0000")
    return [one["trigger_run_id"].removeprefix("arrival__2026-01-") for one in started]


def test_each_partition_gets_a_run_whose_id_says_which_and_when_it_came_last() -> None:
    events = [arrived(0, "2026-01-29"), arrived(2, "2026-01-31"), arrived(1, "2026-01-30")]
    ids = ["29__20260201T000000.000000", "30__20260201T000001.000000", "31__20260201T000002.000000"]
    assert runs_of(Run(triggering={"documents": events})) == ids
    again = [*events, arrived(3, "2026-01-30")]
    run = Run(triggering={"documents": events}, all_events={"documents": again})
    assert sorted(runs_of(run)) == [ids[0], "30__20260201T000003.000000", ids[2]]
    both = {"documents": [arrived(1, "2026-01-30")], "users": [arrived(0, "2026-01-30")]}
    assert runs_of(Run(triggering=both), DOCUMENTS, USERS) == ids[1:2]


def test_events_that_airflow_left_for_the_next_run_get_runs_now() -> None:
    """Two runs that meet one event, as one has read ahead to it, start runs of one id."""
    old, first, left = arrived(0, "2026-01-01"), arrived(1, "2026-01-30"), arrived(2, "2026-01-31")
    run = Run({"documents": [first]}, all_events={"documents": [old, first, left]})
    ids = ["30__20260201T000001.000000", "31__20260201T000002.000000"]
    assert runs_of(run) == ids
    assert runs_of(Run({"documents": [left]})) == ids[1:]


ODD = ["2026-01-31 00:00", "2026-01-31/00:00", "region=é", "região=日本", "a" * 300, "\ud800"]


def test_a_partition_of_any_characters_has_a_run_id_that_airflow_takes() -> None:
    """And one of its own, though what Airflow refuses is left out of it."""
    events = [arrived(0, ds) for ds in ODD]
    runs = Run(triggering={"documents": events}).execute()
    assert [each["conf"]["ds"] for each in runs] == ODD
    ids = [each["trigger_run_id"] for each in runs]
    pattern = conf.get_mandatory_value("scheduler", "allowed_run_id_pattern")
    assert all(re.fullmatch(pattern, each) and len(each) <= 250 for each in ids)
    assert len(set(ids)) == len(ODD)
    assert ids[0].startswith("arrival__2026-01-31-00:00-")
    assert ids == [each["trigger_run_id"] for each in Run({"documents": events}).execute()]


@pytest.mark.parametrize(
    "given",
    [
        {"conf": {"ds": "2026-01-31"}},
        {"params": {"ds": "2026-01-31"}},
        {"conf": {"ds": "2026-01-31"}, "partition_key": "2026-01-01"},
        {"params": {"ds": None}, "partition_key": "2026-01-31"},
        {"params": {"ds": None}, "logical_ds": "2026-01-31", "triggering": {}},
    ],
)
def test_what_is_given_by_hand_or_by_airflow_comes_first(given: dict[str, Any]) -> None:
    """And without an event, the logical date."""
    events = {"triggering": {"documents": [arrived(0, "x")]}, "logical_ds": "2026-02-01"}
    run = Run(**(events | given))
    assert run.execute() == []
    assert run.pushed == {"ds": "2026-01-31"}


def test_a_run_for_no_partition_fails_at_once() -> None:
    with pytest.raises(AirflowFailException, match="trigger the DAG with the conf"):
        Run().execute()


def test_what_follows_is_given_the_partition_or_is_skipped() -> None:
    """In a run that has all that Airflow may give it, as one with a logical date."""
    with DAG("arrival", schedule=DOCUMENTS) as dag:
        one_run_per_partition(DOCUMENTS) >> EmptyOperator(task_id="plan")
    task: Any = dag.get_task("arrival.partition")
    execute = type(task).execute.__wrapped__
    ti = SimpleNamespace(xcom_push=lambda key, value: None, map_index=-1)
    context = {**dict.fromkeys(Context.__annotations__), "ti": ti, "task": task}
    task.op_args = ["2026-01-31"]
    assert execute(task, context) == "2026-01-31"
    task.op_args, task.op_kwargs = [""], {}
    with pytest.raises(DownstreamTasksSkipped) as skipped:
        execute(task, context)
    assert skipped.value.tasks == ["plan"]


@pytest.mark.parametrize("extra", [{}, {"ds": ""}, {"ds": 20260131}])
def test_an_event_without_a_partition_fails_at_once(extra: dict[str, Any]) -> None:
    with pytest.raises(AirflowFailException, match="'documents': the event of 2026-02-01"):
        Run(triggering={"documents": [Event(0, extra)]}).execute()
