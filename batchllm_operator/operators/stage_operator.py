"""Runs a stage as a task, in the worker or in a Kubernetes Job; the lake decides (ADR 38)."""

import asyncio
import random
import threading
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow.providers.cncf.kubernetes.utils.pod_manager import OnFinishAction
from airflow.providers.common.compat import sdk
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.sdk import Context
from kubernetes_asyncio.client.exceptions import ApiException

from batchllm_operator.operators.jobs.calls import is_passing, message_of
from batchllm_operator.operators.jobs.cluster_job import ClusterJob
from batchllm_operator.operators.jobs.end import EndKind, JobEnd
from batchllm_operator.operators.jobs.job_operator import BatchLLMJobOperator
from batchllm_operator.operators.jobs.owner import NUM_PODS, WatchedJob
from batchllm_operator.operators.jobs.watch import JobTrigger, JobWatch, task_state

_DEFERRAL_MARGIN: Final = timedelta(minutes=2)  # after which Airflow itself ends a late deferral
_LAST_CALL_S: Final = 4.0  # time to delete a Job: Airflow gives a killed task five seconds
_STATE_S: Final = 1.0  # part of it for asking Airflow, which may not answer, for the task's state
_STATE_LIMIT_S: Final = 10.0
_POLL_S: Final = 0.2  # between two looks whether the task was killed, while the cluster is called
_UNKNOWN: Final = "unknown"
KILLED: Final = "the task was killed; finished parts are kept"
_DEFERRAL_FAILED: Final = "__fail__"  # what Airflow calls when a deferral failed


