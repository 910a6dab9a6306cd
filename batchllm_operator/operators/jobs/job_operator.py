"""The base of operators that may run in a Kubernetes Job: their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal

from airflow.providers.cncf.kubernetes.operators.job import KubernetesJobOperator
from airflow.providers.common.compat.sdk import conf

from batchllm_operator.operators.jobs.pod import GpuVendor, PodSettings

Runner = Literal["local", "kubernetes"]

_REFUSED: Final = {
    **dict.fromkeys(
        ("arguments", "cmds", "name", "random_name_suffix"),
        "the operator names the Job, and says what its pods run",
    ),
    **dict.fromkeys(
        ("completions", "parallelism", "completion_mode", "manual_selector", "selector"),
        "num_workers says how many pods there are",
    ),
    **dict.fromkeys(
        (
            *("base_container_status_polling_interval", "callbacks", "container_logs"),
            *("container_name_log_prefix_enabled", "discover_pods_retry_number", "durable"),
            *("get_logs", "init_container_logs", "is_delete_operator_pod", "job_poll_interval"),
            *("log_events_on_failure", "log_events_on_startup", "log_formatter"),
            *("log_pod_spec_on_failure", "logging_interval", "on_kill_action"),
            *("on_kill_propagation_policy", "progress_callback", "reattach_on_restart"),
            *("schedule_timeout_seconds", "skip_on_exit_code", "startup_check_interval_seconds"),
            *("startup_timeout_seconds", "trigger_kwargs", "unwrap_single"),
            *("wait_until_job_complete", "xcom_sidecar_container_security_context"),
        ),
        "how a Job is awaited and logged is this operator's own (see queue_timeout,"
        " start_timeout, stuck_timeout, poll_interval)",
    ),
}
"""Arguments of `KubernetesJobOperator` that would have no effect, or break this operator."""


class BatchLLMJobOperator(KubernetesJobOperator):
    """A `KubernetesJobOperator` with defaults for our pods.

    How it runs, and when it succeeds, is in `stage_operator.BatchLLMStageOperator`.

    Args:
        runner: `local` runs the command as a child process of the task, `kubernetes` in the pods of
            a Job. None: in a Job if a `gpu` is named, else as a child process.
        gpu: `nvidia` or `amd`: decides the pods' resource, node labels, taints, image and
            environment. None for no GPU.
        gpu_count: GPUs of a pod: `engine.replicas` times vLLM's tensor parallel size. Without
            `gpu`, it says how a template's GPUs are shared.
        gpu_resource: the resource by which pods ask for GPUs, such as `nvidia.com/mig-3g.40gb`; by
            default the vendor's whole ones.
        resource_claims: names of pods' resource claims, each with its ResourceClaimTemplate; in
            place of a GPU resource.
        image: container image (templated); by default `batchllm-cuda`, `batchllm-rocm` or
            `batchllm-airflow` with this release as its tag.
        cpu: a pod's CPU request, in Kubernetes' notation. An argument wins over the template, the
            template over the default (`pod.yaml`); so for the next two.
        memory: memory request and limit.
        shm_size: size of its /dev/shm.
        model_claim: PersistentVolumeClaim that holds models, mounted at /models (`HF_HOME`).
        cache_claim: PersistentVolumeClaim for compiled kernels, mounted at /cache.
        env: environment variables for the command (templated). Airflow stores and shows them:
            no place for secrets.
        aws_conn_id: Airflow connection of type `aws` (templated). The worker passes it on to
            its child process, or to a Secret that belongs to the Job.
        connection_env: environment variables that are fields of Airflow connections, in the
            same way; see `credentials.Credentials.of` (templated).
        session_token_outlives_task: whether a session token among those is valid for longer than
            a Job may run. Otherwise a Job gets none, as it couldn't renew it. A command in the
            worker always gets one, which each try reads again.
        secret_names: Secrets of the namespace whose keys become variables in the pods.
        queue_name: Kueue's LocalQueue: the Job is suspended until it is admitted.
        min_workers: pods with which Kueue may admit the Job if it can't have all. It has no effect
            on a Job that has no more than these.
        max_restarts: pods that each worker may lose by a failure of its own. Those that the cluster
            ends (eviction, preemption, a lost node) don't count: the Job controller replaces them.
        queue_timeout: how long no pod of the Job may find a node, or room in a quota or queue.
        start_timeout: how long a pod may take from having a node to running, including image
            pulls, while no other runs.
        stuck_timeout: as `start_timeout`, once pulling fails or a Secret is missing.
        api_timeout: how long the cluster's API may fail to answer.
        poll_interval: seconds between two reads of the Job.
        deferrable: whether the triggerer watches the Job, and the worker's slot is free meanwhile;
            by default as Airflow's `[operators] default_deferrable` says.
        active_deadline_seconds: how long the Job may take, with its waiting for nodes and quotas
            but not for a queue, before the cluster ends it; by default as in the template, or a
            day.
        ttl_seconds_after_finished: how long a Job that has ended stays if nothing removes it; by
            default a day.
        termination_grace_period: seconds that a pod gets to finish its open parts when it is
            asked to stop; by default as in the template, or 330.
        kill_grace_s: seconds that a command in the worker gets to stop.
        do_xcom_push: whether Airflow keeps the return value. There is no sidecar for it.
        kwargs: those of `KubernetesJobOperator`. Templates of a Job or a pod win over the defaults
            here, single arguments over those, and `pod_mutation_hook` has the last word. Arguments
            without effect here are refused.
    """

    template_fields: Sequence[str] = (
        *KubernetesJobOperator.template_fields,
        *("env", "aws_conn_id", "connection_env", "queue_name", "gpu_resource"),
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        "env_vars": "py",
        "env": "json",
        "connection_env": "json",
    }

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
        env: Mapping[str, str] | None = None,
        aws_conn_id: str | None = None,
        connection_env: Mapping[str, str] | None = None,
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
        termination_grace_period: int | None = None,
        kill_grace_s: float = 30.0,
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
        if min_workers is not None and queue_name is None:
            raise ValueError("min_workers needs queue_name: without a queue, pods start singly")
        if deferrable is None:
            deferrable = conf.getboolean("operators", "default_deferrable", fallback=False)
        self._has_node_selector = kwargs.get("node_selector") is not None
        kwargs.setdefault("termination_message_policy", "FallbackToLogsOnError")
        super().__init__(
            deferrable=deferrable,
            wait_until_job_complete=True,
            poll_interval=poll_interval,
            termination_grace_period=termination_grace_period,
            do_xcom_push=do_xcom_push,
            random_name_suffix=False,
            **kwargs,
        )
        self.runner: Runner = runner or ("kubernetes" if gpu else "local")
        self.gpu, self.gpu_count, self.gpu_resource = gpu, gpu_count, gpu_resource
        self.settings = PodSettings(
            gpu=gpu,
            gpu_count=gpu_count,
            gpu_resource=gpu_resource,
            resource_claims=resource_claims or {},
            cpu=cpu,
            memory=memory,
            shm_size=shm_size,
            model_claim=model_claim,
            cache_claim=cache_claim,
            secret_names=tuple(secret_names),
            grace_s=termination_grace_period,
        )
        self.env, self.aws_conn_id, self.connection_env = env, aws_conn_id, connection_env
        self.session_token_outlives_task = session_token_outlives_task
        self.queue_name, self.min_workers = queue_name, min_workers
        self.max_restarts = max_restarts
        self.queue_timeout, self.start_timeout = queue_timeout, start_timeout
        self.stuck_timeout, self.api_timeout = stuck_timeout, api_timeout
        self.kill_grace_s = kill_grace_s
