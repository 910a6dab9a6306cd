"""The base of operators that may run in a pod: their arguments, and the pod's spec."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator
from airflow.providers.cncf.kubernetes.utils.pod_manager import OnFinishAction
from airflow.sdk import Context
from kubernetes.client import ApiClient, CoreV1Api
from kubernetes.client import models as k8s
from kubernetes.client.rest import RESTClientObject

from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.operators.pods.settings import GpuVendor, PodSettings
from batchllm_operator.operators.pods.spec import (
    check_gpus,
    default_pod,
    merged_pod,
    overlaid,
    with_arguments,
    without_repetitions,
)
from batchllm_operator.operators.pods.triggers import Cluster, PodWatchTrigger
from batchllm_operator.operators.pods.watch import PodName, WatchLimits

Runner = Literal["local", "kubernetes"]

_OURS: Final = {
    *("arguments", "callbacks", "cmds", "container_logs", "durable", "get_logs"),
    *("init_container_logs", "is_delete_operator_pod", "logging_interval", "name"),
    *("on_kill_action", "progress_callback", "random_name_suffix", "reattach_on_restart"),
    *("schedule_timeout_seconds", "skip_on_exit_code", "startup_check_interval_seconds"),
    *("startup_timeout_seconds", "trigger_kwargs"),
}
"""Arguments of `KubernetesPodOperator` that would have no effect, or break this operator."""
_TEMPLATES: Final = ("pod_template_file", "pod_template_dict", "full_pod_spec")
_OURS_REASON: Final = (
    "how a pod is named, found, awaited and logged is this operator's own (see queue_timeout,"
    " start_timeout, stuck_timeout, poll_interval)"
)


class BatchLLMPodOperator(KubernetesPodOperator):
    """A `KubernetesPodOperator` with defaults for our pods.

    How it runs, and when it succeeds, is in `stage.BatchLLMStageOperator`.

    Args:
        runner: `local` runs the command as a child process of the task, `kubernetes` in a pod.
            None: in a pod if a `gpu` is named, else as a child process.
        gpu: `nvidia` or `amd`: decides the pod's resource, node labels, taints, image and
            environment. None for no GPU.
        gpu_count: GPUs of the pod: `engine.replicas` times vLLM's tensor parallel size. Without
            `gpu`, it says how a template's GPUs are shared.
        image: container image (templated); by default `batchllm-cuda`, `batchllm-rocm` or
            `batchllm-airflow` with this release as its tag.
        cpu: the pod's CPU request, in Kubernetes' notation; by default 4. An argument wins over
            the template, the template over the default; so for the next two.
        memory: memory request and limit; by default 32Gi.
        shm_size: size of its /dev/shm; by default 8Gi.
        model_claim: PersistentVolumeClaim that holds models, mounted at /models (`HF_HOME`).
        cache_claim: PersistentVolumeClaim for compiled kernels, mounted at /cache.
        env: environment variables for the command (templated). Airflow stores and shows them:
            no place for secrets.
        aws_conn_id: Airflow connection of type `aws` (templated). The worker passes it on to
            its child process, or to a Secret that belongs to the pod.
        connection_env: environment variables that are fields of Airflow connections, in the
            same way; see `credentials.Credentials.of` (templated).
        session_token_outlives_task: whether a session token among those is valid for longer than
            a pod may run. Otherwise a pod gets none, as it couldn't renew it. A command in the
            worker always gets one, which each try reads again.
        secret_names: Secrets of the namespace whose keys become variables in the pod.
        max_disruptions: pods that one try may lose to the cluster and replace.
        queue_timeout: how long a pod may wait for a node, or for room in a quota.
        start_timeout: how long it may take from having a node to running, including image pulls.
        stuck_timeout: as `start_timeout`, once pulling fails or a Secret is missing.
        api_timeout: how long the cluster's API may fail to answer.
        poll_interval: seconds between two reads of the pod.
        deferrable: whether the triggerer watches the pod, and the worker's slot is free
            meanwhile. None: if a triggerer runs; if that is unknown, as Airflow's
            `[operators] default_deferrable` says. A worker that watches checks again.
        active_deadline_seconds: how long after its start the cluster ends a pod in any case; by
            default as in the template, or a day.
        termination_grace_period: seconds that a pod gets to finish its open parts when it is
            asked to stop; by default as in the template, or 330.
        kill_grace_s: seconds that a command in the worker gets to stop.
        do_xcom_push: whether Airflow keeps the return value. There is no sidecar for it.
        kwargs: those of `KubernetesPodOperator`. `pod_template_file`, `pod_template_dict` and
            `full_pod_spec` win over the defaults here, single arguments over those. Arguments
            without effect here are refused.
    """

    template_fields: Sequence[str] = (
        *KubernetesPodOperator.template_fields,
        "env",
        "aws_conn_id",
        "connection_env",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        "env_vars": "py",
        "env": "json",
        "connection_env": "json",
    }
    look_interval: timedelta | None = None
    """How long its pod may give no sign until the task looks whether the work is done without it.
    None if only this pod can do it."""

    def __init__(
        self,
        *,
        runner: Runner | None = None,
        gpu: GpuVendor | None = None,
        gpu_count: int = 1,
        cpu: str | None = None,
        memory: str | None = None,
        shm_size: str | None = None,
        model_claim: str | None = None,
        cache_claim: str | None = None,
        env: Mapping[str, str] | None = None,
        aws_conn_id: str | None = None,
        connection_env: Mapping[str, str] | None = None,
        session_token_outlives_task: bool = False,
        secret_names: Sequence[str] = (),
        max_disruptions: int = 3,
        queue_timeout: timedelta = timedelta(hours=6),
        start_timeout: timedelta = timedelta(minutes=30),
        stuck_timeout: timedelta = timedelta(minutes=10),
        api_timeout: timedelta = timedelta(minutes=15),
        poll_interval: float = 5.0,
        deferrable: bool | None = None,
        active_deadline_seconds: int | None = None,
        termination_grace_period: int | None = None,
        kill_grace_s: float = 30.0,
        do_xcom_push: bool = True,
        **kwargs: Any,
    ) -> None:
        _check(runner, memory, secret_names, kwargs)
        kwargs.setdefault("termination_message_policy", "FallbackToLogsOnError")
        super().__init__(
            deferrable=False,
            poll_interval=poll_interval,
            active_deadline_seconds=active_deadline_seconds,
            termination_grace_period=termination_grace_period,
            do_xcom_push=do_xcom_push,
            random_name_suffix=False,
            **kwargs,
        )
        self.wants_deferral = deferrable
        self.runner: Runner = runner or ("kubernetes" if gpu else "local")
        self._has_node_selector = kwargs.get("node_selector") is not None
        self.gpu, self.gpu_count = gpu, gpu_count
        self.settings = PodSettings(
            gpu=gpu,
            gpu_count=gpu_count,
            cpu=cpu,
            memory=memory,
            shm_size=shm_size,
            model_claim=model_claim,
            cache_claim=cache_claim,
            secret_names=tuple(secret_names),
            deadline_s=active_deadline_seconds,
            grace_s=termination_grace_period,
        )
        self._check_settings(self.settings, *(getattr(self, name) for name in _TEMPLATES))
        self.env, self.aws_conn_id, self.connection_env = env, aws_conn_id, connection_env
        self.session_token_outlives_task = session_token_outlives_task
        self.max_disruptions = max_disruptions
        self.queue_timeout, self.start_timeout = queue_timeout, start_timeout
        self.stuck_timeout, self.api_timeout = stuck_timeout, api_timeout
        self.kill_grace_s = kill_grace_s

    @classmethod
    def partial(cls, **kwargs: Any) -> Any:
        """As Airflow's, which would call the constructor only once the task is mapped.

        Raises:
            ValueError: the constructor would refuse these arguments, or the `default_args` of the
                DAG or the task group.
        """
        made = super().partial(**kwargs)
        given: dict[str, Any] = {}
        for owner in (made.kwargs.get("dag"), made.kwargs.get("task_group")):
            given |= getattr(owner, "default_args", None) or {}
        given |= {**(kwargs.get("default_args") or {}), **kwargs}
        try:
            _check(given.get("runner"), given.get("memory"), given.get("secret_names", ()), kwargs)
            cls._check_settings(
                PodSettings(
                    gpu=given.get("gpu"),
                    gpu_count=given.get("gpu_count", 1),
                    grace_s=given.get("termination_grace_period"),
                ),
                *(given.get(name) for name in _TEMPLATES),
            )
        except ValueError:
            made._expand_called = True  # else Airflow warns that it was never mapped
            raise
        return made

    @classmethod
    def _check_settings(cls, settings: PodSettings, *templates: Any) -> None:
        """Raise `ValueError` if the settings, or those `_TEMPLATES`, don't suit the work."""

    def build_pod_request_obj(self, context: Context | None = None, **kwargs: Any) -> k8s.V1Pod:
        """The pod: our defaults, the user's template over them, single arguments over both.

        Raises:
            ValueError: the template is missing, or asks for another number of GPUs.
        """
        default = default_pod(self.settings, self.base_container_name)
        if self._has_node_selector:
            default.spec.node_selector = None
        template = merged_pod(default, self._user_template(), self.base_container_name)
        template = with_arguments(template, self.settings)
        with self._given(
            full_pod_spec=template,
            pod_template_file=None,
            pod_template_dict=None,
            do_xcom_push=False,  # no sidecar
            env_vars=[*_variables(self.env), *_variables(self.env_vars)],
        ):
            pod = super().build_pod_request_obj(context, **kwargs)
        pod = overlaid(pod, template, self._security_and_resources())
        check_gpus(pod, self.settings)
        return without_repetitions(pod)

    def _security_and_resources(self) -> k8s.V1Pod:
        plain = ApiClient().sanitize_for_serialization  # accepts models and dictionaries
        main = {
            "name": self.base_container_name,
            "resources": plain(self.container_resources),
            "securityContext": plain(self.container_security_context),
        }
        spec = {"containers": [main], "securityContext": plain(self.security_context or None)}
        return PodGenerator.deserialize_model_dict({"spec": spec})

    @contextmanager
    def _given(self, **arguments: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in arguments}
        vars(self).update(arguments)
        try:
            yield
        finally:
            vars(self).update(before)

    def _user_template(self) -> k8s.V1Pod | None:
        template: k8s.V1Pod | None = None
        if self.pod_template_file:
            if not Path(self.pod_template_file).is_file():
                raise ValueError(f"pod_template_file {self.pod_template_file} does not exist")
            template = PodGenerator.deserialize_model_file(self.pod_template_file)
        elif self.pod_template_dict:
            template = PodGenerator.deserialize_model_dict(self.pod_template_dict)
        if self.full_pod_spec and template is not None:
            return PodGenerator.reconcile_pods(template, self.full_pod_spec)
        return self.full_pod_spec or template

    def _deadline(self, context: Context) -> datetime | None:
        """When the task's `execution_timeout` is over, all deferrals of a try together."""
        if self.execution_timeout is None:
            return None
        started_at: datetime = context["ti"].start_date
        return started_at + self.execution_timeout

    def _limits(self) -> WatchLimits:
        waits = (self.queue_timeout, self.start_timeout, self.stuck_timeout, self.api_timeout)
        queue_s, start_s, stuck_s, api_s = (each.total_seconds() for each in waits)
        silence_s = None
        if self.look_interval is not None:  # with jitter, so that tasks don't stay in step
            silence_s = self.look_interval.total_seconds() * random.uniform(0.5, 1.0)
        return WatchLimits(queue_s, start_s, stuck_s, api_s, self.poll_interval, silence_s)

    def _trigger(self, pod: PodName, deadline: datetime | None, log_ns: int) -> PodWatchTrigger:
        return PodWatchTrigger(
            pod_name=pod.name,
            pod_namespace=pod.namespace,
            pod_uid=pod.uid,
            container_name=self.base_container_name,
            limits=asdict(self._limits()),
            **asdict(self._cluster),
            deadline=deadline.isoformat() if deadline else None,
            aws_conn_id=self.aws_conn_id,
            connection_env=dict(self.connection_env or {}),
            removes=self.on_finish_action == OnFinishAction.DELETE_POD,
            log_ns=log_ns,
        )

    @property
    def _cluster(self) -> Cluster:
        return Cluster(
            self.kubernetes_conn_id, self.in_cluster, self.cluster_context, self.config_file
        )

    @property
    def has_secrets(self) -> bool:
        return self.aws_conn_id is not None or bool(self.connection_env)

    def _secret_variables(self) -> Mapping[str, str]:
        """Variables for the pod's own Secret."""
        credentials = Credentials.of(self.aws_conn_id, self.connection_env)
        if not self.session_token_outlives_task:
            credentials.check_lasting()
        return credentials.variables

    def _connect(self) -> CoreV1Api:
        """A new client with the current configuration, which sends each request once."""
        for name in ("hook", "client"):
            vars(self).pop(name, None)
        connection = self.client.api_client
        connection.configuration.retries = 0  # else urllib3 sends up to four
        connection.rest_client = RESTClientObject(connection.configuration)
        return self.client


def _check(
    runner: str | None, memory: str | None, secret_names: Sequence[str], kwargs: Mapping[str, Any]
) -> None:
    """Raise `ValueError` for arguments that are wrong, or contradict each other."""
    if memory is not None and kwargs.get("container_resources") is not None:
        raise ValueError("give memory or container_resources, not both")
    for name in _OURS.intersection(kwargs):
        raise ValueError(f"{name} can't be set: {_OURS_REASON}")
    if isinstance(secret_names, str):
        raise ValueError("secret_names must be a list of names")
    if runner not in (None, "local", "kubernetes"):
        raise ValueError(f"runner is {runner!r}; it must be 'local' or 'kubernetes'")


def _variables(given: Any) -> list[k8s.V1EnvVar]:
    if isinstance(given, Mapping):
        return [k8s.V1EnvVar(name=name, value=str(value)) for name, value in given.items()]
    return list(given or ())
