"""Creates, watches, scales and deletes the Job of a task."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from queue import Empty, SimpleQueue
from typing import Any, Final, NoReturn, TypeVar

from airflow.providers.cncf.kubernetes.utils.pod_manager import OnFinishAction
from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowTaskTimeout,
)
from airflow.sdk import Context
from kubernetes_asyncio.client.exceptions import ApiException

from batchllm_operator.operators.command import CommandRunner
from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.operators.jobs.api_errors import REFUSED, is_over_quota, message_of
from batchllm_operator.operators.jobs.cluster_job import ClusterJob, SupersededError
from batchllm_operator.operators.jobs.end import EndKind, JobEnd
from batchllm_operator.operators.jobs.job_request import BatchLLMJobRequest
from batchllm_operator.operators.jobs.owner import LABEL
from batchllm_operator.operators.jobs.trigger import JobTrigger, WatchedJob, task_state

_Result = TypeVar("_Result")

KILLED: Final = "the task was killed; finished parts are kept"
_DEFERRAL_MARGIN: Final = timedelta(minutes=2)
"""Airflow ends a deferral this long after the task's deadline, if the triggerer hasn't."""
_LAST_CALL_S: Final = 4.0
"""Time to delete a Job: Airflow gives a killed task five seconds."""
_STATE_S: Final = 1.0
"""Part of it for asking Airflow, which may not answer, for the task's state."""
_STATE_LIMIT_S: Final = 10.0
_UNKNOWN: Final = "unknown"


