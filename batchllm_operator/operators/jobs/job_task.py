"""A task's Job: creates, watches, scales and deletes it, and leaves it to a next try."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NoReturn, TypeVar

from airflow.providers.cncf.kubernetes.utils.pod_manager import OnFinishAction
from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowTaskTimeout,
)
from airflow.sdk import Context
from kubernetes_asyncio.client.exceptions import ApiException

from batchllm_operator.operators.jobs.calls import is_over_quota, message_of
from batchllm_operator.operators.jobs.cluster_job import ClusterJob, SupersededError
from batchllm_operator.operators.jobs.job_operator import BatchLLMJobOperator
from batchllm_operator.operators.jobs.owner import LABEL, Attempt
from batchllm_operator.operators.jobs.pod import built_pod, pod_of
from batchllm_operator.operators.jobs.trigger import JobTrigger, task_state
from batchllm_operator.operators.jobs.watch import WatchedJob

_Result = TypeVar("_Result")

_DEFERRAL_MARGIN: Final = timedelta(minutes=2)
"""Airflow ends a deferral this long after the task's deadline, if the triggerer hasn't."""
_LAST_CALL_S: Final = 4.0  # time to delete a Job: Airflow gives a killed task five seconds
_STATE_S: Final = 1.0  # part of it for asking Airflow, which may not answer, for the task's state
_STATE_LIMIT_S: Final = 10.0
_POLL_S: Final = 0.2  # between two looks whether the task was killed, while the cluster is called
_UNKNOWN: Final = "unknown"
KILLED: Final = "the task was killed; finished parts are kept"


class BatchLLMJobTask(BatchLLMJobOperator):
    """A task whose work may be done by a Job; `stage_operator` judges how that ended."""

    look_interval: timedelta | None = None
    """How often the task looks whether the work is done without its Job. None if never."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._watched: WatchedJob | None = None
        self._job: ClusterJob | None = None
        self._killed_at: float | None = None
        self._supervisor_pid: int | None = None

    @abstractmethod
    def identity(self) -> tuple[str, str]:
        """The job's output table, and a text that identifies the Job's work."""

    def on_kill(self) -> None:
        """Note it, in a signal handler: what `execute` waits for then ends, and deletes the Job."""
        self._killed_at = self._killed_at or time.monotonic()
        if self._child is not None:
            self._child.stop("the task was killed")

    # The Job

    def _attempt(self, context: Context) -> Attempt:
        return Attempt.of(context["ti"], *self.identity())

    def _watched_job(self, context: Context, namespace: str, uid: str = "") -> WatchedJob:
        attempt, deadline, pause_s = self._attempt(context), None, None
        if self.execution_timeout is not None:  # all deferrals of a try together
            deadline = (context["ti"].start_date + self.execution_timeout).isoformat()
        if self.look_interval is not None:  # with jitter, so that tasks don't stay in step
            pause_s = self.look_interval.total_seconds() * random.uniform(0.5, 1.0)
        return WatchedJob(
            *(self.kubernetes_conn_id, self.in_cluster, self.cluster_context, self.config_file),
            *(self.job_name(context, attempt), namespace, uid, asdict(attempt)),
            container_name=self.base_container_name,
            queue_s=self.queue_timeout.total_seconds(),
            start_s=self.start_timeout.total_seconds(),
            stuck_s=self.stuck_timeout.total_seconds(),
            api_s=self.api_timeout.total_seconds(),
            poll_s=self.poll_interval,
            pause_s=pause_s,
            deadline=deadline,
            aws_conn_id=self.aws_conn_id,
            connection_env=dict(self.connection_env or {}),
        )

    def _take(self, context: Context) -> None:
        """Create or adopt the Job, and its Secret."""
        credentials = self.credentials()
        if not self.session_token_outlives_task:
            credentials.check_lasting()
        values = credentials.variables
        body = self.request(context, self._attempt(context), list(values))
        name, namespace = body["metadata"]["name"], body["metadata"]["namespace"]
        self._watched = self._watched_job(context, namespace)

        async def take(job: ClusterJob) -> tuple[str, bool]:
            made, is_new = await job.take(body)
            if values:
                await job.put_secret(made, values)
            return str(made.metadata.uid), is_new

        try:
            uid, is_new = self._ask(take)
        except ApiException as error:
            self._watched = None  # no Job is about to appear; an earlier try's may be there
            message = f"the cluster refuses the Job or its Secret: {message_of(error)}"
            is_final = error.status in (400, 403, 404, 422) and not is_over_quota(error)
            raise (AirflowFailException if is_final else AirflowException)(message) from error
        except SupersededError:
            self._watched = None
            raise
        self.log.info("%s Job %s in namespace %s", "Made" if is_new else "Adopted", name, namespace)
        self._watched = replace(self._watched, uid=uid)

    def _defer(self, context: Context, watched: WatchedJob) -> NoReturn:
        if self._state(context) not in ("running", None, _UNKNOWN):
            self._release(context)
            raise AirflowException(KILLED)
        timeout = None
        if watched.deadline is not None:
            left = datetime.fromisoformat(watched.deadline) - datetime.now(UTC)
            timeout = left + _DEFERRAL_MARGIN
        arguments = asdict(watched)
        trigger, kwargs = JobTrigger(**arguments), {"watched": arguments}
        self.defer(trigger=trigger, method_name="resume", kwargs=kwargs, timeout=timeout)
        raise AssertionError("defer always raises")

    def scale(self, parallelism: int, completions: int | None = None) -> None:
        """Change how many of the Job's pods run at a time; a failure is only logged."""
        patch: dict[str, Any] = {"spec": {"parallelism": parallelism}}
        if completions is not None:
            patch["spec"]["completions"] = completions
            patch["metadata"] = {"labels": {f"{LABEL}/num-pods": str(completions)}}
        with self._logging_failures("scaled"):
            self._ask(lambda job: job.patch(patch))

    def _keeps_ended(self, *, is_whole: bool) -> bool:
        """Whether `on_finish_action` keeps a Job that has ended, which costs nothing."""
        action = self.on_finish_action
        removes = action == OnFinishAction.DELETE_SUCCEEDED_POD and is_whole
        return not (removes or action == OnFinishAction.DELETE_POD)

    def _release(self, context: Context, *, keeps_ended: bool = False) -> None:
        """Delete the Job, unless a later try has it. There may be time for one call only."""
        with self._logging_failures("deleted"):
            is_new = self._watched is not None and not self._watched.uid
            if self._watched is None:  # an earlier try's
                namespace = built_pod(self, pod_of(self)[0], context).metadata.namespace
                self._watched = self._watched_job(context, namespace)
            watched = self._watched
            limit_s = _LAST_CALL_S if self._is_over else self.api_timeout.total_seconds()
            if self._killed_at is not None:
                limit_s = max(_STATE_S, _LAST_CALL_S - (time.monotonic() - self._killed_at))
            # One whose creation was interrupted may still appear.
            waits_s = limit_s if is_new else None

            async def delete() -> None:
                async with self._cluster_job(limit_s) as job:
                    if await job.delete(watched.uid, limit_s=waits_s, keeps_ended=keeps_ended):
                        self.log.info("Keeping Job %s (on_finish_action)", watched.name)
                        if self.aws_conn_id is not None or self.connection_env:
                            await job.delete_secret()

            self.log.info("Deleting Job %s, if it is there", watched.name)
            asyncio.run(asyncio.wait_for(delete(), limit_s + 1.0))

    # Calls of the cluster

    def _cluster_job(self, patience_s: float | None = None) -> ClusterJob:
        assert self._watched is not None
        if self._job is None:  # one for all calls: Airflow may not answer again
            self._job = self._watched.job(self.log)
        self._job.patience_s = patience_s or self.api_timeout.total_seconds()
        return self._job

    def _ask(self, calls: Callable[[ClusterJob], Awaitable[_Result]]) -> _Result:
        """Call the cluster; raises `AirflowException` if the task is killed meanwhile."""

        async def cancellable() -> _Result:
            async with self._cluster_job() as job:
                call = asyncio.ensure_future(calls(job))
                while not call.done():
                    if self._is_over:
                        call.cancel()
                    await asyncio.wait([call], timeout=_POLL_S)
                return await call

        try:
            return asyncio.run(cancellable())
        except asyncio.CancelledError:
            raise AirflowException(KILLED) from None

    @contextmanager
    def _logging_failures(self, what: str) -> Iterator[None]:
        """Log a failure to change the Job instead of raising it: it doesn't decide the task."""
        try:
            yield
        # Any error: the results in the lake don't depend on the cluster.
        except Exception as error:  # noqa: BLE001
            self.log.error(
                "The Job couldn't be %s (%s); the next try will do it, or the cluster after"
                " active_deadline_seconds",
                what,
                message_of(error),
            )

    # Whose the Job is when a try ends

    def _is_orphan(self) -> bool:
        """Whether Airflow's supervisor of this process has died, so that its result is lost."""
        return self._supervisor_pid is not None and os.getppid() != self._supervisor_pid

    @property
    def _is_over(self) -> bool:
        return self._killed_at is not None or self._is_orphan()

    @contextmanager
    def _released_when_killed(self, context: Context) -> Iterator[None]:
        """Delete the Job if the task is killed or times out, but not if only this worker stops."""
        self._supervisor_pid = os.getppid()
        try:
            yield
        except BaseException as error:
            is_timeout = isinstance(error, AirflowTaskTimeout)
            if is_timeout:
                self.log.warning("The task's execution_timeout is over")
            elif not self._is_over:
                raise
            is_left = not is_timeout and may_be_retried(context)
            # Marking or clearing a task changes its state before the worker is killed; Airflow
            # notices the missing heartbeats of a worker without a supervisor.
            if is_left and (self._is_orphan() or self._state(context) == "running"):
                self.log.warning("The worker is going; the next try adopts the Job")
            else:
                self._release(context)
            raise

    def _state(self, context: Context) -> str | None:
        """The task's state in Airflow's database, None if it has none; `unknown` without answer."""
        ti, answer = context["ti"], Future[str | None]()

        def ask() -> None:
            try:
                answer.set_result(task_state(ti, ti.get_task_states))
            except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
                answer.set_exception(error)

        # A thread, as the call has no timeout of its own.
        threading.Thread(target=ask, name="task state", daemon=True).start()
        try:
            return answer.result(timeout=_STATE_S if self._killed_at else _STATE_LIMIT_S)
        # Any error: the Job has to be handled anyway.
        except Exception as error:  # noqa: BLE001
            self.log.warning("Can't tell the state of this task: %r", error)
            return _UNKNOWN


def may_be_retried(context: Context, error: Exception | None = None) -> bool:
    """Whether Airflow tries the task again when this try fails, with this error."""
    ti = context["ti"]
    return bool(ti.try_number <= ti.max_tries) and not isinstance(error, AirflowFailException)
