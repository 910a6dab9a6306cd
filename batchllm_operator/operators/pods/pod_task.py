"""Creates, watches and removes the pods of a task."""

from __future__ import annotations

import asyncio
import os
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Final

from airflow.providers.cncf.kubernetes.pod_generator import make_safe_label_value
from airflow.providers.cncf.kubernetes.utils.pod_manager import OnFinishAction
from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowTaskTimeout,
)
from airflow.sdk import Context
from kubernetes.client import models as k8s
from kubernetes.client.exceptions import ApiException

from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.operators.pods.api_errors import message_of
from batchllm_operator.operators.pods.attempt import (
    OwnerPods,
    QuotaExceededError,
    SupersededError,
)
from batchllm_operator.operators.pods.calls import ClusterCalls
from batchllm_operator.operators.pods.end import EndKind, PodEnd
from batchllm_operator.operators.pods.owner import Attempt
from batchllm_operator.operators.pods.pod_operator import BatchLLMPodOperator
from batchllm_operator.operators.pods.spec import escaped, num_gpus, with_secret
from batchllm_operator.operators.pods.watch import PodName, PodWatch, WatchLimits
from batchllm_operator.operators.tries import is_anothers, task_state, will_be_retried
from batchllm_operator.operators.triggerer import when_triggerer_runs

_LAST_CALL_S, _SHORTEST_LAST_CALL_S = 4.0, 1.0
"""Time to remove a pod: Airflow gives a killed task five seconds."""
_STATE_S: Final = 1.0
"""Part of it for asking Airflow, which may not answer, for the task's state."""
_REFUSED: Final = (400, 403, 404, 422)
"""HTTP statuses of a request that would be refused again: the pod or its namespace is wrong."""


