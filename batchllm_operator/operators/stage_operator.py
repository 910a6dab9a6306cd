"""Runs a stage as a task, in the worker or in a pod; the results in the lake decide (ADR 16).

execute -> verify -> pod -> watch -> verify -> finish
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.sdk import Context

from batchllm_operator.operators.metrics import PODS_REPLACED, QUOTA_WAITS, count_pod_event
from batchllm_operator.operators.pods.attempt import QuotaExceededError
from batchllm_operator.operators.pods.calls import StoppedError
from batchllm_operator.operators.pods.end import EndKind, PodEnd
from batchllm_operator.operators.pods.owner import LABEL
from batchllm_operator.operators.pods.waiting import KILLED, BatchLLMWaitingTask, time_left
from batchllm_operator.operators.pods.watch import PodName
from batchllm_operator.operators.tries import UNKNOWN, is_anothers, task_state, will_be_retried

_DEFERRAL_FAILED: Final = "__fail__"
"""What Airflow calls in place of our method when a deferral failed."""


class BatchLLMStageOperator(BatchLLMWaitingTask):
    """Runs one `batchllm` command in the worker or in a pod.

    A pod's phase, exit code and log don't decide: the task succeeds when a command in the worker,
    which therefore needs to read the lake, finds the complete results there. A try takes up the
    live pod that an earlier one left behind, but never one that has ended.

    A pod that the cluster ends (eviction, preemption, a lost node) is replaced in the same try; the
    next one continues from the finished parts.
    """

    # For subclasses

    def check(self) -> None:
        """Raise `AirflowFailException` if the stage can't succeed, before it starts."""

    @abstractmethod
    def command(self, context: Context) -> list[str]:
        """The arguments of `batchllm` that do the work, the same in worker and pod."""

    @abstractmethod
    def finish(self, context: Context, result: Mapping[str, Any]) -> Any:
        """The task's return value, from the result of `command` or `verify_command`."""

    def is_all_done(self, result: Mapping[str, Any]) -> bool:
        """Whether the result says so of the work that all tasks share (`look_interval`)."""
        return True

    # A try

    def execute(self, context: Context) -> Any:
        """Run the command to its end, or defer until its pod has ended.

        Raises:
            AirflowFailException: the spec, the table, the plan, a connection or the pod's
                template is wrong; a retry won't help.
            AirflowException: anything else; a retry continues from the finished parts.
        """
        self.check()
        if self.runner == "local":
            return self._work_here(context)
        with self._released_when_killed(context):
            found = self._verify(context, None)
            if not isinstance(found, str):
                self.log.info("The results are in the lake already: no pod is needed")
                self._release(context)  # one that an earlier try left behind
                return self.finish(context, found)
            return self._work(context, num_disruptions=0)

    def resume(self, context: Context, event: Mapping[str, Any], num_disruptions: int = 0) -> Any:
        with self._released_when_killed(context):
            end = PodEnd.from_event(event)
            pod = PodName(end.pod_name, end.namespace, self.base_container_name, end.pod_uid)
            if end.kind is EndKind.PAUSED:
                self._pod, end = pod, self._glance(context, pod, end)
            for line in end.last_lines:  # the triggerer's file is emptied by the next deferral
                self.log.info("%s", line)
            result = self._follow(context, pod, num_disruptions, end)
            if result is not None:
                return self.finish(context, result)
            return self._work(context, num_disruptions + 1)

    def resume_waiting(
        self, context: Context, event: Any, num_disruptions: int, waiting_since: str
    ) -> Any:
        """Try again to create a pod that a quota had no room for; see `execute`."""
        since = datetime.fromisoformat(waiting_since)
        with self._released_when_killed(context):
            return self._work(context, num_disruptions, waiting_since=since)

    def resume_execution(
        self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context
    ) -> Any:
        """Remove the pod when Airflow itself ends the deferral.

        It does so when the trigger raised, and when the triggerer didn't end it in time.
        """
        if next_method == _DEFERRAL_FAILED and self.runner != "local":
            self._release(context)
        return super().resume_execution(next_method, next_kwargs, context)

    def on_kill(self) -> None:
        """Interrupt what `execute` waits for; `execute` then removes the pods.

        The cluster isn't called here: Airflow calls this from a signal handler.

        Raises:
            StoppedError: into a running call of the cluster's API, if called in its thread.
        """
        if self._killed_at is None:
            self._killed_at = time.monotonic()
        if self._command_runner is not None:
            self._command_runner.stop("the task was killed")
        if self._watch is not None:
            self._watch.stop()
        if self._pods_asked is not None:
            self._pods_asked.calls.interrupt()

    def _work_here(self, context: Context) -> Any:
        """Run the command in the worker."""
        command, *arguments = self.command(context)
        return self.finish(context, self._commands().run(command, *arguments))

    def _work(
        self, context: Context, num_disruptions: int, waiting_since: datetime | None = None
    ) -> Any:
        while True:
            if waiting_since is not None and (found := self._done_meanwhile(context)) is not None:
                return self.finish(context, found)
            defers = self._defers(self.log.info)
            try:
                pod = self._take_pod(context)
            except QuotaExceededError as full:
                if waiting_since is None:
                    self._count(QUOTA_WAITS, context)
                    waiting_since = datetime.now(UTC)
                deadline = self._deadline(context)
                self._wait_for_quota(
                    str(full), num_disruptions, waiting_since, defers=defers, deadline=deadline
                )
                continue
            except StoppedError:
                raise AirflowException(KILLED) from None
            waiting_since = None
            if self._is_killed:
                raise AirflowException(KILLED)
            result = self._follow(context, pod, num_disruptions, defers=defers)
            if result is not None:
                return self.finish(context, result)
            num_disruptions += 1

    def _follow(
        self,
        context: Context,
        pod: PodName,
        num_disruptions: int,
        end: PodEnd | None = None,
        *,
        defers: bool | None = None,
    ) -> dict[str, Any] | None:
        """Watch a pod, or defer, until it has ended or isn't needed; returns as `_conclude` does.

        `end` is how the last watch of it ended.
        """
        while end is None or end.kind is EndKind.PAUSED:
            log_ns = -1
            if end is not None:
                self._pod, log_ns = pod, end.log_ns
                if (found := self._done_meanwhile(context)) is not None:
                    return found
            if defers is None:
                defers = self._defers(self.log.debug)
            end = None if defers else self._watch_here(context, pod, log_ns)
            if end is None:
                self._defer(context, pod, num_disruptions, log_ns)
        return self._conclude(context, end, num_disruptions)

    def _done_meanwhile(self, context: Context) -> dict[str, Any] | None:
        """The results if all of the work is done, perhaps by others; the task's pod is removed.

        It is also removed if others do the rest; but then it is None, because the pod may take up
        what they leave until it has stopped. So its end is judged like any other.
        """
        if self.look_interval is None:
            return None
        try:
            found = self._verify(context, None)
        except AirflowException as error:
            if self._is_over:
                raise
            self.log.warning("In the lake: %s", error)  # what the pod does counts
            return None
        if isinstance(found, str):
            return None
        self.log.info("Nothing is left for this task; its pod isn't needed")
        self._release(context)
        return found if self._pod is None or self.is_all_done(found) else None

    def _conclude(
        self, context: Context, end: PodEnd, num_disruptions: int
    ) -> dict[str, Any] | None:
        """Return the complete results, or None if another pod is to continue; else raise.

        The pod is removed, unless its state is unknown.
        """
        if end.kind is EndKind.STOPPED:
            raise AirflowException(KILLED)
        if end.is_unseen:
            return self._conclude_unseen(context, end)
        found = self._verify_ended(context, end)
        if isinstance(found, str):
            self._count_replacement(context, end, found, num_disruptions)
            return None
        if end.kind is not EndKind.EXITED or end.exit_code != 0:
            self.log.warning("%s; but its results are whole", end.explanation())
        return found

    def _verify_ended(self, context: Context, end: PodEnd) -> dict[str, Any] | str:
        """The results of a pod that has ended, or what they lack; removes the pod in any case."""
        self._pod = (
            None
            if end.may_stay
            else PodName(end.pod_name, end.namespace, self.base_container_name, end.pod_uid)
        )
        found: dict[str, Any] | str = ""
        try:
            found = self._verify(context, end.pod_uid)
        except AirflowException as error:
            raise type(error)(f"{end.explanation()}. In the lake: {error}") from error
        finally:
            self._remove_pod(context, end, is_success=not isinstance(found, str))
        return found

    def _count_replacement(
        self, context: Context, end: PodEnd, missing: str, num_disruptions: int
    ) -> None:
        """Count that another pod continues; raises if none may. The results lack `missing`."""
        if self._is_killed:
            raise AirflowException(KILLED)
        if not end.is_disruption or num_disruptions >= self.max_disruptions:
            message = f"{end.explanation()}. In the lake: {missing}"
            raise (AirflowFailException if end.is_final else AirflowException)(message)
        self.log.warning(
            "%s; making pod %d of at most %d",
            end.explanation(),
            num_disruptions + 2,
            self.max_disruptions + 1,
        )
        self._count(PODS_REPLACED, context)

    def _conclude_unseen(self, context: Context, end: PodEnd) -> dict[str, Any]:
        """Return the results if they are complete anyway; else leave the pod to the next try."""
        found: dict[str, Any] | str = ""
        try:
            found = self._verify(context, end.pod_uid)
        except AirflowException as error:
            self.log.warning("In the lake: %s", error)
        if not isinstance(found, str):
            self.log.warning("%s; but its results are whole", end.explanation())
            self._pod = None  # its work is done, so it may be kept
            self._release(context)
            return found
        if not will_be_retried(context["ti"]):
            self._release(context)  # this worker may have access
        raise AirflowException(end.explanation())

    def _count(self, name: str, context: Context) -> None:
        job = self.stage_labels().get(f"{LABEL}/job", "job")
        count_pod_event(name, self.component, context, job)

    def _defer(self, context: Context, pod: PodName, num_disruptions: int, log_ns: int) -> NoReturn:
        state = task_state(context["ti"], self.log)
        if state not in ("running", None, UNKNOWN):
            if not is_anothers(state):
                self._release(context)
            raise AirflowException(KILLED)
        deadline = self._deadline(context)
        self.defer(
            trigger=self._trigger(pod, deadline, log_ns),
            method_name="resume",
            kwargs={"num_disruptions": num_disruptions},
            timeout=time_left(deadline),
        )
        raise AssertionError("defer always raises")
