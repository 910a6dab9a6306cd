"""How a stage's task checks its results, and waits for a quota."""

from __future__ import annotations

import random
import time
from abc import abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger
from airflow.sdk import Context

from batchllm_operator.operators.command import CommandRunner
from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.operators.pods.pod_task import BatchLLMPodTask
from batchllm_operator.operators.triggerer import defers_by_default

_PAUSE: Final = timedelta(seconds=60)
_LONGEST_PAUSE: Final = timedelta(minutes=5)
_VERIFY_PAUSES_S: Final = (2.0, 10.0)
_DEFERRAL_MARGIN: Final = timedelta(minutes=2)
"""Airflow ends a deferral this long after the task's deadline, if the triggerer hasn't."""
KILLED: Final = "the task was killed; finished parts are kept"


class BatchLLMWaitingTask(BatchLLMPodTask):
    """Checks the results in the lake, and waits for room in a quota.

    If the task defers, it waits in the triggerer. Pauses have jitter, so that tasks don't stay in
    step.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._command_runner: CommandRunner | None = None

    @abstractmethod
    def verify_command(self, context: Context, pod_uid: str | None) -> list[str] | None:
        """The arguments of `batchllm verify`, for the results of that pod, or of any.

        None if only a pod can have left results, and `pod_uid` is None.
        """

    def _commands(self) -> CommandRunner:
        credentials = Credentials.of(self.aws_conn_id, self.connection_env)
        self._command_runner = CommandRunner(self.log, self.env, credentials, self.kill_grace_s)
        return self._command_runner

    def _verify(self, context: Context, pod_uid: str | None) -> dict[str, Any] | str:
        """The results in the lake, or a text on what is missing; repeated if the check fails."""
        arguments = self.verify_command(context, pod_uid)
        if arguments is None:
            return ""
        for pause_s in _VERIFY_PAUSES_S:
            try:
                return self._commands().verify(*arguments)
            except AirflowFailException:
                raise
            except AirflowException as error:
                if self._is_killed:
                    raise
                pause_s *= random.uniform(0.5, 1.5)  # tasks may have failed together
                self.log.warning("%s; looking again in %d s", error, round(pause_s))
                self._sleep(pause_s)
        return self._commands().verify(*arguments)

    def _wait_for_quota(
        self,
        said: str,
        num_disruptions: int,
        since: datetime,
        *,
        defers: bool,
        deadline: datetime | None = None,
    ) -> None:
        """Pause, or defer, until the next try to create a pod; raises once the time is up."""
        now = datetime.now(UTC)
        if now - since > self.queue_timeout:
            raise AirflowException(f"no room for a pod in time (queue_timeout): {said}")
        if deadline is not None and now > deadline:
            raise AirflowException(f"no room for a pod in time (execution_timeout): {said}")
        self.log.info("Waiting for room in the namespace's quota: %s", said)
        kwargs = {"num_disruptions": num_disruptions}
        self._let_pass(since, "resume_waiting", kwargs, deadline=deadline, defers=defers)

    def _let_pass(
        self,
        since: datetime,
        method_name: str,
        kwargs: dict[str, Any],
        *,
        deadline: datetime | None,
        defers: bool | None = None,
    ) -> None:
        """Pause, or defer and resume with `method_name`; pauses grow with the time waited."""
        pause = _pause(datetime.now(UTC) - since, self.poll_interval)
        if self._defers(self.log.debug) if defers is None else defers:
            self.defer(
                trigger=TimeDeltaTrigger(pause),
                method_name=method_name,
                kwargs={**kwargs, "waiting_since": since.isoformat()},
                timeout=time_left(deadline),
            )
        self._sleep(pause.total_seconds())

    def _defers(self, log: Callable[[str], None]) -> bool:
        wanted = self.wants_deferral
        return defers_by_default(log) if wanted is None else wanted

    def _sleep(self, seconds: float) -> None:
        """Sleep, unless the task ends meanwhile.

        Raises:
            AirflowException: the task was killed, or its supervisor has died.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._is_over:
                raise AirflowException(KILLED)
            time.sleep(min(0.5, seconds))


def _pause(waited: timedelta, poll_interval_s: float) -> timedelta:
    """Grows with the time waited, with jitter."""
    shortest = min(_PAUSE, timedelta(seconds=12 * poll_interval_s))
    return min(max(shortest, waited / 4), _LONGEST_PAUSE) * random.uniform(0.5, 1.0)


def time_left(deadline: datetime | None) -> timedelta | None:
    return deadline - datetime.now(UTC) + _DEFERRAL_MARGIN if deadline is not None else None
