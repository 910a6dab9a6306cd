"""Rows of Airflow's database: runs, their tasks, and what these have noted."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, insert, select

DAY = datetime(2026, 1, 1, tzinfo=UTC)
CLASSES = {
    stage: f"BatchLLM{stage.capitalize()}Operator"
    for stage in ("plan", "generate", "commit", "report")
}


class Records:
    """Puts rows into Airflow's database. Ids need be no ids that Airflow would take."""

    def clear(self) -> None:
        """Remove all runs, tasks and what they have noted."""
        with self._session() as session:
            for table in self._tables():
                session.execute(delete(table))

    def run(
        self,
        dag_id: str = "job",
        run_id: str = "a",
        *,
        state: str = "running",
        day: int = 0,
        logical_day: int | None = None,
        conf: dict[str, Any] | None = None,
    ) -> Records:
        """A run of a DAG, due `day` days after the first."""
        from airflow.models.dagrun import DagRun
        from airflow.utils.types import DagRunType

        due = DAY + timedelta(days=day)
        logical = None if logical_day is None else DAY + timedelta(days=logical_day)
        ids = {"dag_id": dag_id, "run_id": run_id, "run_type": DagRunType.MANUAL}
        times = {"run_after": due, "logical_date": logical, "queued_at": due}
        more = {"state": state, "conf": conf, "clear_number": 0, "log_template_id": None}
        self._insert(DagRun, ids | times | more)
        return self

    def task(
        self,
        task_id: str,
        state: str | None = "success",
        *,
        dag_id: str = "job",
        run_id: str = "a",
        map_index: int = -1,
        operator: str | None = None,
        rendered: dict[str, Any] | None = None,
        **xcoms: Any,
    ) -> Records:
        """A task of a run; `xcoms` are what it has noted, as Airflow stores it."""
        from airflow.models.renderedtifields import RenderedTaskInstanceFields
        from airflow.models.taskinstance import TaskInstance
        from airflow.models.xcom import XComModel

        which = {"dag_id": dag_id, "run_id": run_id, "task_id": task_id, "map_index": map_index}
        operator = operator or CLASSES[task_id.rpartition(".")[2]]
        tries = {"operator": operator, "try_number": 1, "max_tries": 0}
        pool = {"pool": "default_pool", "pool_slots": 1, "queue": "default", "priority_weight": 1}
        self._insert(TaskInstance, which | {"state": state} | tries | pool)
        if rendered is not None:
            self._insert(RenderedTaskInstanceFields, {**which, "rendered_fields": rendered})
        for key, value in xcoms.items():
            noted = {"key": key, "value": json.dumps(value), "dag_run_id": self._run(which)}
            self._insert(XComModel, which | noted)
        return self

    def job(
        self,
        plan_uri: Any,
        *,
        dag_id: str = "job",
        run_id: str = "a",
        group: str = "batchllm",
        commit: str | None = None,
        outcome: dict[str, Any] | None = None,
        planned: dict[str, Any] | None = None,
    ) -> Records:
        """The tasks of a job, planned as `plan_uri`; committed if there is an outcome.

        `planned` are the plan's counts and predictions.
        """
        where: dict[str, Any] = {"dag_id": dag_id, "run_id": run_id}
        noted = {"plan_uri": plan_uri, "return_value": {"plan_uri": plan_uri}}
        if planned is not None:
            noted["plan"] = planned
        self.task(f"{group}.plan", **noted, **where)
        generated = "running" if outcome is None else "success"
        self.task(f"{group}.generate", generated, **where)
        if outcome is None:
            return self.task(f"{group}.commit", commit, **where)
        outcome = {"plan_uri": plan_uri, **outcome}
        return self.task(f"{group}.commit", return_value=outcome, **where)

    def dag(self, dag: Any) -> Records:
        """A DAG as the DAG processor leaves it: serialized."""
        from airflow.models.dag import DagModel
        from airflow.models.dagbundle import DagBundleModel
        from airflow.models.serialized_dag import SerializedDagModel
        from airflow.serialization.serialized_objects import LazyDeserializedDAG

        with self._session() as session:
            session.merge(DagBundleModel(name="tests"))
            session.flush()
            session.merge(DagModel(dag_id=dag.dag_id, bundle_name="tests", fileloc="x"))
            session.flush()
            lazy = LazyDeserializedDAG.from_dag(dag)
            SerializedDagModel.write_dag(lazy, bundle_name="tests", session=session)
        return self

    def _run(self, which: dict[str, Any]) -> int:
        from airflow.models.dagrun import DagRun

        is_run = (DagRun.dag_id == which["dag_id"], DagRun.run_id == which["run_id"])
        with self._session() as session:
            return int(session.scalar(select(func.max(DagRun.id)).where(*is_run)))

    def _insert(self, model: Any, values: dict[str, Any]) -> None:
        with self._session() as session:
            session.execute(insert(model).values(**values))

    def _session(self) -> Any:
        from airflow.utils.session import create_session

        return create_session(scoped=False)

    def _tables(self) -> list[Any]:
        from airflow.models.dag_version import DagVersion
        from airflow.models.dagrun import DagRun
        from airflow.models.renderedtifields import RenderedTaskInstanceFields
        from airflow.models.serialized_dag import SerializedDagModel
        from airflow.models.taskinstance import TaskInstance
        from airflow.models.xcom import XComModel

        of_runs = [XComModel, RenderedTaskInstanceFields, TaskInstance, DagRun]
        return [*of_runs, SerializedDagModel, DagVersion]
