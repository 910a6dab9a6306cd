"""Partitions that arrive: which one an asset-triggered run is for, and runs for the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import Asset, BaseOperator, Context, TaskGroup, XComArg

DS_KEY: Final = "ds"


def one_run_per_partition(*assets: Asset, group_id: str = "arrival") -> XComArg:
    """Give each partition that arrives a run of its own; call it inside a DAG.

    For a DAG whose schedule is one of `assets` or several. An event names its partition in
    `extra["ds"]`, as the events of `BatchLLMCommitOperator` do. Airflow gives one run the
    events that came close together, and leaves some of them for whenever the next one comes; here
    the run takes one partition and starts runs of the same DAG for the others.

    By hand: trigger the DAG with the conf `{"ds": "2026-01-31"}`, or with a logical date.

    Args:
        assets: input tables whose events say what has arrived.
        group_id: prefix of the two tasks' ids.

    Returns:
        The partition of the run, as `batchllm_task_group(..., ds=...)` takes it.
    """
    # Not above: it loads Airflow's database models, for DAGs that need none of this too.
    from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator

    with TaskGroup(group_id=group_id):
        partition = BatchLLMArrivalOperator(task_id="partition", assets=assets)
        TriggerDagRunOperator.partial(
            task_id="other_partitions",
            trigger_dag_id="{{ dag.dag_id }}",
            skip_when_already_exists=True,  # a second try finds what the first has started
        ).expand_kwargs(partition.output)
    return XComArg(partition, key=DS_KEY)


class BatchLLMArrivalOperator(BaseOperator):
    """Finds the partition that a run is for: its conf's, its newest event's, its logical date's.

    XComs: `ds` is the partition; the return value has one `{"trigger_run_id": ..., "conf":
    {"ds": ...}}` for each further partition among the run's events and those that came
    after them, for `TriggerDagRunOperator.partial(...).expand_kwargs(...)`.

    Args:
        assets: input tables whose events say what has arrived.
        kwargs: Airflow's.
    """

    ui_color = "#cfe3ea"

    def __init__(self, *, assets: Sequence[Asset], **kwargs: Any) -> None:
        super().__init__(inlets=list(assets), **kwargs)
        self.assets = tuple(assets)

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Name the run's partition and the others.

        Raises:
            AirflowFailException: an event has no `ds`, or nothing says which partition.
        """
        given = _given_ds(context)
        arrived = {} if given else self._arrived(context)
        ds = given or next(iter(arrived), None) or context.get("ds")
        if not ds:
            raise AirflowFailException(
                "nothing says which partition this run is for: trigger the DAG with the conf"
                ' {"ds": "2026-01-31"}, or with a logical date'
            )
        self.log.info("This run is for partition %s", ds)
        context["ti"].xcom_push(key=DS_KEY, value=ds)
        return [
            {"trigger_run_id": f"arrival__{other}__{timestamp}", "conf": {"ds": other}}
            for other, timestamp in arrived.items()
            if other != ds
        ]

    def _arrived(self, context: Context) -> dict[str, str]:
        """Each partition with the time of its latest event: the run's newest partition first.

        An event that comes between another one and the run which that one triggers may be
        given to no run (apache/airflow#54659, #56050). So all later events are read too.
        """
        triggering = context["triggering_asset_events"]
        arrived: dict[str, str] = {}
        later: dict[str, str] = {}
        for asset in self.assets:
            if asset not in triggering or not triggering[asset]:
                continue
            arrived |= _partitions(asset, triggering[asset])
            since = min(event.timestamp for event in triggering[asset])
            events = context["inlet_events"][asset]
            if hasattr(events, "after"):  # Airflow 3.2 and later; before, there is no filter
                events = events.after(since.isoformat())
            later |= _partitions(asset, [e for e in events if e.timestamp > since])
        newest_first = sorted(arrived, key=lambda ds: arrived[ds], reverse=True)
        return {ds: (arrived | later)[ds] for ds in (*newest_first, *later)}


def _given_ds(context: Context) -> str | None:
    """The partition that somebody, or another run, named when triggering this run."""
    conf: Mapping[str, Any] = context["dag_run"].conf or {}
    return conf.get(DS_KEY) or context["params"].get(DS_KEY)


def _partitions(asset: Asset, events: Iterable[Any]) -> dict[str, str]:
    """Partition -> time of its latest event."""
    partitions = {}
    for event in sorted(events, key=lambda event: event.timestamp):
        ds = event.extra.get(DS_KEY)
        if not isinstance(ds, str) or not ds:
            raise AirflowFailException(
                f"asset {asset.name!r}: the event of {event.timestamp} doesn't say which partition"
                ' has arrived; its extra must be like {"ds": "2026-01-31"}'
            )
        partitions[ds] = event.timestamp.strftime("%Y%m%dT%H%M%S.%f")
    return partitions
