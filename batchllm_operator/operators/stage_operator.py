"""Runs a stage as a task, in the worker or in a Kubernetes Job; the lake decides (ADR 38).

execute -> verify -> Job -> watch -> verify -> finish
"""

from __future__ import annotations

import random
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Final

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.sdk import Context

from batchllm_operator.operators.jobs.end import EndKind, JobEnd
from batchllm_operator.operators.jobs.job_task import KILLED, BatchLLMJobTask, will_be_retried
from batchllm_operator.operators.jobs.trigger import WatchedJob

_DEFERRAL_FAILED: Final = "__fail__"
"""What Airflow calls in place of our method when a deferral failed."""
_VERIFY_PAUSES_S: Final = (2.0, 10.0)


class BatchLLMStageOperator(BatchLLMJobTask):
    """Runs one `batchllm` command in the worker, or in the pods of one Job.

    A Job's end, exit codes and logs don't decide: the task succeeds when a command in the worker,
    which therefore needs to read the lake, finds the complete results there. A try adopts the Job
    that an earlier one left behind, but never one that has ended.
    """

    # For subclasses

    def check(self) -> None:
        """Raise `AirflowFailException` if the stage can't succeed, before it starts."""

    @abstractmethod
    def command(self, context: Context) -> list[str]:
        """The arguments of `batchllm` that do the work in the worker."""

    @abstractmethod
    def verified(self, context: Context, end: JobEnd | None) -> dict[str, Any] | str:
        """The results in the lake, or a text on what they lack.

        `end` is that of the Job which ran; None before there is one.
        """

    @abstractmethod
    def finish(self, context: Context, result: Mapping[str, Any]) -> Any:
        """The task's return value, from the result of `command` or `verified`."""

    def look(self, context: Context, end: JobEnd) -> bool:
        """Whether the results are whole while the Job still lives; see `look_interval`."""
        return False

    # A try

    def execute(self, context: Context) -> Any:
        """Run the command to its end, or defer until its Job has ended.

        Raises:
            AirflowFailException: the spec, the table, the plan, a connection or the template is
                wrong; a retry won't help.
            AirflowException: anything else; a retry continues from the finished parts.
        """
        self.check()
        if self.runner == "local":
            if not self.num_pods() and not isinstance(whole := self._verify(context, None), str):
                return self.finish(context, whole)
            command, *arguments = self.command(context)
            return self.finish(context, self._commands().run(command, *arguments))
        with self._released_when_killed(context):
            try:
                results = self._verify(context, None)
            except AirflowException as error:
                is_last = isinstance(error, AirflowFailException) or not will_be_retried(context)
                if is_last and not self._is_over:
                    self._release(context)  # no later try will adopt an earlier try's Job
                raise
            if not isinstance(results, str):
                self.log.info("The results are in the lake already: no Job is needed")
                self._release(context)  # one that an earlier try left behind
                return self.finish(context, results)
            self._watched = self._take(context)
            return self._follow(context)

    def resume(self, context: Context, event: Mapping[str, Any], watched: Mapping[str, Any]) -> Any:
        """Go on when the trigger has fired."""
        with self._released_when_killed(context):
            self._watched = WatchedJob(**watched)
            end = JobEnd.from_event(event)
            for line in end.last_lines:  # the triggerer's file is emptied by the next deferral
                self.log.info("%s", line)
            return self._follow(context, end)

    def resume_execution(
        self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context
    ) -> Any:
        """Delete the Job when Airflow itself ends the deferral.

        It does so when the trigger raised, and when the triggerer didn't end it in time.
        """
        if next_method == _DEFERRAL_FAILED and self.runner != "local":
            self._release(context)
        return super().resume_execution(next_method, next_kwargs, context)

    def _follow(self, context: Context, end: JobEnd | None = None) -> Any:
        """Watch the Job, or defer, until it has ended or isn't needed."""
        while end is None or end.kind is EndKind.PAUSED:
            if end is not None and self._is_done(context, end):
                break
            if self.deferrable:
                self._defer(context, end)
            end = self._watch(context, end)
        return self._conclude(context, end)

    def _is_done(self, context: Context, end: JobEnd) -> bool:
        try:
            return self.look(context, end)
        except AirflowException as error:
            if self._is_over:
                raise
            self.log.warning("In the lake: %s", error)  # what the Job does counts
            return False

    def _conclude(self, context: Context, end: JobEnd) -> Any:
        """The task's return value; else raises. The Job is deleted, unless its state is unknown."""
        results: dict[str, Any] | str = ""
        try:
            results = self._verify(context, end)
        except AirflowException as error:
            raise type(error)(f"{end.explanation()}. In the lake: {error}") from error
        finally:
            is_whole = not isinstance(results, str)
            if not end.is_unseen or is_whole or not will_be_retried(context):
                self._finish_job(context, end, is_whole=is_whole)
        if isinstance(results, str):
            message = f"{end.explanation()}. In the lake: {results}"
            raise (AirflowFailException if end.is_final else AirflowException)(message)
        if end.kind not in (EndKind.COMPLETE, EndKind.PAUSED):
            self.log.warning("%s; but its results are whole", end.explanation())
        return self.finish(context, results)

    # The lake

    def _verify(self, context: Context, end: JobEnd | None) -> dict[str, Any] | str:
        """`verified`, repeated if the check fails."""
        for pause_s in _VERIFY_PAUSES_S:
            try:
                return self.verified(context, end)
            except AirflowFailException:
                raise
            except AirflowException as error:
                if self._is_killed:
                    raise
                pause_s *= random.uniform(0.5, 1.5)  # tasks may have failed together
                self.log.warning("%s; looking again in %d s", error, round(pause_s))
                self._sleep(pause_s)
        return self.verified(context, end)

    def _sleep(self, seconds: float) -> None:
        """Sleep; raises `AirflowException` if the task ends meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._is_over:
                raise AirflowException(KILLED)
            time.sleep(min(0.5, seconds))
