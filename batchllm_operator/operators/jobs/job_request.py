"""The Job that a task asks the cluster for, and how it is to be watched."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator, make_safe_label_value
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import Context
from kubernetes.client import ApiClient
from kubernetes.client import models as k8s

from batchllm_operator.errors import FINAL_EXIT_CODES
from batchllm_operator.operators.jobs.calls import Cluster
from batchllm_operator.operators.jobs.job_operator import BatchLLMJobOperator
from batchllm_operator.operators.jobs.owner import LABEL, QUEUE, Attempt
from batchllm_operator.operators.jobs.pod import (
    arguments_pod,
    check_grace,
    default_pod,
    escaped,
    main_container,
    merged,
    secret_variables,
    variables,
    with_gpus,
    with_template,
)
from batchllm_operator.operators.jobs.trigger import WatchedJob
from batchllm_operator.operators.jobs.watch import WatchLimits

_DAY_S: Final = 24 * 3600
_MIN_PODS: Final = "kueue.x-k8s.io/job-min-parallelism"
_EQUAL_PODS: Final = "kueue.x-k8s.io/job-completions-equal-parallelism"


class BatchLLMJobRequest(BatchLLMJobOperator):
    """Makes the body of a Job of templates and arguments."""

    component: ClassVar[str]
    look_interval: timedelta | None = None
    """How often the task looks whether the work is done without its Job. None if never."""

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
        """A text that identifies the Job's work."""

    @abstractmethod
    def stem(self) -> str:
        """The beginning of the Job's name, after `batchllm-`."""

    def num_pods(self) -> int:
        """How many workers there are; 0 if there is nothing to do."""
        return 1

    def stage_labels(self) -> dict[str, str]:
        """Labels that describe the Job's work, for people."""
        return {}

    @property
    def has_secrets(self) -> bool:
        return self.aws_conn_id is not None or bool(self.connection_env)

    # The request

    def build_pod_request_obj(
        self, context: Context | None = None, *, dry_run: bool = False
    ) -> k8s.V1Pod:
        """The pods' template: our defaults, the user's over them, single arguments over both.

        Raises:
            ValueError: the template is missing, or asks for another number of GPUs.
        """
        pod, _ = self._pod_template()
        return self._built(pod, context, dry_run=dry_run)

    def _pod_template(self) -> tuple[dict[str, Any], int]:
        """The template before the provider's merging, and the number of its GPUs."""
        name = self.base_container_name
        pod = default_pod(self.settings, name)
        for template in self._templates():
            pod = with_template(pod, template, name)
        pod = merged(merged(pod, arguments_pod(self.settings, name)), self._own_arguments())
        return pod, with_gpus(pod, self.settings)

    def _own_arguments(self) -> dict[str, Any]:
        """The provider's arguments that it would not merge field by field, or add a second time."""
        plain: Any = ApiClient().sanitize_for_serialization  # accepts models and dictionaries
        env = self.env_vars if isinstance(self.env_vars, list) else variables(self.env_vars)
        main = {
            "name": self.base_container_name,
            "env": [*variables(self.env or {}), *plain(env)],
            "resources": plain(self.container_resources),
            "securityContext": plain(self.container_security_context),
            "volumeMounts": plain(self.volume_mounts),
        }
        return {
            "spec": {
                "containers": [main],
                "nodeSelector": self.node_selector if self._has_node_selector else None,
                "securityContext": plain(self.security_context or None),
                "volumes": plain(self.volumes),
            }
        }

    def _built(
        self, pod: dict[str, Any], context: Context | None, *, dry_run: bool = False
    ) -> k8s.V1Pod:
        with self._set(
            full_pod_spec=PodGenerator.deserialize_model_dict(pod),
            pod_template_file=None,
            pod_template_dict=None,
            do_xcom_push=False,  # no sidecar
            env_vars=[],
            volumes=[],
            volume_mounts=[],
            container_resources=None,
            container_security_context=None,
            security_context={},
            active_deadline_seconds=None,  # the Job's
        ):
            return KubernetesPodOperator.build_pod_request_obj(self, context, dry_run=dry_run)

    @contextmanager
    def _set(self, **arguments: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in arguments}
        vars(self).update(arguments)
        try:
            yield
        finally:
            vars(self).update(before)

    def _job_templates(self) -> Iterator[dict[str, Any]]:
        if self.job_template_file:
            yield _read_template("job_template_file", self.job_template_file)
        if self.full_job_spec:
            yield ApiClient().sanitize_for_serialization(self.full_job_spec)

    def _templates(self) -> Iterator[dict[str, Any]]:
        """The user's templates of pods, later ones over earlier ones."""
        for template in self._job_templates():
            yield (template.get("spec") or {}).get("template") or {}
        if self.pod_template_file:
            yield _read_template("pod_template_file", self.pod_template_file)
        elif self.pod_template_dict:
            yield dict(self.pod_template_dict)
        if self.full_pod_spec:
            yield ApiClient().sanitize_for_serialization(self.full_pod_spec)

    def request(
        self, context: Context, attempt: Attempt, secret_keys: Sequence[str]
    ) -> dict[str, Any]:
        """The Job to create; its Secret has variables of those names.

        Raises:
            AirflowFailException: a template is missing or unfit.
        """
        try:
            return self._request(context, attempt, secret_keys)
        except ValueError as error:
            raise AirflowFailException(str(error)) from error

    def _request(
        self, context: Context, attempt: Attempt, secret_keys: Sequence[str]
    ) -> dict[str, Any]:
        name = self.name = attempt.job_name(self.stem())
        pod, num_gpus = self._pod_template()
        main, deadline_s = main_container(pod), pod["spec"].pop("activeDeadlineSeconds", None)
        grace_s = int(pod["spec"]["terminationGracePeriodSeconds"])
        main["command"] = ["batchllm"]
        main["args"] = [escaped(text) for text in self.pod_command(context, grace_s, num_gpus)]
        secrets = secret_variables(name, secret_keys)
        pod = merged(pod, {"spec": {"containers": [{"name": main["name"], "env": secrets}]}})
        labels = {
            **self.labels,
            "app.kubernetes.io/name": "batchllm",
            "app.kubernetes.io/component": self.component,
            "app.kubernetes.io/managed-by": "airflow",
            **{key: make_safe_label_value(text) for key, text in self.stage_labels().items()},
            **attempt.labels,
        }
        with self._set(labels=labels):
            built = ApiClient().sanitize_for_serialization(self._built(pod, context))
        built["metadata"].pop("name", None)
        return self._body(built["metadata"].pop("namespace"), built, attempt, deadline_s)

    def _body(
        self,
        namespace: str,
        pod: Mapping[str, Any],
        attempt: Attempt,
        deadline_s: int | None,
    ) -> dict[str, Any]:
        """The Job's body; which failures its controller answers is here, and nowhere else."""
        container, num_pods = self.base_container_name, self.num_pods()
        codes = [int(code) for code in FINAL_EXIT_CODES]
        final = {"containerName": container, "operator": "In", "values": codes}
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        body: dict[str, Any] = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {},
            "spec": {
                "completionMode": "Indexed",
                "backoffLimitPerIndex": self.max_restarts,
                "podFailurePolicy": {
                    "rules": [
                        {"action": "FailJob", "onExitCodes": final},
                        {"action": "Ignore", "onPodConditions": [disrupted]},
                    ]
                },
                "podReplacementPolicy": "Failed",
                "activeDeadlineSeconds": deadline_s or _DAY_S,
                "ttlSecondsAfterFinished": _DAY_S,
            },
        }
        for template in self._job_templates():
            spec = {n: v for n, v in (template.get("spec") or {}).items() if n != "template"}
            body = merged(body, {"metadata": template.get("metadata"), "spec": spec})
        annotations = dict(self.annotations)
        labels = pod["metadata"]["labels"] | attempt.try_label
        labels |= {f"{LABEL}/num-pods": str(num_pods)}
        if self.queue_name is not None:
            labels[QUEUE] = self.queue_name
        if self.min_workers is not None and self.min_workers < num_pods:  # Kueue refuses others
            annotations |= {_MIN_PODS: str(self.min_workers), _EQUAL_PODS: "true"}
        own = {
            "metadata": {
                "name": self.name,
                "namespace": namespace,
                "labels": labels,
                "annotations": annotations,
            },
            "spec": {
                "completions": num_pods,
                "parallelism": num_pods,
                "activeDeadlineSeconds": self.active_deadline_seconds,
                "ttlSecondsAfterFinished": self.ttl_seconds_after_finished,
                "backoffLimit": self.backoff_limit,
                "suspend": self.suspend if self.queue_name is None else True,
                "template": {"metadata": pod["metadata"], "spec": pod["spec"]},
            },
        }
        return dict(merged(body, own))

    # The watch

    def _deadline(self, context: Context) -> datetime | None:
        """When the task's `execution_timeout` is over, all deferrals of a try together."""
        if self.execution_timeout is None:
            return None
        started_at: datetime = context["ti"].start_date
        return started_at + self.execution_timeout

    def _limits(self, pause_s: float | None) -> WatchLimits:
        waits = (self.queue_timeout, self.start_timeout, self.stuck_timeout, self.api_timeout)
        queue_s, start_s, stuck_s, api_s = (wait.total_seconds() for wait in waits)
        return WatchLimits(queue_s, start_s, stuck_s, api_s, self.poll_interval, pause_s)

    @property
    def _cluster(self) -> Cluster:
        return Cluster(
            self.kubernetes_conn_id, self.in_cluster, self.cluster_context, self.config_file
        )

    def _attempt(self, context: Context) -> Attempt:
        return Attempt.of(context["ti"], self.table_uri(), self.work())

    def _watched_job(
        self, context: Context, name: str, namespace: str, uid: str, attempt: Attempt
    ) -> WatchedJob:
        deadline, pause_s = self._deadline(context), None
        if self.look_interval is not None:  # with jitter, so that tasks don't stay in step
            pause_s = self.look_interval.total_seconds() * random.uniform(0.5, 1.0)
        return WatchedJob(
            **asdict(self._cluster),
            name=name,
            namespace=namespace,
            uid=uid,
            attempt=asdict(attempt),
            container_name=self.base_container_name,
            limits=asdict(self._limits(pause_s)),
            deadline=deadline.isoformat() if deadline else None,
            aws_conn_id=self.aws_conn_id,
            connection_env=dict(self.connection_env or {}),
        )


def check_grace_of_templates(task: BatchLLMJobRequest) -> None:
    """Raise `ValueError` if a template's grace period is too short; see `check_grace`.

    A file that isn't on this machine, or isn't YAML, is left to the one that makes the Job.
    """
    try:
        templates = list(task._templates())
    except (ValueError, OSError, yaml.YAMLError, AttributeError, TypeError):
        return
    spec: dict[str, Any] = {}
    for template in templates:
        spec |= template.get("spec") or {}
    name = "the pod template's terminationGracePeriodSeconds"
    check_grace(name, spec.get("terminationGracePeriodSeconds"))


def _read_template(argument: str, file: str) -> dict[str, Any]:
    if not Path(file).is_file():
        raise ValueError(f"{argument} {file} does not exist")
    content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{argument} {file} is no object of the API")
    return content