class BatchLLMPodTask(BatchLLMPodOperator):
    """A task whose work is done by one pod at a time; `stage` judges how it ended."""

    component: ClassVar[str]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._watch: PodWatch | None = None
        self._pods_asked: OwnerPods | None = None
        self._pod: PodName | None = None
        self._killed_at: float | None = None
        self._supervisor_pid: int | None = None

    # For subclasses

    @abstractmethod
    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        """The arguments of `batchllm` in a pod with `num_gpus` and a grace period of `grace_s`.

        Raises:
            ValueError: the pod is unfit for them.
        """

    @abstractmethod
    def table_uri(self) -> str:
        """The job's output table."""

    @abstractmethod
    def work(self) -> str:
        """A text that identifies the pod's work."""

    @abstractmethod
    def stem(self) -> str:
        """The beginning of the pod's name."""

    def stage_labels(self) -> dict[str, str]:
        """Labels that describe the pod's work, for people."""
        return {}

    # The cluster

    def _take_pod(self, context: Context) -> PodName:
        attempt = self._attempt(context)
        variables = self._secret_variables()
        first = self._request(context, attempt, 0, variables)
        namespace = first.metadata.namespace

        def make(ordinal: int) -> k8s.V1Pod:
            request = self._request(context, attempt, ordinal, variables) if ordinal else first
            self._pod = PodName(request.metadata.name, namespace, self.base_container_name)
            return request

        pods = self._pods(attempt, namespace, self.api_timeout.total_seconds())
        self._pods_asked = pods
        try:
            pod, is_new = pods.take(make, keep_dead=self._keeps_dead)
            taken = self._pod = self._name_of(pod)
            if self.has_secrets:
                self._put_secret(pods, pod, variables)
        except QuotaExceededError:
            self._pod = None
            raise
        except ApiException as error:
            raise _refusal("the pod", error) from error
        except SupersededError as error:
            raise AirflowException(
                f"a later try of this task has begun, and has pod {error}: this one ends"
            ) from None
        finally:
            self._pods_asked = None
        self.log.info(
            "%s pod %s in namespace %s",
            "Made" if is_new else "Taking up",
            taken.name,
            taken.namespace,
        )
        return taken

    def _put_secret(self, pods: OwnerPods, pod: k8s.V1Pod, variables: Mapping[str, str]) -> None:
        """Give the pod its credentials, or remove it, because it would wait for them forever."""
        try:
            pods.put_secret(pod, variables)
        except QuotaExceededError:
            pods.delete(pod.metadata.name, pod.metadata.uid)
            raise
        except ApiException as error:
            pods.delete(pod.metadata.name, pod.metadata.uid)
            raise _refusal("the pod's Secret", error) from error

    def _name_of(self, pod: k8s.V1Pod) -> PodName:
        metadata = pod.metadata
        return PodName(
            metadata.name, metadata.namespace, self.base_container_name, metadata.uid or ""
        )

    def _attempt(self, context: Context) -> Attempt:
        return Attempt.of(context["ti"], self.table_uri(), self.work())

    def _request(
        self, context: Context, attempt: Attempt, ordinal: int, variables: Iterable[str]
    ) -> k8s.V1Pod:
        """The pod to create; `variables` are the names of those in its Secret."""
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
            grace_s = pod.spec.termination_grace_period_seconds
            arguments = self.pod_command(context, grace_s, num_gpus(pod, self.settings))
        except ValueError as error:
            raise AirflowFailException(str(error)) from error
        pod.spec.containers[0].args = [escaped(each) for each in arguments]
        return with_secret(pod, name, variables) if self.has_secrets else pod

    def _pods(
        self, attempt: Attempt, namespace: str, patience_s: float, *, is_cleaning_up: bool = False
    ) -> OwnerPods:
        """The owner's pods; calls stop once the task is killed, unless `is_cleaning_up`."""
        # A killed task reuses its client, because a new one asks Airflow for the connection.
        known = iter([self.client] if self._is_killed and "client" in vars(self) else ())
        calls = ClusterCalls(
            lambda: next(known, None) or self._connect(),
            self.log,
            patience_s=patience_s,
            limit_s=patience_s if is_cleaning_up else None,
            is_stopped=lambda: self._is_over and not is_cleaning_up,
        )
        return OwnerPods(
            calls,
            namespace,
            attempt,
            self.base_container_name,
            has_secrets=self.has_secrets,
            poll_s=min(2.0, self.poll_interval),
        )

    def _remove_pod(self, context: Context, end: PodEnd, *, is_success: bool) -> None:
        """Remove a pod after its end, unless `on_finish_action` keeps it and it costs nothing."""
        keeps = self._keeps_dead and not (
            is_success and self.on_finish_action == OnFinishAction.DELETE_SUCCEEDED_POD
        )
        patience_s = self.api_timeout.total_seconds()
        if self._killed_at is not None:
            patience_s = self._last_call_s
        with self._telling_of_leftovers():
            if is_anothers(self._state(context)):
                self.log.warning("Pod %s is left to another try of this task", end.pod_name)
                return
            pods = self._pods(
                self._attempt(context), end.namespace, patience_s, is_cleaning_up=True
            )
            if keeps and end.may_stay:
                self.log.info("Keeping pod %s (on_finish_action)", end.pod_name)
                pods.delete_secret(end.pod_name)
            else:
                pods.delete(end.pod_name, end.pod_uid, at_once=end.is_unreachable)

    @contextmanager
    def _released_when_killed(self, context: Context) -> Iterator[None]:
        """Remove the owner's pods if the task is killed or times out meanwhile.

        They are left to another try that lives, or to the next try if only this worker is stopping.
        """
        self._supervisor_pid = os.getppid()
        try:
            yield
        except BaseException as error:
            if isinstance(error, AirflowTaskTimeout):
                self.log.warning("The task's execution_timeout is over")
            elif not self._is_killed and not self._is_orphan():
                raise
            if not self._another_try_has_the_pod(context, error):
                self._release(context)
            raise

    def _release(self, context: Context) -> None:
        """Ask all pods of the owner to stop, first the current one by its name.

        There may be time for one call only.
        """
        with self._telling_of_leftovers():
            pod = self._pod
            if pod is not None:
                namespace = pod.namespace
            else:
                namespace = self.build_pod_request_obj(context).metadata.namespace
            attempt = self._attempt(context)
            pods = self._pods(attempt, namespace, self._last_call_s, is_cleaning_up=True)
            if pod is not None:
                self.log.info("Removing pod %s", pod.name)
                pods.delete(pod.name, pod.uid)
            pods.delete_all(keep_dead=self._keeps_dead)

    @property
    def _last_call_s(self) -> float:
        since = time.monotonic() - self._killed_at if self._killed_at is not None else 0.0
        return max(_SHORTEST_LAST_CALL_S, _LAST_CALL_S - since)

    @property
    def _is_killed(self) -> bool:
        return self._killed_at is not None

    @property
    def _keeps_dead(self) -> bool:
        """Whether ended pods may stay for the user to inspect."""
        return bool(self.on_finish_action != OnFinishAction.DELETE_POD)

    def _is_orphan(self) -> bool:
        """Whether Airflow's supervisor of this process has died, so that its result is lost."""
        return self._supervisor_pid is not None and os.getppid() != self._supervisor_pid

    @property
    def _is_over(self) -> bool:
        return self._is_killed or self._is_orphan()

    @contextmanager
    def _telling_of_leftovers(self) -> Iterator[None]:
        """Log a failure to remove pods instead of raising it: it doesn't decide the task's end."""
        try:
            yield
        # Any error: the results in the lake don't depend on the cluster.
        except Exception as error:  # noqa: BLE001
            self.log.error(
                "A pod couldn't be removed (%s); the next try will do it, or the cluster after"
                " active_deadline_seconds",
                message_of(error),
            )

    def _another_try_has_the_pod(self, context: Context, error: BaseException) -> bool:
        """Whether another try has this one's pod, or the next try will take it up.

        The next try does so if only this worker is stopping: marking or clearing a task changes its
        state first.
        """
        is_retried = will_be_retried(context["ti"]) and not isinstance(error, AirflowTaskTimeout)
        if self._is_orphan():  # Airflow notices missing heartbeats
            if is_retried:
                self.log.warning("The worker is going; the next try takes the pod up")
            return is_retried
        state = self._state(context)
        if is_anothers(state):
            self.log.warning("Another try of this task lives (%s); the pod is left to it", state)
            return True
        if state == "running" and is_retried:
            self.log.warning("The worker is going; the next try takes the pod up")
            return True
        return False

    def _state(self, context: Context) -> str | None:
        return task_state(context["ti"], self.log, _STATE_S if self._is_killed else None)

    # Watching

    def _glance(self, context: Context, pod: PodName, end: PodEnd) -> PodEnd:
        """Look at a pod whose watch has paused in the triggerer, and log that watch's lines again:
        the next deferral empties the triggerer's file."""
        limits = replace(self._limits(), silence_s=0.0, api_s=0.0)
        seen = self._watch_here(context, pod, end.log_from_ns, limits)
        if seen is None or seen.is_unseen:  # the next watch logs them
            return replace(end, log_ns=end.log_from_ns)
        return seen

    def _watch_here(
        self, context: Context, pod: PodName, log_ns: int, limits: WatchLimits | None = None
    ) -> PodEnd | None:
        """Watch a pod from this process; None if a triggerer runs by now and is to take over.

        With `limits` of its own, the watch doesn't ask for one.
        """
        credentials = Credentials.of(self.aws_conn_id, self.connection_env)
        watch = self._watch = PodWatch(
            lambda: self._cluster.hook(),
            pod,
            limits or self._limits(),
            lambda line: self.log.info("%s", line),
            deadline=self._deadline(context),
            is_abandoned=self._is_orphan,
            masked=credentials.masker,
            log_ns=log_ns,
        )
        if self._is_killed:
            watch.stop()
        try:
            asks = limits is None and self.wants_deferral is None
            with when_triggerer_runs(watch.stop) if asks else nullcontext():
                end = asyncio.run(watch.until_end())
        finally:
            self._watch = None
        return None if end.kind is EndKind.STOPPED and not self._is_over else end


def _refusal(what: str, error: ApiException) -> AirflowException:
    message = f"the cluster refuses {what}: {message_of(error)}"
    return (AirflowFailException if error.status in _REFUSED else AirflowException)(message)