class BatchLLMJobTask(BatchLLMJobRequest):
    """A task whose work may be done by a Job; `stage_operator` judges how that ended."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._command_runner: CommandRunner | None = None
        self._call: asyncio.Task[Any] | None = None
        self._watched: WatchedJob | None = None
        self._last_job: ClusterJob | None = None
        self._killed_at: float | None = None
        self._supervisor_pid: int | None = None

    def on_kill(self) -> None:
        """Interrupt what `execute` waits for; `execute` then deletes the Job.

        The cluster isn't called here: Airflow calls this from a signal handler.
        """
        if self._killed_at is None:
            self._killed_at = time.monotonic()
        if self._command_runner is not None:
            self._command_runner.stop("the task was killed")
        if self._call is not None:
            self._call.get_loop().call_soon_threadsafe(self._call.cancel)

    def _commands(self) -> CommandRunner:
        credentials = Credentials.of(self.aws_conn_id, self.connection_env)
        self._command_runner = CommandRunner(self.log, self.env, credentials, self.kill_grace_s)
        return self._command_runner

    def _take(self, context: Context) -> WatchedJob:
        """Create or adopt the Job, and its Secret."""
        values: Mapping[str, str] = {}
        if self.has_secrets:
            credentials = Credentials.of(self.aws_conn_id, self.connection_env)
            if not self.session_token_outlives_task:
                credentials.check_lasting()
            values = credentials.variables
        attempt = self._attempt(context)
        body = self.request(context, attempt, list(values))
        name, namespace = body["metadata"]["name"], body["metadata"]["namespace"]
        self._watched = watched = self._watched_job(context, name, namespace, "", attempt)

        async def take() -> tuple[str, bool]:
            async with self._job(watched) as job:
                made, is_new = await job.take(body)
                if values:
                    await self._put_secret(job, made, values)
                return made.metadata.uid, is_new

        try:
            uid, is_new = self._run(take())
        except ApiException as error:
            message = f"the cluster refuses the Job or its Secret: {message_of(error)}"
            is_final = error.status in REFUSED and not is_over_quota(error)
            raise (AirflowFailException if is_final else AirflowException)(message) from error
        except SupersededError:
            self._watched = None
            raise AirflowException(
                f"a later try of this task has Job {name}: this one ends"
            ) from None
        self.log.info("%s Job %s in namespace %s", "Made" if is_new else "Adopted", name, namespace)
        return self._watched_job(context, name, namespace, uid, attempt)

    async def _put_secret(self, job: ClusterJob, made: Any, values: Mapping[str, str]) -> None:
        """Give the Job its credentials, or delete it: its pods would wait for them forever."""
        try:
            await job.put_secret(made, values)
        except ApiException:
            await job.delete(made.metadata.uid)
            raise

    def _job(self, watched: WatchedJob, patience_s: float | None = None) -> ClusterJob:
        if patience_s is None:
            patience_s = self.api_timeout.total_seconds()
        before, self._last_job = self._last_job, watched.job(self.log, patience_s)
        if self._is_over and before is not None:  # Airflow may not answer in time
            self._last_job.extras = before.extras
        return self._last_job

    def _watch(self, context: Context, before: JobEnd | None) -> JobEnd:
        """Watch the Job from this process."""
        watched = self._after(before)
        masker = Credentials.of(self.aws_conn_id, self.connection_env).masker

        async def watch() -> JobEnd:
            async with self._job(watched) as job:
                return await watched.watch(job, self.log.info, masker).until_end()

        return self._run(watch())

    def _defer(self, context: Context, before: JobEnd | None) -> NoReturn:
        watched, deadline = self._after(before), self._deadline(context)
        if self._state(context) not in ("running", None, _UNKNOWN):
            self._release(context)
            raise AirflowException(KILLED)
        self.defer(
            trigger=JobTrigger(**asdict(watched)),
            method_name="resume",
            kwargs={"watched": asdict(watched)},
            timeout=deadline - datetime.now(UTC) + _DEFERRAL_MARGIN if deadline else None,
        )
        raise AssertionError("defer always raises")

    def _after(self, before: JobEnd | None) -> WatchedJob:
        assert self._watched is not None, "the Job was taken before"
        return replace(self._watched, before=before.as_event() if before else None)

    def scale(self, parallelism: int, completions: int | None = None) -> None:
        """Change how many of the Job's pods run at a time; a failure is only logged."""
        spec = {"parallelism": parallelism}
        patch: dict[str, Any] = {"spec": spec}
        if completions is not None:
            spec["completions"] = completions
            patch["metadata"] = {"labels": {f"{LABEL}/num-pods": str(completions)}}

        async def scale() -> None:
            async with self._job(self._after(None)) as job:
                await job.patch(patch)

        with self._logging_failures("scaled"):
            self._run(scale())

    def _finish_job(self, context: Context, end: JobEnd, *, is_whole: bool) -> None:
        """Delete a Job that has ended, unless `on_finish_action` keeps it and it costs nothing."""
        deletes = self.on_finish_action == OnFinishAction.DELETE_POD or (
            is_whole and self.on_finish_action == OnFinishAction.DELETE_SUCCEEDED_POD
        )
        if deletes or end.kind not in (EndKind.COMPLETE, EndKind.FAILED):
            self._release(context)
            return
        self.log.info("Keeping Job %s (on_finish_action)", end.job)
        if self.has_secrets:

            async def delete_secret() -> None:
                async with self._job(self._after(None)) as job:
                    await job.delete_secret()

            with self._logging_failures("cleaned up"):
                self._run(delete_secret())

    def _release(self, context: Context) -> None:
        """Delete the Job, unless a later try has it. There may be time for one call only."""
        with self._logging_failures("deleted"):
            watched = self._watched
            if watched is None:  # an earlier try's
                attempt = self._attempt(context)
                namespace = self._built(self._pod_template()[0], context).metadata.namespace
                name = attempt.job_name(self.stem())
                watched = self._watched_job(context, name, namespace, "", attempt)
            limit_s = _LAST_CALL_S if self._is_over else self.api_timeout.total_seconds()
            if self._killed_at is not None:
                limit_s = max(_STATE_S, _LAST_CALL_S - (time.monotonic() - self._killed_at))
            # One whose creation was interrupted may still appear.
            waits_s = limit_s if self._watched is not None and not watched.uid else None

            async def delete() -> None:
                async with self._job(watched, limit_s) as job:
                    await job.delete(watched.uid, limit_s=waits_s)

            self.log.info("Deleting Job %s", watched.name)
            asyncio.run(asyncio.wait_for(delete(), limit_s + 1.0))

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run calls of the cluster; raises `AirflowException` if the task is killed meanwhile."""

        async def cancellable() -> _Result:
            self._call = asyncio.create_task(work)
            if self._is_over:
                self._call.cancel()
            supervisor = asyncio.create_task(self._cancel_orphan(self._call))
            try:
                result: _Result = await self._call
                return result
            finally:
                supervisor.cancel()
                self._call = None

        try:
            return asyncio.run(cancellable())
        except asyncio.CancelledError:
            raise AirflowException(KILLED) from None

    async def _cancel_orphan(self, call: asyncio.Task[Any]) -> None:
        while not self._is_orphan():
            await asyncio.sleep(0.5)
        call.cancel()

    # Whose the Job is when a try ends

    @property
    def _is_killed(self) -> bool:
        return self._killed_at is not None

    def _is_orphan(self) -> bool:
        """Whether Airflow's supervisor of this process has died, so that its result is lost."""
        return self._supervisor_pid is not None and os.getppid() != self._supervisor_pid

    @property
    def _is_over(self) -> bool:
        return self._is_killed or self._is_orphan()

    @contextmanager
    def _released_when_killed(self, context: Context) -> Iterator[None]:
        """Delete the Job if the task is killed or times out meanwhile.

        It is left to the next try if only this worker is stopping: marking or clearing a task
        changes its state first.
        """
        self._supervisor_pid = os.getppid()
        try:
            yield
        except BaseException as error:
            is_timeout = isinstance(error, AirflowTaskTimeout)
            if is_timeout:
                self.log.warning("The task's execution_timeout is over")
            elif not self._is_over:
                raise
            is_left = not is_timeout and will_be_retried(context)
            # Airflow notices the missing heartbeats of a worker without a supervisor.
            if is_left and (self._is_orphan() or self._state(context) == "running"):
                self.log.warning("The worker is going; the next try adopts the Job")
            else:
                self._release(context)
            raise

    def _state(self, context: Context) -> str | None:
        """The task's state in Airflow's database, None if it has none; `unknown` without answer."""
        ti = context["ti"]
        answers: SimpleQueue[Any] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put(task_state(ti, ti.get_task_states))
            # Any error: the Job has to be handled anyway.
            except Exception as error:  # noqa: BLE001
                answers.put(error)

        # A thread, as the call has no timeout of its own.
        threading.Thread(target=ask, name="task state", daemon=True).start()
        try:
            state = answers.get(timeout=_STATE_S if self._is_killed else _STATE_LIMIT_S)
        except Empty:
            state = TimeoutError("no answer in time")
        if isinstance(state, Exception):
            self.log.warning("Can't tell the state of this task: %s", state)
            return _UNKNOWN
        return None if state is None else str(state)

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


def will_be_retried(context: Context) -> bool:
    ti = context["ti"]
    return bool(ti.try_number <= ti.max_tries)
