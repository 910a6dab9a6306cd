"""Partitions that arrive: one run for each, however Airflow gives their events to runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowSkipException
from airflow.sdk import Asset, BaseOperator, Context, TaskGroup, XComArg

DS_KEY: Final = "ds"
_NOT_IN_RUN_IDS: Final = re.compile(r"[^A-Za-z0-9_.~:+-]")
"""What Airflow's `allowed_run_id_pattern` refuses, unless it has been changed."""
_MAX_IN_RUN_ID: Final = 150  # of the 250 characters that a run id may have


def one_run_per_partition(*assets: Asset, group_id: str = "arrival") -> XComArg:
    """Give each partition that arrives a run of its own; call it inside a DAG.

    From Airflow 3.2 on a DAG can have the schedule `PartitionedAssetTimetable(assets=...)`: Airflow
    itself makes a run for each `partition_key`, which is the partition. It gives events with a key
    only to DAGs with such a schedule, and events without only to others.

    For a DAG whose schedule is one of `assets` or several, an event names its partition in
    `extra["ds"]`, as the events of `BatchLLMCommitOperator` do. Airflow gives one run the
    events that came close together, and leaves some of them for whenever the next one comes. So
    a run that has events does no work: it starts a run of the same DAG for each of them, whose id
    is made of partition and event, and skips what comes after. Who comes second finds it there.

    By hand: trigger the DAG with the conf `{"ds": "2026-01-31"}`, or with a logical date.

    Args:
        assets: input tables whose events say what has arrived.
        group_id: prefix of the three tasks' ids.

    Returns:
        The partition of the run, as `batchllm_task_group(..., ds=...)` takes it.
    """
    # Not above: it loads Airflow's database models, for DAGs that need none of this too.
    from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator

    with TaskGroup(group_id=group_id):
        events = BatchLLMArrivalOperator(task_id="events", assets=assets)
        TriggerDagRunOperator.partial(
            task_id="runs",
            trigger_dag_id="{{ dag.dag_id }}",
            skip_when_already_exists=True,  # a second try, or another run, has started it
        ).expand_kwargs(events.output)
        partition = _PartitionOperator(task_id="partition", ds=XComArg(events, key=DS_KEY))
    return partition.output


class BatchLLMArrivalOperator(BaseOperator):
    """Finds what a run is for: one partition, or to start the runs of those that have arrived.

    The partition is that of its conf, its partition key or, without events, its logical date.

    XComs: `ds` is the partition, empty for a run that starts others; the return value has one
    `{"trigger_run_id": ..., "conf": {"ds": ...}}` for each partition among the run's events and
    later ones, for `TriggerDagRunOperator.partial(...).expand_kwargs(...)`. Run ids are made of the
    partition and the time of its latest event; where Airflow refuses a character of the partition,
    a digest tells it apart.

    Args:
        assets: input tables whose events say what has arrived.
        kwargs: Airflow's.
    """

    ui_color = "#cfe3ea"

    def __init__(self, *, assets: Sequence[Asset], **kwargs: Any) -> None:
        super().__init__(inlets=list(assets), **kwargs)
        self.assets = tuple(assets)

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Name the run's partition, or the runs to start.

        Raises:
            AirflowFailException: an event has no `ds`, or nothing says which partition.
        """
        given = _given_ds(context)
        arrived = {} if given else self._arrived(context)
        ds = given or (None if arrived else context.get("ds"))
        if not ds and not arrived:
            raise AirflowFailException(
                "nothing says which partition this run is for: trigger the DAG with the conf"
                ' {"ds": "2026-01-31"}, or with a logical date'
            )
        if ds:
            self.log.info("This run is for partition %s", ds)
        else:
            self.log.info("Partitions %s have runs of their own", ", ".join(arrived))
        context["ti"].xcom_push(key=DS_KEY, value=ds or "")
        return [
            {"trigger_run_id": f"arrival__{_named(each)}__{timestamp}", "conf": {"ds": each}}
            for each, timestamp in arrived.items()
        ]

    def _arrived(self, context: Context) -> dict[str, str]:
        """Each partition with the time of its latest event.

        An event that comes between another one and the run which that one triggers may be
        given to no run (apache/airflow#54659, #56050). So all later events are read too.
        """
        triggering = context["triggering_asset_events"]
        arrived: dict[str, str] = {}
        for asset in self.assets:
            if asset not in triggering or not triggering[asset]:
                continue
            since = min(event.timestamp for event in triggering[asset])
            later = context["inlet_events"][asset]
            if hasattr(later, "after"):  # Airflow 3.2 and later; before, there is no filter
                later = later.after(since.isoformat())
            events = [*triggering[asset], *(event for event in later if event.timestamp > since)]
            for ds, time in _partitions(asset, events).items():
                arrived[ds] = max(time, arrived.get(ds, time))
        return arrived


class _PartitionOperator(BaseOperator):
    """The run's partition; skipped, with what comes after, in a run that starts others."""

    template_fields: Sequence[str] = ("ds",)
    ui_color = BatchLLMArrivalOperator.ui_color

    def __init__(self, *, ds: XComArg, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ds: Any = ds

    def execute(self, context: Context) -> str:
        if not self.ds:
            raise AirflowSkipException("each partition that has arrived has a run of its own")
        return str(self.ds)


def _given_ds(context: Context) -> str | None:
    run = context["dag_run"]
    conf: dict[str, Any] = run.conf or {}
    key = getattr(run, "partition_key", None)  # from Airflow 3.2 on
    return conf.get(DS_KEY) or context["params"].get(DS_KEY) or key


def _named(ds: str) -> str:
    """The partition as a run id may have it: itself, or what is left of it with a digest."""
    if len(ds) <= _MAX_IN_RUN_ID and not _NOT_IN_RUN_IDS.search(ds):
        return ds
    digest = hashlib.sha256(ds.encode(errors="surrogatepass")).hexdigest()[:12]
    return f"{_NOT_IN_RUN_IDS.sub('-', ds)[:_MAX_IN_RUN_ID]}-{digest}"


def _partitions(asset: Asset, events: Iterable[Any]) -> dict[str, str]:
    partitions = {}
    for event in sorted(events, key=lambda event: event.timestamp):
        ds = event.extra.get(DS_KEY) or getattr(event, "partition_key", None)
        if not isinstance(ds, str) or not ds:
            raise AirflowFailException(
                f"asset {asset.name!r}: the event of {event.timestamp} doesn't say which partition"
                ' has arrived; its extra must be like {"ds": "2026-01-31"}'
            )
        partitions[ds] = event.timestamp.strftime("%Y%m%dT%H%M%S.%f")
    return partitions