class BatchLLMStageOperator(BatchLLMJobOperator):
    """Runs one `batchllm` command in the worker, or in the pods of one Job.

    The task succeeds when a command in the worker, which therefore needs to read the lake, finds
    the complete results there. A try adopts a Job that an earlier one left behind, unless it has
    ended.
    """

    look_interval: timedelta | None = None  # between two looks whether the work is done already
    _job: ClusterJob | None = None  # one for all calls: Airflow may not answer again

    def check(self) -> None:
        """Raise `AirflowFailException` if the stage can't succeed, before it starts."""

    @abstractmethod
    def verified(self, context: Context, end: JobEnd | None) -> dict[str, Any] | str:
        """The results in the lake, or a text on what they lack; `end` is None before a Job ran."""

    @abstractmethod
    def finish(self, context: Context, result: Mapping[str, Any]) -> Any:
        """The task's return value, from the result of `command` or `verified`."""

    def look(self, context: Context, end: JobEnd) -> bool:
        """Whether the results are whole while the Job still lives; see `look_interval`."""
        return False

    def execute(self, context: Context) -> Any:
        """Run the command to its end, or defer until its Job has ended."""
        if self.runner == "local":
            self.check()
            results = "" if self.num_pods() else self.verified(context, None)
            if isinstance(results, str):
                results = self.run_command(*self.command(context))
            return self.finish(context, results)
        with self._released_when_killed(context):
            try:
                self.check()
                num_pods, results = self.num_pods(), self.verified(context, None)
                if isinstance(results, str) and not num_pods:
                    raise AirflowFailException(f"num_workers is 0, but work is left: {results}")
                if isinstance(results, str):
                    self._take(context)
            # Any error, such as a full disk.
            except Exception as error:
                if self._killed_at is None and not may_be_retried(context, error):
                    self._release(context)  # no later try will adopt an earlier try's Job
                raise
            if isinstance(results, str):
                return self._follow(context)
            self.log.info("The results are in the lake already: no Job is needed")
            self._release(context, is_whole=True)
            return self.finish(context, results)

    def resume(self, context: Context, event: Mapping[str, Any], watched: Mapping[str, Any]) -> Any:
        """Go on when the trigger has fired."""
        with self._released_when_killed(context):
            self._job = ClusterJob(WatchedJob(**watched), self.log)
            end = JobEnd.from_event(event)
            for line in end.last_lines:  # the triggerer's file is emptied by the next deferral
                self.log.info("%s", line)
            return self._follow(context, end)

    def resume_execution(
        self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context
    ) -> Any:
        """Delete the Job when Airflow itself ends the deferral: the trigger raised, or is late."""
        if next_method == _DEFERRAL_FAILED and self.runner != "local":
            self._release(context)
        return super().resume_execution(next_method, next_kwargs, context)

    def _follow(self, context: Context, end: JobEnd | None = None) -> Any:
        """Watch the Job, or defer, until it has ended or isn't needed."""
        assert self._job is not None, "the Job was taken before"
        while end is None or end.kind is EndKind.PAUSED:
            if end is not None and self._is_done(context, end):
                break
            self._job.of = replace(self._job.of, before=end.as_event() if end else None)
            if self.deferrable:
                self._defer(context, self._job.of)
            masker = self.credentials().masker
            end = self._ask(lambda job: JobWatch(job, masker).until_end())  # noqa: B023
        return self._conclude(context, end)

    def _is_done(self, context: Context, end: JobEnd) -> bool:
        try:
            return self.look(context, end)
        # Any error, of the lake or of scaling the Job: what the Job does counts.
        except Exception as error:
            if self._killed_at is not None:
                raise
            self.log.warning("While looking for what is left: %s", message_of(error))
            return False

    def _conclude(self, context: Context, end: JobEnd) -> Any:
        """The task's return value; else raises. The Job is deleted, unless its state is unknown."""
        try:
            results = self.verified(context, end)
            if isinstance(results, str):
                raise (AirflowFailException if end.is_final else AirflowException)(results)
        # Any error, such as a full disk: the Job has to go all the same.
        except Exception as error:
            if not (end.kind is EndKind.UNSEEN and may_be_retried(context, error)):
                self._release(context, is_whole=False)
            if not isinstance(error, AirflowException):
                raise
            raise type(error)(f"{end.text}. In the lake: {error}") from error
        self._release(context, is_whole=True)
        if end.kind not in (EndKind.COMPLETE, EndKind.PAUSED):
            self.log.warning("%s; but its results are whole", end.text)
        return self.finish(context, results)

    def _job_in(self, namespace: str, context: Context) -> ClusterJob:
        """This try's Job, or an earlier one's, which has the same name."""
        deadline, pause_s = None, None
        if self.execution_timeout is not None:  # all deferrals of a try together
            deadline = (context["ti"].start_date + self.execution_timeout).isoformat()
        if self.look_interval is not None:  # with jitter, so that tasks don't stay in step
            pause_s = self.look_interval.total_seconds() * random.uniform(0.5, 1.0)
        same = ("kubernetes_conn_id", "in_cluster", "cluster_context", "config_file")
        limits = {
            f"{name}_s": getattr(self, f"{name}_timeout").total_seconds()
            for name in ("queue", "start", "stuck", "api")
        }
        of = WatchedJob(
            **asdict(self._attempt(context)),
            **{name: getattr(self, name) for name in same},
            namespace=namespace,
            container_name=self.base_container_name,
            **limits,
            poll_s=self.poll_interval,
            pause_s=pause_s,
            deadline=deadline,
            lake_conn_id=self.lake_conn_id,
            connection_env=dict(self.connection_env or {}),
        )
        return ClusterJob(of, self.log)

    def _take(self, context: Context) -> None:
        """Create or adopt the Job, and its Secret."""
        credentials = self.credentials()
        if not self.session_token_outlives_task:
            credentials.check_lasting()
        body = self.request(context, list(credentials.variables))
        self._job = self._job_in(body["metadata"]["namespace"], context)
        try:
            self._ask(lambda job: job.take(body, credentials.variables))
        except ApiException as error:
            message = f"the cluster refuses the Job or its Secret: {message_of(error)}"
            failure = AirflowException if is_passing(error, is_new=True) else AirflowFailException
            raise failure(message) from error

    def _defer(self, context: Context, of: WatchedJob) -> None:
        if self._state(context) not in ("running", None, _UNKNOWN):
            self._release(context)
            raise AirflowException(KILLED)
        timeout, fields = None, asdict(of)
        if of.deadline is not None:
            timeout = datetime.fromisoformat(of.deadline) - datetime.now(UTC) + _DEFERRAL_MARGIN
        trigger, kwargs = JobTrigger(**fields), {"watched": fields}
        self.defer(trigger=trigger, method_name="resume", kwargs=kwargs, timeout=timeout)

    def scale(self, parallelism: int, completions: int | None = None) -> None:
        """Change how many of the Job's pods run at a time, and how many it has."""
        patch: dict[str, Any] = {"spec": {"parallelism": parallelism}}
        if completions is not None:
            patch["spec"]["completions"] = completions
            patch["metadata"] = {"labels": {NUM_PODS: str(completions)}}
        self._ask(lambda job: job.call_job("patch", patch))

    def _release(self, context: Context, *, is_whole: bool | None = None) -> None:
        """Delete the Job, unless a later try has it; a failure is only logged.

        With `is_whole`, whether the results are, `on_finish_action` may keep one that has ended.
        """
        action = self.on_finish_action
        removes = is_whole is None or action == OnFinishAction.DELETE_POD
        removes = removes or (is_whole is True and action == OnFinishAction.DELETE_SUCCEEDED_POD)
        limit_s = self.api_timeout.total_seconds()
        if self._killed_at is not None:
            limit_s = max(_STATE_S, _LAST_CALL_S - (time.monotonic() - self._killed_at))

        async def delete(job: ClusterJob) -> None:
            job.patience_s = limit_s
            async with asyncio.timeout(limit_s + 1.0), job:
                await job.delete(keeps_ended=not removes)

        try:
            if (job := self._job) is None:  # an earlier try's
                namespace = self.build_pod_request_obj(context, dry_run=True).metadata.namespace
                job = self._job = self._job_in(namespace, context)
            self.log.info("Deleting Job %s, if it is there", job.of.name)
            asyncio.run(delete(job))
        # Any error: the results in the lake don't depend on the cluster.
        except Exception as error:  # noqa: BLE001
            self.log.error(
                "The Job couldn't be deleted (%s); the next try will do it, or the cluster after"
                " active_deadline_seconds",
                message_of(error),
            )

    def _ask(self, calls: Callable[[ClusterJob], Awaitable[Any]]) -> Any:
        """Call the cluster; raises `AirflowException` if the task is killed meanwhile."""
        assert self._job is not None, "the Job was taken before"
        job = self._job

        async def cancellable() -> Any:
            async with job:
                call = asyncio.ensure_future(calls(job))
                while not call.done():
                    if self._killed_at is not None:
                        call.cancel()
                    await asyncio.wait([call], timeout=_POLL_S)
                return await call

        try:
            return asyncio.run(cancellable())
        except asyncio.CancelledError:
            raise AirflowException(KILLED) from None

    @contextmanager
    def _released_when_killed(self, context: Context) -> Iterator[None]:
        """Delete the Job if the task is killed or times out, but not if only this worker stops."""
        try:
            yield
        except BaseException as error:
            is_timeout = isinstance(error, sdk.AirflowTaskTimeout)
            if is_timeout:
                self.log.warning("The task's execution_timeout is over")
            elif self._killed_at is None:
                raise
            # Marking or clearing a task changes its state before the worker is killed.
            is_left = not is_timeout and may_be_retried(context)
            if is_left and self._state(context) == "running":
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
