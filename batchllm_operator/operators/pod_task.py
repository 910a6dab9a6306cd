"""How a stage runs as a task: in the worker or in a pod, and the lake decides."""

from __future__ import annotations

import asyncio
import os
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, NoReturn

from airflow.providers.cncf.kubernetes.pod_generator import make_safe_label_value
from airflow.providers.cncf.kubernetes.utils.pod_manager import OnFinishAction
from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowTaskTimeout,
)
from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger
from airflow.sdk import Context
from kubernetes.client import models as k8s
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from urllib3.exceptions import HTTPError

from batchllm_operator.operators.command import CommandRunner
from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.operators.pod_operator import BatchLLMPodOperator
from batchllm_operator.operators.pods.attempt import (
    Attempt,
    AttemptPods,
    QuotaExceededError,
    StoppedError,
    message_of,
)
from batchllm_operator.operators.pods.end import EndKind, PodEnd
from batchllm_operator.operators.pods.spec import UID_VARIABLE, with_secret
from batchllm_operator.operators.pods.watch import PodName, PodWatch, WatchLimits
from batchllm_operator.operators.triggerer import triggerer_runs
from batchllm_operator.operators.triggers import PodWatchTrigger, make_hook

UID_PLACE: Final = f"$({UID_VARIABLE})"
"""Among a pod's arguments: where Kubernetes puts the pod's UID."""

_QUOTA_PAUSE: Final = timedelta(seconds=60)
_LONGEST_QUOTA_PAUSE: Final = timedelta(minutes=5)
_VERIFY_PAUSES_S: Final = (2.0, 10.0)
_DEFERRAL_MARGIN: Final = timedelta(minutes=2)
"""After a task's deadline, when Airflow ends a deferral that the triggerer didn't."""
_LAST_CALL_S: Final = 4.0
"""For removing a pod: Airflow gives a task that it kills five seconds."""
_DEFERRAL_FAILED: Final = "__fail__"
"""What Airflow calls then, in place of our method."""
_KILLED: Final = "the task was killed; finished parts are kept"
_REFUSED: Final = (400, 403, 404, 422)
"""What the API answers to a pod, or a namespace, that is wrong and will stay so."""


