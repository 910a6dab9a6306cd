"""Gives each partition that arrives a run of its own, however Airflow groups the events."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Final

from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import Asset, BaseOperator, Context, TaskGroup, XComArg
from airflow.sdk.definitions.asset import AssetRef

DS_KEY: Final = "ds"
_NOT_IN_RUN_IDS: Final = re.compile(r"[^A-Za-z0-9_.~:+-]")  # Airflow's `allowed_run_id_pattern`
_MAX_IN_RUN_ID: Final = 150  # of the 250 characters that a run id may have


def one_run_per_partition(*assets: Asset | AssetRef, group_id: str = "arrival") -> XComArg:
    """Give each partition that arrives a run of its own; call it inside a DAG.

    With the schedule `PartitionedAssetTimetable(assets=...)` Airflow itself makes a run for each
    `partition_key`, which is the partition. With a schedule of assets, an event names its partition
    in `extra["ds"]`, as those of `BatchLLMCommitOperator` do. Airflow gives several events to one
    run, and may leave others until the next event. So a run that has events starts a run of the
    same DAG for each partition, once, and skips the tasks that follow.
    By hand: trigger the DAG with the conf `{"ds": "2026-01-31"}`, or with a logical date.

    Returns the partition of the run, as `batchllm_task_group(..., ds=...)` takes it. `group_id` is
    the prefix of the tasks' ids.
    """
    # Imported here because they load Airflow's database models.
    from airflow.providers.standard.operators.python import ShortCircuitOperator
    from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator

    with TaskGroup(group_id=group_id):
        events = BatchLLMArrivalOperator(task_id="events", assets=assets)
        TriggerDagRunOperator.partial(
            task_id="runs",
            trigger_dag_id="{{ dag.dag_id }}",
            skip_when_already_exists=True,  # by an earlier try or another run
            map_index_template="{{ task.conf['ds'] }}",
        ).expand_kwargs(events.output)
        partition = ShortCircuitOperator(
            task_id="partition",
            # If it is empty, what follows is skipped. Airflow keeps names such as `ds` to itself.
            python_callable=lambda given: given,
            op_args=[XComArg(events, key=DS_KEY)],
            ignore_downstream_trigger_rules=False,
        )
    return partition.output


class BatchLLMArrivalOperator(BaseOperator):
    """Finds the run's partition, or the runs to start for partitions that have arrived.

    The partition is that of the conf, the partition key or, without events, the logical date.

    XComs: `ds` is the partition, empty for a run that starts others; the return value has the
    arguments of a `TriggerDagRunOperator` for each partition among the run's events of `assets` and
    later ones. A run id is made of the partition and the time of its latest event.
    """

    ui_color = "#cfe3ea"

    def __init__(self, *, assets: Sequence[Asset | AssetRef], **kwargs: Any) -> None:
        super().__init__(inlets=list(assets), **kwargs)
        self.assets = tuple(assets)

    def execute(self, context: Context) -> list[dict[str, Any]]:
        run = context["dag_run"]
        given = (run.conf or {}).get(DS_KEY) or context["params"].get(DS_KEY) or run.partition_key
        arrived = {} if given else self._arrived(context)
        ds = given or (None if arrived else context.get("ds"))
        if ds:
            self.log.info("This run is for partition %s", ds)
        elif arrived:
            self.log.info("Partitions %s have runs of their own", ", ".join(arrived))
        else:
            raise AirflowFailException(
                "nothing says which partition this run is for: trigger the DAG with the conf"
                ' {"ds": "2026-01-31"}, or with a logical date'
            )
        context["ti"].xcom_push(key=DS_KEY, value=ds or "")
        return [
            {"trigger_run_id": f"arrival__{_named(name)}__{time}", "conf": {"ds": name}}
            for name, time in arrived.items()
        ]

    def _arrived(self, context: Context) -> dict[str, str]:
        """The partitions that the events name, and when the latest event of each came."""
        triggering = context["triggering_asset_events"]
        arrived: dict[str, str] = {}
        for asset in self.assets:
            if asset not in triggering or not triggering[asset]:
                continue
            since = min(event.timestamp for event in triggering[asset])
            later = context["inlet_events"][asset].after(since.isoformat())
            events = [*triggering[asset], *(event for event in later if event.timestamp > since)]
            for event in sorted(events, key=lambda event: event.timestamp):
                ds = event.extra.get(DS_KEY) or getattr(event, "partition_key", None)
                if not isinstance(ds, str) or not ds:
                    raise AirflowFailException(
                        f"asset {event.asset.name!r}: the event of {event.timestamp} doesn't say"
                        ' which partition has arrived; its extra must be like {"ds": "2026-01-31"}'
                    )
                time = event.timestamp.strftime("%Y%m%dT%H%M%S.%f")
                arrived[ds] = max(time, arrived.get(ds, time))
        return arrived


def _named(ds: str) -> str:
    """The partition as part of a run id: itself, or its allowed characters and a digest."""
    if len(ds) <= _MAX_IN_RUN_ID and not _NOT_IN_RUN_IDS.search(ds):
        return ds
    digest = hashlib.sha256(ds.encode(errors="surrogatepass")).hexdigest()[:12]
    return f"{_NOT_IN_RUN_IDS.sub('-', ds)[:_MAX_IN_RUN_ID]}-{digest}"
