"""Runs a stage as a task, in the worker or in a Kubernetes Job; the lake decides (ADR 38).

execute -> verify -> Job -> watch -> verify -> finish
"""

from __future__ import annotations

import random
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.sdk import Context, XComArg

from batchllm_operator.operators.jobs.end import EndKind, JobEnd
from batchllm_operator.operators.jobs.job_task import KILLED, BatchLLMJobTask, may_be_retried
from batchllm_operator.operators.jobs.owner import LABEL, job_of
from batchllm_operator.operators.jobs.watch import JobWatch, WatchedJob

_DEFERRAL_FAILED: Final = "__fail__"
"""What Airflow calls in place of our method when a deferral failed."""
_VERIFY_PAUSES_S: Final = (2.0, 10.0)


class BatchLLMStageOperator(BatchLLMJobTask):
    """Runs one `batchllm` command in the worker, or in the pods of one Job.

    The task succeeds when a command in the worker, which therefore needs to read the lake, finds
    the complete results there. A try adopts a Job that an earlier one left behind, unless it has
    ended.
    """

    # For subclasses

    def check(self) -> None:
        """Raise `AirflowFailException` if the stage can't succeed, before it starts."""

    @abstractmethod
    def command(self, context: Context) -> list[str]:
        """The arguments of `batchllm` that do the work in the worker."""

    @abstractmethod
    def verified(self, context: Context, end: JobEnd | None) -> dict[str, Any] | str:
        """The results in the lake, or a text on what they lack; `end` is None before a Job ran."""

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
            AirflowFailException: a retry won't help; after any other error, one continues from the
                finished parts.
        """
        self.check()
        if self.runner == "local":
            if not self.num_pods() and not isinstance(whole := self._verify(context, None), str):
                return self.finish(context, whole)
            command, *arguments = self.command(context)
            return self.finish(context, self.run_command(command, *arguments))
        with self._released_when_killed(context):
            try:
                results = self._verify(context, None)
                if isinstance(results, str) and not self.num_pods():
                    raise AirflowFailException(f"num_workers is 0, but work is left: {results}")
                if isinstance(results, str):
                    self._take(context)
            except AirflowException as error:
                if not self._is_over and not may_be_retried(context, error):
                    self._release(context)  # no later try will adopt an earlier try's Job
                raise
            if isinstance(results, str):
                return self._follow(context)
            self.log.info("The results are in the lake already: no Job is needed")
            self._release(context, keeps_ended=self._keeps_ended(is_whole=True))
            return self.finish(context, results)

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
        """Delete the Job when Airflow itself ends the deferral: the trigger raised, or is late."""
        if next_method == _DEFERRAL_FAILED and self.runner != "local":
            self._release(context)
        return super().resume_execution(next_method, next_kwargs, context)

    def _follow(self, context: Context, end: JobEnd | None = None) -> Any:
        """Watch the Job, or defer, until it has ended or isn't needed."""
        while end is None or end.kind is EndKind.PAUSED:
            if end is not None and self._is_done(context, end):
                break
            assert self._watched is not None, "the Job was taken before"
            watched = replace(self._watched, before=end.as_event() if end else None)
            if self.deferrable:
                self._defer(context, watched)
            watching = (watched, self.log.info, self.credentials().masker)
            end = self._ask(lambda job: JobWatch(job, *watching).until_end())  # noqa: B023
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
        fault: Exception | None = None
        try:
            results = self._verify(context, end)
        except AirflowException as error:
            fault = type(error)(f"{end.explanation()}. In the lake: {error}")
            fault.__cause__ = error
        # Any error, such as a full disk: the Job has to go all the same.
        except Exception as error:  # noqa: BLE001
            fault = error
        else:
            if isinstance(results, str):
                failure = AirflowFailException if end.is_final else AirflowException
                fault = failure(f"{end.explanation()}. In the lake: {results}")
        if not (end.is_unseen and fault and may_be_retried(context, fault)):
            self._release(context, keeps_ended=self._keeps_ended(is_whole=fault is None))
        if fault is not None:
            raise fault
        if end.kind not in (EndKind.COMPLETE, EndKind.PAUSED):
            self.log.warning("%s; but its results are whole", end.explanation())
        return self.finish(context, results)

    def _verify(self, context: Context, end: JobEnd | None) -> Any:
        """`verified`, repeated if the check fails."""
        for pause_s in (*_VERIFY_PAUSES_S, None):
            try:
                return self.verified(context, end)
            except AirflowException as error:
                if isinstance(error, AirflowFailException) or self._killed_at or pause_s is None:
                    raise
                pause_s *= random.uniform(0.5, 1.5)  # tasks may have failed together
                self.log.warning("%s; looking again in %d s", error, round(pause_s))
                self._sleep(pause_s)

    def _sleep(self, seconds: float) -> None:
        """Sleep; raises `AirflowException` if the task ends meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._is_over:
                raise AirflowException(KILLED)
            time.sleep(min(0.5, seconds))


class BatchLLMPlannedOperator(BatchLLMStageOperator):
    """A stage of a plan that exists: its `plan_uri` is a URI (templated), or an XCom with it."""

    template_fields = ("plan_uri", *BatchLLMStageOperator.template_fields)

    def __init__(self, *, plan_uri: str | XComArg, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan_uri = plan_uri

    @property
    def plan_arguments(self) -> list[str]:
        return ["--plan", str(self.plan_uri)]

    def identity(self) -> tuple[str, str]:
        """The table, or the staging folder if the job has one, and the plan."""
        return str(self.plan_uri).partition("/_batchllm/")[0], " ".join(self.plan_arguments)

    def stage_labels(self) -> dict[str, str]:
        plan = str(self.plan_uri).rstrip("/").rpartition("/")[2]
        return {f"{LABEL}/job": job_of(str(self.plan_uri)), f"{LABEL}/plan": plan}


def number_of_workers(rendered: Any, *, at_least: int = 0) -> int:
    """What `num_workers` has rendered to; `AirflowFailException` if to no number, or too low."""
    with suppress(ValueError):
        if (number := max(0, int(str(rendered)))) >= at_least:
            return number
    raise AirflowFailException(f"num_workers is {rendered!r}; it must be an integer from 1")
