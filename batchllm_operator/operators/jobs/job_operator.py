"""The base of operators that may run in a Kubernetes Job: their arguments, and the Job's body."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal

from airflow.providers.cncf.kubernetes.operators.job import KubernetesJobOperator
from airflow.providers.cncf.kubernetes.pod_generator import make_safe_label_value
from airflow.providers.common.compat.sdk import AirflowFailException, conf
from airflow.sdk import Context
from kubernetes.client import models as k8s

from batchllm_operator.errors import FINAL_EXIT_CODES
from batchllm_operator.operators.command import BatchLLMCommandOperator
from batchllm_operator.operators.jobs.owner import LABEL, QUEUE, Attempt
from batchllm_operator.operators.jobs.pod import (
    VENDORS,
    GpuVendor,
    built_pod,
    check_grace,
    escaped,
    job_templates,
    main_container,
    merged,
    plain,
    pod_of,
)

Runner = Literal["local", "kubernetes"]

_DAY_S: Final = 24 * 3600
_MIN_PODS: Final = "kueue.x-k8s.io/job-min-parallelism"
_EQUAL_PODS: Final = "kueue.x-k8s.io/job-completions-equal-parallelism"
_REFUSED: Final = {
    name: reason
    for reason, names in {
        "the operator names the Job, and says what its pods run": (
            "arguments cmds name random_name_suffix"
        ),
        "num_workers says how many pods there are": (
            "completions parallelism completion_mode manual_selector selector"
        ),
        "how a Job is awaited and logged is this operator's own (see queue_timeout,"
        " start_timeout, stuck_timeout, poll_interval)": (
            "base_container_status_polling_interval callbacks container_logs"
            " container_name_log_prefix_enabled discover_pods_retry_number durable get_logs"
            " init_container_logs is_delete_operator_pod job_poll_interval log_events_on_failure"
            " log_events_on_startup log_formatter log_pod_spec_on_failure logging_interval"
            " on_kill_action on_kill_propagation_policy progress_callback reattach_on_restart"
            " schedule_timeout_seconds skip_on_exit_code startup_check_interval_seconds"
            " startup_timeout_seconds trigger_kwargs unwrap_single wait_until_job_complete"
            " xcom_sidecar_container_security_context"
        ),
    }.items()
    for name in names.split()
}
"""Arguments of `KubernetesJobOperator` that would have no effect, or break this operator."""


class BatchLLMJobOperator(BatchLLMCommandOperator, KubernetesJobOperator):
    """A `KubernetesJobOperator` with defaults for our pods; `BatchLLMStageOperator` runs it.

    Args:
        runner: `local` runs the command as a child process of the task, `kubernetes` in the pods of
            a Job. None: in a Job if a `gpu` is named, else as a child process.
        gpu: `nvidia` or `amd`: decides the pods' resource, node labels, taints, image and
            environment. None for no GPU.
        gpu_count: GPUs of a pod: `engine.replicas` times vLLM's tensor parallel size. Without
            `gpu`, it says how a template's GPUs are shared.
        gpu_resource: the resource by which pods ask for GPUs, such as `nvidia.com/mig-3g.40gb`; by
            default the vendor's whole ones (templated).
        resource_claims: names of pods' resource claims, each with its ResourceClaimTemplate; in
            place of a GPU resource.
        cpu: a pod's CPU request. An argument wins over the template, the template over the default
            (`pod.yaml`); so for `memory` (request and limit) and `shm_size` (of its /dev/shm).
        model_claim: PersistentVolumeClaim that holds models, mounted at /models (`HF_HOME`).
        cache_claim: PersistentVolumeClaim for compiled kernels, mounted at /cache.
        session_token_outlives_task: whether a session token from a connection is valid for longer
            than a Job may run. Otherwise a Job gets none, as it couldn't renew it.
        secret_names: Secrets of the namespace whose keys become variables in the pods.
        queue_name: Kueue's LocalQueue (templated): the Job is suspended until it is admitted.
        min_workers: pods with which Kueue may admit a Job of more, if it can't have all.
        max_restarts: pods that each worker may lose by a failure of its own. Those that the cluster
            ends (eviction, preemption, a lost node) don't count: the Job controller replaces them.
        queue_timeout: how long no pod of the Job may find a node, or room in a quota or queue.
        start_timeout: how long a pod may take from having a node to running, including image
            pulls, while no other runs; `stuck_timeout` once pulling fails or a Secret is missing.
        api_timeout: how long the cluster's API may fail to answer.
        poll_interval: seconds between two reads of the Job.
        deferrable: whether the triggerer watches the Job, and the worker's slot is free meanwhile;
            by default as Airflow's `[operators] default_deferrable` says.
        termination_grace_period: seconds that a pod gets to finish its open parts when it is
            asked to stop; by default as in the template, or 330.
        do_xcom_push: whether Airflow keeps the return value. There is no sidecar for it.
        kwargs: those of `BatchLLMCommandOperator` (a Job gets credentials of connections in a
            Secret of its own) and of `KubernetesJobOperator`: `image` is by default this release's
            `batchllm-cuda`, `batchllm-rocm` or `batchllm-airflow`,
            `active_deadline_seconds` and `ttl_seconds_after_finished` are a day. Templates of a Job
            or a pod win over the defaults, single arguments over those, and `pod_mutation_hook` has
            the last word. Arguments without effect here are refused.

    Raises:
        ValueError: an argument is refused, or out of its range.
    """

    template_fields: Sequence[str] = (
        *KubernetesJobOperator.template_fields,
        *BatchLLMCommandOperator.template_fields,
        *("queue_name", "gpu_resource"),
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        "env_vars": "py",
        **BatchLLMCommandOperator.template_fields_renderers,
    }
    component: ClassVar[str]

    def __init__(
        self,
        *,
        runner: Runner | None = None,
        gpu: GpuVendor | None = None,
        gpu_count: int = 1,
        gpu_resource: str | None = None,
        resource_claims: Mapping[str, str] | None = None,
        cpu: str | None = None,
        memory: str | None = None,
        shm_size: str | None = None,
        model_claim: str | None = None,
        cache_claim: str | None = None,
        session_token_outlives_task: bool = False,
        secret_names: Sequence[str] = (),
        queue_name: str | None = None,
        min_workers: int | None = None,
        max_restarts: int = 2,
        queue_timeout: timedelta = timedelta(hours=6),
        start_timeout: timedelta = timedelta(minutes=30),
        stuck_timeout: timedelta = timedelta(minutes=10),
        api_timeout: timedelta = timedelta(minutes=15),
        poll_interval: float = 10.0,
        deferrable: bool | None = None,
        do_xcom_push: bool = True,
        **kwargs: Any,
    ) -> None:
        for name in kwargs.keys() & _REFUSED.keys():
            raise ValueError(f"{name} can't be set: {_REFUSED[name]}")
        if memory is not None and kwargs.get("container_resources") is not None:
            raise ValueError("give memory or container_resources, not both")
        if isinstance(secret_names, str):
            raise ValueError("secret_names must be a list of names")
        if runner not in (None, "local", "kubernetes"):
            raise ValueError(f"runner is {runner!r}; it must be 'local' or 'kubernetes'")
        if gpu not in (None, *VENDORS):
            known = " or ".join(map(repr, VENDORS))
            raise ValueError(f"gpu is {gpu!r}; it must be {known}, or None for no GPU")
        if gpu_count < 1:
            raise ValueError(f"gpu_count is {gpu_count}; a pod with a GPU has at least one")
        if min_workers is not None and queue_name is None:
            raise ValueError("min_workers needs queue_name: without a queue, pods start singly")
        if deferrable is None:
            deferrable = conf.getboolean("operators", "default_deferrable", fallback=False)
        kwargs.setdefault("termination_message_policy", "FallbackToLogsOnError")
        super().__init__(
            deferrable=deferrable,
            wait_until_job_complete=True,
            poll_interval=poll_interval,
            do_xcom_push=do_xcom_push,
            random_name_suffix=False,
            **kwargs,
        )
        check_grace("termination_grace_period", self.termination_grace_period)
        self.has_node_selector = kwargs.get("node_selector") is not None
        self.runner: Runner = runner or ("kubernetes" if gpu else "local")
        self.gpu, self.gpu_count, self.gpu_resource = gpu, gpu_count, gpu_resource
        self.resource_claims = resource_claims or {}
        self.cpu, self.memory, self.shm_size = cpu, memory, shm_size
        self.model_claim, self.cache_claim = model_claim, cache_claim
        self.session_token_outlives_task = session_token_outlives_task
        self.secret_names = tuple(secret_names)
        self.queue_name, self.min_workers = queue_name, min_workers
        self.max_restarts = max_restarts
        self.queue_timeout, self.start_timeout = queue_timeout, start_timeout
        self.stuck_timeout, self.api_timeout = stuck_timeout, api_timeout

    # For subclasses

    @abstractmethod
    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        """The arguments of `batchllm` in a pod; `ValueError` if the pod is unfit for them."""

    def num_pods(self) -> int:
        return 1

    def stage_labels(self) -> dict[str, str]:
        return {}

    # The request

    def build_pod_request_obj(
        self, context: Context | None = None, *, dry_run: bool = False
    ) -> k8s.V1Pod:
        """Our defaults, the user's templates over them, single arguments over both."""
        return built_pod(self, pod_of(self)[0], context, dry_run=dry_run)

    def request(
        self, context: Context, attempt: Attempt, secret_keys: Sequence[str]
    ) -> dict[str, Any]:
        """The Job to create, whose Secret has such keys; `AirflowFailException` if it is unfit."""
        name = self.job_name(context, attempt)
        labels = {
            **self.labels,
            "app.kubernetes.io/name": "batchllm",
            "app.kubernetes.io/component": self.component,
            "app.kubernetes.io/managed-by": "airflow",
            **{key: make_safe_label_value(text) for key, text in self.stage_labels().items()},
            **attempt.labels,
        }
        try:
            pod, num_gpus = pod_of(self)
            main, deadline_s = main_container(pod), pod["spec"].pop("activeDeadlineSeconds", None)
            grace_s = int(pod["spec"]["terminationGracePeriodSeconds"])
            arguments = self.pod_command(context, grace_s, num_gpus)
            main |= {"command": ["batchllm"], "args": [escaped(text) for text in arguments]}
            secret = [  # wins over plain variables, and over whole Secrets
                {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
                for key in secret_keys
            ]
            main["env"] = merged(main["env"], secret, "env")
            built = plain(built_pod(self, pod, context, name=name, labels=labels))
        except ValueError as error:
            raise AirflowFailException(str(error)) from error
        built["metadata"].pop("name", None)  # which a hook may have changed
        namespace = built["metadata"].pop("namespace")
        metadata = {"name": name, "namespace": namespace, **self._metadata(attempt)}
        metadata["labels"] = built["metadata"]["labels"] | metadata["labels"]
        num_pods = self.num_pods()
        spec = {
            "completions": num_pods,
            "parallelism": num_pods,
            "activeDeadlineSeconds": self.active_deadline_seconds,
            "ttlSecondsAfterFinished": self.ttl_seconds_after_finished,
            "backoffLimit": self.backoff_limit,
            "suspend": self.suspend if self.queue_name is None else True,
            "template": {"metadata": built["metadata"], "spec": built["spec"]},
        }
        body = self._default_body(deadline_s)
        for template in job_templates(self):
            of_job = {n: v for n, v in (template.get("spec") or {}).items() if n != "template"}
            body = merged(body, {"metadata": template.get("metadata"), "spec": of_job})
        return dict(merged(body, {"metadata": metadata, "spec": spec}))

    def _metadata(self, attempt: Attempt) -> dict[str, Any]:
        """What the Job has and its pods don't."""
        num_pods, annotations = self.num_pods(), dict(self.annotations)
        labels = attempt.try_label | {f"{LABEL}/num-pods": str(num_pods)}
        if self.queue_name is not None:
            labels[QUEUE] = self.queue_name
        if self.min_workers is not None and self.min_workers < num_pods:  # Kueue refuses others
            annotations |= {_MIN_PODS: str(self.min_workers), _EQUAL_PODS: "true"}
        return {"labels": labels, "annotations": annotations}

    def _default_body(self, deadline_s: int | None) -> dict[str, Any]:
        """Which failures the Job's controller answers is here, and nowhere else."""
        codes = [int(code) for code in FINAL_EXIT_CODES]
        final = {"containerName": self.base_container_name, "operator": "In", "values": codes}
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        rules = [
            {"action": "FailJob", "onExitCodes": final},
            {"action": "Ignore", "onPodConditions": [disrupted]},
        ]
        spec = {
            "completionMode": "Indexed",
            "backoffLimitPerIndex": self.max_restarts,
            "podFailurePolicy": {"rules": rules},
            "podReplacementPolicy": "Failed",
            "activeDeadlineSeconds": deadline_s or _DAY_S,
            "ttlSecondsAfterFinished": _DAY_S,
        }
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": spec}

    @staticmethod
    def job_name(context: Context, attempt: Attempt) -> str:
        """Of DAG and task, which stay what they are when a spec is renamed."""
        ti = context["ti"]
        return attempt.job_name(f"{ti.dag_id}-{ti.task_id.rpartition('.')[2]}")
