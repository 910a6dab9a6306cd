"""The base of operators that may run in a Kubernetes Job: their arguments, and the Job's body."""

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal

from airflow.providers.cncf.kubernetes.operators.job import KubernetesJobOperator
from airflow.providers.cncf.kubernetes.pod_generator import make_safe_label_value
from airflow.providers.common.compat.sdk import AirflowFailException, conf
from airflow.sdk import Context
from kubernetes.client import models as k8s

from batchllm_operator.errors import FINAL_EXIT_CODES
from batchllm_operator.operators.command import BatchLLMCommandOperator
from batchllm_operator.operators.jobs import pod as pods
from batchllm_operator.operators.jobs.owner import NUM_PODS, QUEUE, Attempt
from batchllm_operator.operators.jobs.pod import GpuVendor, check_grace, merged, plain

Runner = Literal["local", "kubernetes"]

_MIN_PODS: Final = "kueue.x-k8s.io/job-min-parallelism"
_EQUAL_PODS: Final = "kueue.x-k8s.io/job-completions-equal-parallelism"
_REFUSED: Final = frozenset(
    """
    arguments base_container_status_polling_interval callbacks cmds completion_mode completions
    container_logs container_name_log_prefix_enabled discover_pods_retry_number durable get_logs
    init_container_logs is_delete_operator_pod job_poll_interval log_events_on_failure
    log_events_on_startup log_formatter log_pod_spec_on_failure logging_interval manual_selector
    name on_kill_action on_kill_propagation_policy parallelism progress_callback random_name_suffix
    reattach_on_restart schedule_timeout_seconds selector skip_on_exit_code
    startup_check_interval_seconds startup_timeout_seconds trigger_kwargs unwrap_single
    wait_until_job_complete xcom_sidecar_container_security_context
    """.split()  # noqa: SIM905
)
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
        gpu_resource: what pods ask for, such as `nvidia.com/mig-3g.40gb`; by default the vendor's
            whole GPUs (templated).
        resource_claims: in its place, resource claims: names, each with a ResourceClaimTemplate.
        cpu: a pod's CPU request. An argument wins over the template, the template over the default
            (`pod.yaml`); so for `memory` (request and limit) and `shm_size` (of its /dev/shm).
        model_claim: PersistentVolumeClaim that holds models, mounted at /models (`HF_HOME`).
        cache_claim: PersistentVolumeClaim for compiled kernels, mounted at /cache.
        session_token_outlives_task: whether a session token from a connection is valid for longer
            than a Job may run. Otherwise a Job gets none, as it couldn't renew it.
        secret_names: Secrets of the namespace whose keys become variables in the pods.
        queue_name: Kueue's LocalQueue (templated): the Job is suspended until it is admitted.
        min_workers: pods with which Kueue may admit a Job of more, if it can't have all.
        max_restarts: pods that each worker may lose by a failure of its own, not by the cluster's.
        queue_timeout: how long no pod of the Job may find a node, or room in a quota or queue.
        start_timeout: how long a pod may take from having a node to running, while no other runs;
            `stuck_timeout` once its image can't be pulled, or a Secret is missing.
        api_timeout: how long the cluster's API may fail to answer.
        poll_interval: seconds between two reads of the Job.
        deferrable: whether the triggerer watches the Job, and the worker's slot is free meanwhile;
            by default as Airflow's `[operators] default_deferrable` says.
        termination_grace_period: seconds for a pod's open parts when it is asked to stop; by
            default as in the template, or 330.
        kwargs: `BatchLLMCommandOperator`'s and `KubernetesJobOperator`'s; by default `image` is
            this release's, `active_deadline_seconds` and `ttl_seconds_after_finished` a day.
            Templates of a Job or a pod win over the defaults, single arguments over those, and
            `pod_mutation_hook` has the last word. Arguments without effect here are refused, as
            those that are out of their range (`ValueError`).
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
        deferrable: bool | None = None,
        **kwargs: Any,
    ) -> None:
        for name in kwargs.keys() & _REFUSED:
            raise ValueError(
                f"{name} can't be set: the operator itself names the Job, and says what its pods"
                " run, how many there are (num_workers), and how they are awaited and logged (see"
                " queue_timeout, start_timeout, stuck_timeout, poll_interval)"
            )
        if memory is not None and kwargs.get("container_resources") is not None:
            raise ValueError("give memory or container_resources, not both")
        if isinstance(secret_names, str):
            raise ValueError("secret_names must be a list of names")
        if runner not in (None, "local", "kubernetes"):
            raise ValueError(f"runner is {runner!r}; it must be 'local' or 'kubernetes'")
        if gpu not in (None, *pods.VENDORS):
            known = " or ".join(map(repr, pods.VENDORS))
            raise ValueError(f"gpu is {gpu!r}; it must be {known}, or None for no GPU")
        if gpu_count < 1:
            raise ValueError(f"gpu_count is {gpu_count}; a pod with a GPU has at least one")
        if min_workers is not None and queue_name is None:
            raise ValueError("min_workers needs queue_name: without a queue, pods start singly")
        if deferrable is None:
            deferrable = conf.getboolean("operators", "default_deferrable", fallback=False)
        ours = {"termination_message_policy": "FallbackToLogsOnError", "poll_interval": 10.0}
        ours |= {"do_xcom_push": True, "deferrable": deferrable, "random_name_suffix": False}
        super().__init__(**{**ours, **kwargs}, wait_until_job_complete=True)
        check_grace(self.termination_grace_period)
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

    @abstractmethod
    def identity(self) -> tuple[str, str, dict[str, str]]:
        """The job's output table, a text that identifies the Job's work, and labels of it."""

    @abstractmethod
    def command(self, context: Context) -> list[str]:
        """The arguments of `batchllm` that do the work in the worker."""

    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        """Those that do it in a pod; `ValueError` if the pod is unfit for them."""
        return self.command(context)

    def num_pods(self) -> int:
        return 1

    def build_pod_request_obj(
        self, context: Context | None = None, *, dry_run: bool = False
    ) -> k8s.V1Pod:
        """Our defaults, the user's templates over them, single arguments over both."""
        return pods.built_pod(self, pods.pod_of(self)[0], context, dry_run=dry_run)

    def _attempt(self, context: Context) -> Attempt:
        return Attempt.of(context["ti"], *self.identity()[:2])

    def request(self, context: Context, secret_keys: Sequence[str]) -> dict[str, Any]:
        """The Job to create, whose Secret has such keys; `AirflowFailException` if it is unfit."""
        attempt = self._attempt(context)
        of_app = {"name": "batchllm", "component": self.component, "managed-by": "airflow"}
        labels = {
            **self.labels,
            **{f"app.kubernetes.io/{key}": text for key, text in of_app.items()},
            **{key: make_safe_label_value(text) for key, text in self.identity()[2].items()},
            **attempt.labels,
        }
        try:
            pod, num_gpus = pods.pod_of(self)
            body = self._default_body(pod["spec"].pop("activeDeadlineSeconds", None))
            main = pods.main_container(pod)
            grace_s = int(pod["spec"]["terminationGracePeriodSeconds"])
            arguments = self.pod_command(context, grace_s, num_gpus)
            main |= {"command": ["batchllm"], "args": [pods.escaped(text) for text in arguments]}
            secret = [  # wins over plain variables, and over whole Secrets
                {"name": key, "valueFrom": {"secretKeyRef": {"name": attempt.name, "key": key}}}
                for key in secret_keys
            ]
            main["env"] = merged(main["env"], secret, "env")
            built = plain(pods.built_pod(self, pod, context, name=attempt.name, labels=labels))
        except ValueError as error:
            raise AirflowFailException(str(error)) from error
        built["metadata"].pop("name", None)  # which a hook may have changed
        metadata = {"name": attempt.name, "namespace": built["metadata"].pop("namespace")}
        metadata |= self._metadata(attempt, built["metadata"]["labels"])
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
        return dict(merged(body, {"metadata": metadata, "spec": spec}))

    def _metadata(self, attempt: Attempt, of_pods: Mapping[str, str]) -> dict[str, Any]:
        num_pods, annotations = self.num_pods(), dict(self.annotations)
        labels = {**of_pods, **attempt.try_label, NUM_PODS: str(num_pods)}
        if self.queue_name is not None:
            labels[QUEUE] = self.queue_name
        if self.min_workers is not None and self.min_workers < num_pods:  # Kueue refuses others
            annotations |= {_MIN_PODS: str(self.min_workers), _EQUAL_PODS: "true"}
        return {"labels": labels, "annotations": annotations}

    def _default_body(self, deadline_s: int | None) -> dict[str, Any]:
        """The Job of `pod.yaml`, and the user's templates over it."""
        body: dict[str, Any] = copy.deepcopy(pods.JOB)
        failing = body["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]
        failing["containerName"] = self.base_container_name
        failing["values"] = [int(code) for code in FINAL_EXIT_CODES]
        limits = {"backoffLimitPerIndex": self.max_restarts, "activeDeadlineSeconds": deadline_s}
        for template in ({"spec": limits}, *pods.job_templates(self)):
            of_job = {n: v for n, v in (template.get("spec") or {}).items() if n != "template"}
            body = merged(body, {"metadata": template.get("metadata"), "spec": of_job})
        return body


def number_of_workers(rendered: Any, *, at_least: int = 0) -> int:
    """What `num_workers` has rendered to; `AirflowFailException` if to no number, or too low."""
    with suppress(ValueError):
        if (number := max(0, int(str(rendered)))) >= at_least:
            return number
    text = f"num_workers is {rendered!r}; it must be an integer from 1, so its template needs a"
    raise AirflowFailException(f"{text} default, such as {{{{ var.value.get('workers', 1) }}}}")