class BatchLLMStageOperator(BatchLLMPodOperator):
    """Runs one `batchllm` command in the worker or in a pod.

    A pod's phase, exit code and log are reports of an attempt. The task succeeds when the
    results are found in the lake, complete, by a command in the worker, which therefore needs
    to read the lake. A try takes up the live pod that an earlier one left behind, and never
    one that has ended. A pod that ends for the cluster's sake (eviction, preemption, a lost
    node) is followed by another in the same try, and goes on from the finished parts.

    Args:
        kwargs: see `BatchLLMPodOperator`.
    """

    component: ClassVar[str]
    """The command, for labels."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._command_runner: CommandRunner | None = None
        self._watch: PodWatch | None = None
        self._is_killed = False
        self._supervisor_pid: int | None = None

    # What a stage is

    @abstractmethod
    def command(self) -> list[str]:
        """The arguments of `batchllm` that do the work, the same in worker and pod."""

    @abstractmethod
    def pod_command(self, grace_s: int) -> list[str]:
        """The same for a pod, which has `grace_s` seconds to stop in."""

    @abstractmethod
    def verify_command(self, pod_uid: str | None) -> list[str] | None:
        """The arguments of `batchllm` that look for the results, of that pod or of any.

        None if only a pod that has run can have left some, and `pod_uid` is None.
        """

    @abstractmethod
    def table_uri(self) -> str:
        """The job's output table."""

    @abstractmethod
    def work(self) -> str:
        """What the pod does, in a text that is the same only for the same work."""

    @abstractmethod
    def finish(self, context: Context, result: Mapping[str, Any]) -> Any:
        """The task's return value, from the result of `command` or `verify_command`."""

    @abstractmethod
    def stem(self) -> str:
        """What the pod's name begins with."""

    def stage_labels(self) -> dict[str, str]:
        """Labels that tell people what the pod does."""
        return {}

    # A try

    def execute(self, context: Context) -> Any:
        """Run the command to its end, or defer until its pod has ended.

        Raises:
            AirflowFailException: the spec, the table, the plan, a connection or the pod's
                template is wrong; a retry won't help.
            AirflowException: anything else; a retry goes on from what is finished.
        """
        if self.runner == "local":
            command, *arguments = self.command()
            return self.finish(context, self._commands().run(command, *arguments))
        with self._released_when_killed(context):
            found = self._verify(None)
            if not isinstance(found, str):
                self.log.info("The results are in the lake already: no pod is needed")
                self._release(context)  # one that an earlier try left behind
                return self.finish(context, found)
            return self._work(context, num_disruptions=0)

    def resume(self, context: Context, event: Mapping[str, Any], num_disruptions: int = 0) -> Any:
        """Go on when the triggerer has seen the pod's end; see `execute`."""
        with self._released_when_killed(context):
            result = self._conclude(context, PodEnd.from_event(event), num_disruptions)
            if result is not None:
                return self.finish(context, result)
            return self._work(context, num_disruptions + 1)

    def resume_waiting(
        self, context: Context, event: Any, num_disruptions: int, waiting_since: str
    ) -> Any:
        """Ask again for a pod that a quota had no room for; see `execute`."""
        since = datetime.fromisoformat(waiting_since)
        with self._released_when_killed(context):
            return self._work(context, num_disruptions, waiting_since=since)

    def resume_execution(
        self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context
    ) -> Any:
        """Remove the pod when Airflow ends the deferral itself, without asking us.

        It does so when the trigger raised, and when the triggerer didn't end it in time.
        """
        if next_method == _DEFERRAL_FAILED:
            self._release(context)
        return super().resume_execution(next_method, next_kwargs, context)

    def on_kill(self) -> None:
        """Have whatever `execute` waits for come to an end; `execute` sees to the pods.

        Nothing is asked of the cluster here: Airflow calls this from a signal handler.
        """
        self._is_killed = True
        if self._command_runner is not None:
            self._command_runner.stop("the task was killed")
        if self._watch is not None:
            self._watch.stop()

    def _work(
        self, context: Context, num_disruptions: int, waiting_since: datetime | None = None
    ) -> Any:
        """Take up or make a pod and watch it, or defer; make another after a disruption."""
        defers = self.wants_deferral
        if defers is None:
            defers = triggerer_runs()
            self.log.info(
                "%s watches the pod (deferrable isn't given)",
                "The triggerer" if defers else "No triggerer was found: this worker",
            )
        while True:
            try:
                pod = self._take_pod(context, num_disruptions)
            except QuotaExceededError as full:
                waiting_since = waiting_since or datetime.now(UTC)
                deadline = self._deadline(context)
                self._wait_for_quota(
                    str(full), num_disruptions, waiting_since, defers=defers, deadline=deadline
                )
                continue
            except StoppedError:
                raise AirflowException(_KILLED) from None
            waiting_since = None
            if self._is_killed:
                raise AirflowException(_KILLED)
            if defers:
                self._defer(context, pod, num_disruptions)
            result = self._conclude(context, self._watch_here(context, pod), num_disruptions)
            if result is not None:
                return self.finish(context, result)
            num_disruptions += 1

    def _conclude(
        self, context: Context, end: PodEnd, num_disruptions: int
    ) -> dict[str, Any] | None:
        """The results, if they are whole; None if another pod shall go on; else the failure.

        The pod is removed, unless nobody knows how it is.
        """
        if end.kind is EndKind.STOPPED:
            raise AirflowException(_KILLED)
        if end.kind is EndKind.API_LOST:
            if not self._will_be_retried(context):
                self._release(context)  # perhaps this worker is let in
            raise AirflowException(end.explanation())
        found: dict[str, Any] | str = ""
        try:
            found = self._verify(end.pod_uid)
        except AirflowException as error:
            raise type(error)(f"{end.explanation()}. In the lake: {error}") from error
        finally:
            self._remove_pod(context, end, is_success=not isinstance(found, str))
        if self._is_killed:
            raise AirflowException(_KILLED)
        if not isinstance(found, str):
            if end.kind is not EndKind.EXITED or end.exit_code != 0:
                self.log.warning("%s; but its results are whole", end.explanation())
            return found
        if end.is_disruption and num_disruptions < self.max_disruptions:
            self.log.warning(
                "%s; making pod %d of at most %d",
                end.explanation(),
                num_disruptions + 2,
                self.max_disruptions + 1,
            )
            return None
        message = f"{end.explanation()}. In the lake: {found}"
        if end.is_final:
            raise AirflowFailException(message)
        raise AirflowException(message)

    # The cluster

    def _take_pod(self, context: Context, num_disruptions: int) -> k8s.V1Pod:
        """The live pod of this attempt, or a new one."""
        attempt = self._attempt(context)
        variables = Credentials.of(self.aws_conn_id, self.connection_env).variables
        ordinal = num_disruptions
        request = self._request(context, attempt, ordinal, variables)
        pods = self._pods(attempt, request.metadata.namespace, self.api_timeout.total_seconds())
        try:
            pod = pods.find(keep_dead=self.on_finish_action != OnFinishAction.DELETE_POD)
            taken_up = pod is not None
            while pod is None and (pod := pods.create(request)) is None:
                ordinal += 1  # one that has ended was kept under that name
                request = self._request(context, attempt, ordinal, variables)
            if self.has_secrets:
                self._put_secret(pods, pod, variables)
        except ApiException as error:
            raise _refusal("the pod", error) from error
        self.log.info(
            "%s pod %s in namespace %s",
            "Taking up" if taken_up else "Made",
            pod.metadata.name,
            pod.metadata.namespace,
        )
        return pod

    def _put_secret(self, pods: AttemptPods, pod: k8s.V1Pod, variables: Mapping[str, str]) -> None:
        """Give the pod its credentials, or remove it: it would wait for them for ever."""
        try:
            pods.put_secret(pod, variables)
        except ApiException as error:
            pods.delete(pod.metadata.name)
            raise _refusal("the pod's Secret", error) from error

    def _attempt(self, context: Context) -> Attempt:
        return Attempt.of(context["ti"], self.table_uri(), self.work())

    def _request(
        self, context: Context, attempt: Attempt, ordinal: int, variables: Iterable[str]
    ) -> k8s.V1Pod:
        """The pod to ask for; `variables` are the names of those that its Secret holds."""
        name = self.name = attempt.pod_name(f"batchllm-{self.stem()}", ordinal)
        self.cmds = ["batchllm"]
        self.labels = {
            **self.labels,
            "app.kubernetes.io/name": "batchllm",
            "app.kubernetes.io/component": self.component,
            "app.kubernetes.io/managed-by": "airflow",
            **{key: make_safe_label_value(text) for key, text in self.stage_labels().items()},
            **attempt.labels,
        }
        try:
            pod = self.build_pod_request_obj(context)
        except ValueError as error:
            raise AirflowFailException(str(error)) from error
        arguments = self.pod_command(pod.spec.termination_grace_period_seconds)
        pod.spec.containers[0].args = [_escaped(each) for each in arguments]
        return with_secret(pod, name, variables) if self.has_secrets else pod

    def _pods(
        self,
        attempt: Attempt,
        namespace: str,
        patience_s: float,
        *,
        is_cleaning_up: bool = False,
    ) -> AttemptPods:
        """The cluster, for as long as the task isn't killed, or also then for cleaning up."""
        return AttemptPods(
            self._connect,
            namespace,
            attempt,
            self.base_container_name,
            self.log,
            has_secrets=self.has_secrets,
            patience_s=patience_s,
            is_stopped=lambda: self._is_killed and not is_cleaning_up,
            poll_s=min(2.0, self.poll_interval),
        )

    def _remove_pod(self, context: Context, end: PodEnd, *, is_success: bool) -> None:
        """Remove a pod that has ended, as `on_finish_action` wants it, or that shall end."""
        keeps = self.on_finish_action == OnFinishAction.KEEP_POD or (
            self.on_finish_action == OnFinishAction.DELETE_SUCCEEDED_POD and not is_success
        )
        patience_s = _LAST_CALL_S if self._is_killed else self.api_timeout.total_seconds()
        with self._telling_of_leftovers():
            pods = self._pods(
                self._attempt(context), end.namespace, patience_s, is_cleaning_up=True
            )
            if keeps and end.may_stay:
                self.log.info("Keeping pod %s (on_finish_action)", end.pod_name)
                pods.delete_secret(end.pod_name)
            else:
                pods.delete(end.pod_name, at_once=end.is_unreachable)

    @contextmanager
    def _released_when_killed(self, context: Context) -> Iterator[None]:
        """Remove this attempt's pods if the task is killed or times out meanwhile.

        They are left to the next try if there will be one and only this worker is going.
        """
        self._supervisor_pid = os.getppid()
        try:
            yield
        except BaseException as error:
            if isinstance(error, AirflowTaskTimeout):
                self.log.warning("The task's execution_timeout is over")
            elif not self._is_killed and not self._is_orphan():
                raise
            elif self._next_try_looks_for_it(context):
                self.log.warning("The worker is going; the next try takes the pod up")
                raise
            self._release(context)
            raise

    def _release(self, context: Context) -> None:
        """Ask all pods of this attempt to stop."""
        with self._telling_of_leftovers():
            namespace = self.build_pod_request_obj(context).metadata.namespace
            pods = self._pods(self._attempt(context), namespace, _LAST_CALL_S, is_cleaning_up=True)
            pods.delete_all()

    def _is_orphan(self) -> bool:
        """Whether Airflow's supervisor of this process has died: nobody waits for the result."""
        return self._supervisor_pid is not None and os.getppid() != self._supervisor_pid

    @contextmanager
    def _telling_of_leftovers(self) -> Iterator[None]:
        """Remove pods, and say so if that fails: it isn't what the task ends with."""
        try:
            yield
        except (ApiException, ConfigException, HTTPError, ValueError) as error:
            self.log.error(
                "A pod couldn't be removed (%s); the next try will do it, or the cluster after"
                " active_deadline_seconds",
                message_of(error),
            )

    # Watching

    def _watch_here(self, context: Context, pod: k8s.V1Pod) -> PodEnd:
        """Watch a pod from this process."""
        name = PodName(
            pod.metadata.name,
            pod.metadata.namespace,
            self.base_container_name,
            pod.metadata.uid,
        )
        credentials = Credentials.of(self.aws_conn_id, self.connection_env)
        watch = self._watch = PodWatch(
            lambda: make_hook(
                self.kubernetes_conn_id, self.in_cluster, self.cluster_context, self.config_file
            ),
            name,
            self._limits(),
            lambda line: self.log.info("%s", line),
            deadline=self._deadline(context),
            is_abandoned=self._is_orphan,
            masked=credentials.masked,
        )
        if self._is_killed:
            watch.stop()
        try:
            return asyncio.run(watch.until_end())
        finally:
            self._watch = None

    def _defer(self, context: Context, pod: k8s.V1Pod, num_disruptions: int) -> NoReturn:
        """Leave the pod to the triggerer."""
        deadline = self._deadline(context)
        self.defer(
            trigger=PodWatchTrigger(
                pod_name=pod.metadata.name,
                pod_namespace=pod.metadata.namespace,
                pod_uid=pod.metadata.uid,
                container_name=self.base_container_name,
                limits=asdict(self._limits()),
                kubernetes_conn_id=self.kubernetes_conn_id,
                in_cluster=self.in_cluster,
                cluster_context=self.cluster_context,
                config_file=self.config_file,
                deadline=deadline.isoformat() if deadline else None,
                aws_conn_id=self.aws_conn_id,
                connection_env=dict(self.connection_env or {}),
                removes=self.on_finish_action == OnFinishAction.DELETE_POD,
            ),
            method_name="resume",
            kwargs={"num_disruptions": num_disruptions},
            timeout=_time_left(deadline),
        )
        raise AssertionError("defer always raises")

    def _deadline(self, context: Context) -> datetime | None:
        """When the task's `execution_timeout` is over, all deferrals of a try together."""
        if self.execution_timeout is None:
            return None
        started_at: datetime = context["ti"].start_date
        return started_at + self.execution_timeout

    def _limits(self) -> WatchLimits:
        return WatchLimits(
            queue_s=self.queue_timeout.total_seconds(),
            start_s=self.start_timeout.total_seconds(),
            stuck_s=self.stuck_timeout.total_seconds(),
            api_s=self.api_timeout.total_seconds(),
            poll_s=self.poll_interval,
        )

    def _wait_for_quota(
        self,
        said: str,
        num_disruptions: int,
        since: datetime,
        *,
        defers: bool,
        deadline: datetime | None = None,
    ) -> None:
        """Let some time pass, in the triggerer if there is one: longer, the longer it takes.

        Raises:
            AirflowException: the time is up, or the task was killed.
        """
        now = datetime.now(UTC)
        if now - since > self.queue_timeout:
            raise AirflowException(f"no room for a pod in time (queue_timeout): {said}")
        if deadline is not None and now > deadline:
            raise AirflowException(f"no room for a pod in time (execution_timeout): {said}")
        self.log.info("Waiting for room in the namespace's quota: %s", said)
        shortest = min(_QUOTA_PAUSE, timedelta(seconds=12 * self.poll_interval))
        pause = min(max(shortest, (now - since) / 4), _LONGEST_QUOTA_PAUSE)
        if defers:
            self.defer(
                trigger=TimeDeltaTrigger(pause),
                method_name="resume_waiting",
                kwargs={"num_disruptions": num_disruptions, "waiting_since": since.isoformat()},
                timeout=_time_left(deadline),
            )
        self._sleep(pause.total_seconds())

    def _next_try_looks_for_it(self, context: Context) -> bool:
        """Whether this task ends only because its worker does, and Airflow will try it again.

        A user who marks or clears a task changes its state first.
        """
        ti = context["ti"]
        if not self._will_be_retried(context):
            return False
        if self._is_orphan():  # Airflow will find out by the heartbeats that it misses
            return True
        try:
            states = ti.get_task_states(
                dag_id=ti.dag_id,
                task_ids=[ti.task_id],
                run_ids=[ti.run_id],
                map_index=ti.map_index,
            )
        # Whatever it is: a pod that nobody looks for costs money.
        except Exception as error:  # noqa: BLE001
            self.log.warning("Can't tell why this task was stopped: %s", error)
            return False
        return list(states.get(ti.run_id, {}).values()) == ["running"]

    @staticmethod
    def _will_be_retried(context: Context) -> bool:
        """Whether Airflow makes another try when this one fails."""
        ti = context["ti"]
        return bool(ti.try_number <= ti.max_tries)

    # Commands in the worker

    def _commands(self) -> CommandRunner:
        credentials = Credentials.of(self.aws_conn_id, self.connection_env)
        self._command_runner = CommandRunner(self.log, self.env, credentials, self.kill_grace_s)
        return self._command_runner

    def _verify(self, pod_uid: str | None) -> dict[str, Any] | str:
        """The results in the lake, or what is missing of them; looks again if that fails."""
        arguments = self.verify_command(pod_uid)
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
                self.log.warning("%s; looking again in %d s", error, pause_s)
                self._sleep(pause_s)
        return self._commands().verify(*arguments)

    def _sleep(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            AirflowException: the task was killed.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._is_killed:
                raise AirflowException(_KILLED)
            time.sleep(min(0.5, seconds))


def _escaped(argument: str) -> str:
    """As Kubernetes wants it, which puts variables for $(NAME) in arguments, and $ for $$."""
    return argument if argument == UID_PLACE else argument.replace("$", "$$")


def _time_left(deadline: datetime | None) -> timedelta | None:
    """For a deferral, a little longer than until the deadline."""
    return deadline - datetime.now(UTC) + _DEFERRAL_MARGIN if deadline is not None else None


def _refusal(what: str, error: ApiException) -> AirflowException:
    message = f"the cluster refuses {what}: {message_of(error)}"
    return (AirflowFailException if error.status in _REFUSED else AirflowException)(message)
