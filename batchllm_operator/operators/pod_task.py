"""How a stage runs as a task: in the worker or in a pod, and the lake decides."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, NoReturn

from airflow.providers.cncf.kubernetes.pod_generator import make_safe_label_value
from airflow.providers.cncf.kubernetes.utils.pod_manager import OnFinishAction
from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    Context,
)
from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger
from kubernetes.client import models as k8s
from kubernetes.client.exceptions import ApiException
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
from batchllm_operator.operators.pods.watch import PodName, PodWatch, WatchLimits
from batchllm_operator.operators.triggerer import triggerer_runs
from batchllm_operator.operators.triggers import PodWatchTrigger, make_hook

_QUOTA_PAUSE: Final = timedelta(seconds=60)
_DEFERRAL_MARGIN: Final = timedelta(minutes=2)
"""After a task's deadline, when Airflow ends a deferral that the triggerer didn't."""
_LAST_CALL_S: Final = 4.0
"""For removing a pod: Airflow gives a task that it kills five seconds."""
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

    # What a stage is

    @abstractmethod
    def command(self) -> list[str]:
        """The arguments of `batchllm` that do the work, the same in worker and pod."""

    def pod_command(self, pod_name: str) -> list[str]:
        """The same for a pod, where that differs."""
        return self.command()

    @abstractmethod
    def verify_command(self, pod_name: str | None) -> list[str] | None:
        """The arguments of `batchllm` that look for the results, of that pod or of any.

        None if only a pod that has run can have left some, and `pod_name` is None.
        """

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
        found = self._verify(None)
        if not isinstance(found, str):
            self.log.info("The results are in the lake already: no pod is needed")
            return self.finish(context, found)
        return self._work(context, num_disruptions=0)

    def resume(self, context: Context, event: Mapping[str, Any], num_disruptions: int = 0) -> Any:
        """Go on when the triggerer has seen the pod's end; see `execute`."""
        result = self._conclude(context, PodEnd.from_event(event), num_disruptions)
        if result is not None:
            return self.finish(context, result)
        return self._work(context, num_disruptions + 1)

    def resume_waiting(
        self, context: Context, event: Any, num_disruptions: int, waiting_since: str
    ) -> Any:
        """Ask again for a pod that a quota had no room for; see `execute`."""
        since = datetime.fromisoformat(waiting_since)
        return self._work(context, num_disruptions, waiting_since=since)

    def on_kill(self) -> None:
        """Have whatever `execute` waits for come to an end; `execute` sees to the pod.

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
        defers = triggerer_runs() if self.wants_deferral is None else self.wants_deferral
        while True:
            try:
                pod = self._take_pod(context, num_disruptions)
            except QuotaExceededError as full:
                waiting_since = waiting_since or datetime.now(UTC)
                self._wait_for_quota(str(full), num_disruptions, waiting_since, defers=defers)
                continue
            except StoppedError:
                raise AirflowException("the task was killed while it waited for a pod") from None
            waiting_since = None
            if defers and not self._is_killed:
                self._defer(context, pod, num_disruptions)
            result = self._conclude(context, self._watch_here(context, pod), num_disruptions)
            if result is not None:
                return self.finish(context, result)
            num_disruptions += 1

    def _conclude(
        self, context: Context, end: PodEnd, num_disruptions: int
    ) -> dict[str, Any] | None:
        """The results, if they are whole; None if another pod shall go on; else the failure.

        The pod is removed, unless nobody knows how it is or the next try is to find it.
        """
        if end.kind is EndKind.API_LOST:
            raise AirflowException(end.explanation())
        if end.kind is EndKind.STOPPED and self._next_try_looks_for_it(context):
            raise AirflowException(
                f"the worker is shutting down; pod {end.pod_name} goes on, and the next try takes"
                " it up"
            )
        found: dict[str, Any] | str = "it was told to stop"
        try:
            if end.kind is not EndKind.STOPPED:
                found = self._verify(end.pod_name)
        finally:
            self._remove_pod(context, end, is_success=not isinstance(found, str))
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
        attempt = Attempt.of(context["ti"], self.work())
        request = self._request(context, attempt, ordinal=num_disruptions)
        patience_s = self.api_timeout.total_seconds()
        pods = self._pods(attempt, request.metadata.namespace, patience_s)
        credentials = Credentials.of(self.aws_conn_id, self.connection_env)
        try:
            pod = pods.find(keep_dead=self.on_finish_action != OnFinishAction.DELETE_POD)
            if pod is not None:
                self.log.info("Taking up pod %s, which is at work", pod.metadata.name)
                return pod
            pod = pods.create(request, credentials.variables)
        except ApiException as error:
            message = f"the cluster refuses the pod: {message_of(error)}"
            if error.status in _REFUSED:
                raise AirflowFailException(message) from error
            raise AirflowException(message) from error
        self.log.info("Made pod %s in namespace %s", pod.metadata.name, pod.metadata.namespace)
        return pod

    def _request(self, context: Context, attempt: Attempt, ordinal: int) -> k8s.V1Pod:
        """The pod to ask for."""
        name = attempt.pod_name(f"batchllm-{self.stem()}", ordinal)
        self.name, self._own_secret = name, name if self.has_secrets else None
        self.cmds = ["batchllm"]
        # Kubernetes takes $(NAME) in arguments for a variable's place.
        self.arguments = [each.replace("$(", "$$(") for each in self.pod_command(name)]
        self.labels = {
            **self.labels,
            "app.kubernetes.io/name": "batchllm",
            "app.kubernetes.io/component": self.component,
            "app.kubernetes.io/managed-by": "airflow",
            **{key: make_safe_label_value(text) for key, text in self.stage_labels().items()},
            **attempt.labels,
        }
        try:
            return self.build_pod_request_obj(context)
        except ValueError as error:
            raise AirflowFailException(str(error)) from error

    def _pods(self, attempt: Attempt, namespace: str, patience_s: float) -> AttemptPods:
        return AttemptPods(
            self._connect,
            namespace,
            attempt,
            self.base_container_name,
            self.log,
            has_secrets=self.has_secrets,
            patience_s=patience_s,
            is_stopped=lambda: self._is_killed,
            poll_s=min(2.0, self.poll_interval),
        )

    def _remove_pod(self, context: Context, end: PodEnd, *, is_success: bool) -> None:
        """Remove a pod that has ended, as `on_finish_action` wants it, or that shall end."""
        keeps = self.on_finish_action == OnFinishAction.KEEP_POD or (
            self.on_finish_action == OnFinishAction.DELETE_SUCCEEDED_POD and not is_success
        )
        if keeps and end.kind in (EndKind.EXITED, EndKind.DISRUPTED):
            self.log.info("Keeping pod %s (on_finish_action)", end.pod_name)
            return
        patience_s = _LAST_CALL_S if self._is_killed else self.api_timeout.total_seconds()
        pods = self._pods(Attempt.of(context["ti"], self.work()), end.namespace, patience_s)
        self._is_killed = False  # what is left to do has to be done all the same
        try:
            pods.delete(end.pod_name, at_once=end.is_unreachable)
        except (ApiException, HTTPError) as error:
            self.log.error(
                "Pod %s couldn't be removed (%s); the next try will, or the cluster after"
                " active_deadline_seconds",
                end.pod_name,
                message_of(error),
            )

    # Watching

    def _watch_here(self, context: Context, pod: k8s.V1Pod) -> PodEnd:
        """Watch a pod from this process, and remove it if that is cut off."""
        name = PodName(pod.metadata.name, pod.metadata.namespace, self.base_container_name)
        watch = self._watch = PodWatch(
            lambda: make_hook(
                self.kubernetes_conn_id, self.in_cluster, self.cluster_context, self.config_file
            ),
            name,
            self._limits(),
            lambda line: self.log.info("%s", line),
        )
        if self._is_killed:
            watch.stop()
        try:
            return asyncio.run(watch.until_end())
        except BaseException as error:  # the task's timeout among them, which is none of Exception
            self.log.warning("%s: removing pod %s", type(error).__name__, name.name)
            end = PodEnd(EndKind.STOPPED, name.name, name.namespace)
            self._remove_pod(context, end, is_success=False)
            raise
        finally:
            self._watch = None

    def _defer(self, context: Context, pod: k8s.V1Pod, num_disruptions: int) -> NoReturn:
        """Leave the pod to the triggerer."""
        deadline: datetime | None = None
        if self.execution_timeout is not None:
            deadline = context["ti"].start_date + self.execution_timeout
        self.defer(
            trigger=PodWatchTrigger(
                pod_name=pod.metadata.name,
                pod_namespace=pod.metadata.namespace,
                container_name=self.base_container_name,
                limits=asdict(self._limits()),
                kubernetes_conn_id=self.kubernetes_conn_id,
                in_cluster=self.in_cluster,
                cluster_context=self.cluster_context,
                config_file=self.config_file,
                deadline=deadline.isoformat() if deadline else None,
                log_since=None,
                grace_s=self.grace_s,
            ),
            method_name="resume",
            kwargs={"num_disruptions": num_disruptions},
            timeout=(deadline - datetime.now(UTC) + _DEFERRAL_MARGIN) if deadline else None,
        )
        raise AssertionError("defer always raises")

    def _limits(self) -> WatchLimits:
        return WatchLimits(
            queue_s=self.queue_timeout.total_seconds(),
            start_s=self.start_timeout.total_seconds(),
            stuck_s=self.stuck_timeout.total_seconds(),
            api_s=self.api_timeout.total_seconds(),
            poll_s=self.poll_interval,
        )

    def _wait_for_quota(
        self, said: str, num_disruptions: int, since: datetime, *, defers: bool
    ) -> None:
        """Let some time pass, in the triggerer if there is one.

        Raises:
            AirflowException: the time is up, or the task was killed.
        """
        if datetime.now(UTC) - since > self.queue_timeout:
            raise AirflowException(f"no room for a pod in time (queue_timeout): {said}")
        self.log.info("Waiting for room in the namespace's quota: %s", said)
        pause = min(_QUOTA_PAUSE, timedelta(seconds=12 * self.poll_interval))
        if defers:
            self.defer(
                trigger=TimeDeltaTrigger(pause),
                method_name="resume_waiting",
                kwargs={"num_disruptions": num_disruptions, "waiting_since": since.isoformat()},
            )
        until = time.monotonic() + pause.total_seconds()
        while time.monotonic() < until:
            if self._is_killed:
                raise AirflowException("the task was killed while it waited for a pod")
            time.sleep(0.5)

    def _next_try_looks_for_it(self, context: Context) -> bool:
        """Whether this task ends only because its worker does, and Airflow will try it again.

        A user who marks or clears a task changes its state first.
        """
        ti = context["ti"]
        if ti.try_number > ti.max_tries:
            return False
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

    # Commands in the worker

    def _commands(self) -> CommandRunner:
        credentials = Credentials.of(self.aws_conn_id, self.connection_env)
        self._command_runner = CommandRunner(self.log, self.env, credentials, self.kill_grace_s)
        return self._command_runner

    def _verify(self, pod_name: str | None) -> dict[str, Any] | str:
        """The results in the lake, or what is missing of them."""
        arguments = self.verify_command(pod_name)
        if arguments is None:
            return "nothing was looked for"
        return self._commands().run_unless_incomplete("verify", *arguments)
