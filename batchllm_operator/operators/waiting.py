"""How a stage's task looks for its results, and waits: for room, or for another attempt."""

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

from batchllm_operator.operators.command import CommandRunner, TakenOverError
from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.operators.pod_task import BatchLLMPodTask
from batchllm_operator.operators.triggerer import defers_by_default

_PAUSE: Final = timedelta(seconds=60)
_LONGEST_PAUSE: Final = timedelta(minutes=5)
_VERIFY_PAUSES_S: Final = (2.0, 10.0)
_DEFERRAL_MARGIN: Final = timedelta(minutes=2)
"""After a task's deadline, when Airflow ends a deferral that the triggerer didn't."""
KILLED: Final = "the task was killed; finished parts are kept"


class BatchLLMWaitingTask(BatchLLMPodTask):
    """Looks for its results in the lake, and waits while others do its work.

    It waits in the triggerer where the task defers, and not in step with other tasks.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._command_runner: CommandRunner | None = None

    @abstractmethod
    def verify_command(self, pod_uid: str | None) -> list[str] | None:
        """The arguments of `batchllm` that look for the results, of that pod or of any.

        None if only a pod that has run can have left some, and `pod_uid` is None.
        """

    def _commands(self) -> CommandRunner:
        credentials = Credentials.of(self.aws_conn_id, self.connection_env)
        self._command_runner = CommandRunner(self.log, self.env, credentials, self.kill_grace_s)
        return self._command_runner

    def _verify(self, pod_uid: str | None, owner: str | None = None) -> dict[str, Any] | str:
        """The results in the lake, or what is missing of them; looks again if that fails."""
        arguments = self.verify_command(pod_uid)
        if arguments is None:
            return ""
        if owner is not None:
            arguments = [*arguments, "--owner", owner]
        for pause_s in _VERIFY_PAUSES_S:
            try:
                return self._commands().verify(*arguments)
            except (AirflowFailException, TakenOverError):
                raise
            except AirflowException as error:
                if self._is_killed:
                    raise
                pause_s *= random.uniform(0.5, 1.5)  # not in step with tasks that failed, too
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
        """Let some time pass, in the triggerer if there is one: longer, the longer it takes."""
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
        """Wait a while, or defer to go on with that method; longer, the longer it has taken."""
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

    def _await_successor(
        self,
        context: Context,
        said: str,
        num_disruptions: int,
        waiting_since: datetime | None = None,
    ) -> dict[str, Any] | None:
        """The results of the attempt that has taken over (`said` is how the task knows of it).

        None once the other is silent, and this task may go on; earlier, it would fence that one
        out.

        Raises:
            AirflowException: it has gone on too often, the time is up, or the task was killed.
        """
        looks = waiting_since is not None  # at once: it comes from the triggerer
        since = waiting_since or datetime.now(UTC)
        deadline = self._deadline(context)
        kwargs = {"said": said, "num_disruptions": num_disruptions}
        while True:
            if not looks:
                self.log.info("Waiting for the results of another attempt: %s", said)
                if deadline is not None and datetime.now(UTC) > deadline:
                    raise AirflowException(f"no results in time (execution_timeout): {said}")
                self._let_pass(since, "resume_fenced", kwargs, deadline=deadline)
            looks = False
            try:
                found = self._verify(None, self._attempt(context).owner)
            except TakenOverError as error:
                said = kwargs["said"] = str(error)
                continue
            if not isinstance(found, str):
                return found
            if num_disruptions >= self.max_disruptions:
                raise AirflowException(f"{said}. It gives no sign any more: {found}")
            self.log.warning("It gives no sign any more: %s. Going on from there", found)
            return None

    def _sleep(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            AirflowException: the task was killed, or its supervisor has died.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._is_over:
                raise AirflowException(KILLED)
            time.sleep(min(0.5, seconds))


def _pause(waited: timedelta, poll_interval_s: float) -> timedelta:
    """Longer, the longer it takes, and not in step with the other tasks that wait."""
    shortest = min(_PAUSE, timedelta(seconds=12 * poll_interval_s))
    return min(max(shortest, waited / 4), _LONGEST_PAUSE) * random.uniform(0.5, 1.0)


def time_left(deadline: datetime | None) -> timedelta | None:
    return deadline - datetime.now(UTC) + _DEFERRAL_MARGIN if deadline is not None else None
