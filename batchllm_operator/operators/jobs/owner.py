"""The owner of a Job, in its name and its labels, and what each process has to know of the Job."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

LABEL: Final = "batchllm.io"
NUM_PODS: Final = f"{LABEL}/num-pods"  # label of a Job: how many pods it is to have
QUEUE: Final = "kueue.x-k8s.io/queue-name"  # Kueue's label of a Job that it admits
_MAX_NAME: Final = 56  # a pod's host name, of 63 at most, is the Job's name, a dash and an index


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a task: its owner, which all tries share, and its Job's name and work."""

    owner: str  # digest of output table, DAG, run, task and map index
    work: str  # digest of the Job's work, which may change when the task is cleared
    try_id: str  # Airflow's id of the try, a UUID of version 7: the later the try, the greater
    name: str  # the same for all tries: the API refuses the second of two that create the Job

    @classmethod
    def of(cls, ti: Any, table_uri: str, work: str) -> Attempt:
        """The table distinguishes Airflows that share a namespace, and names of DAGs and runs.

        DAG and task are in the name, since they stay what they are when a spec is renamed.
        """
        owner = _digest("\0".join((table_uri, ti.dag_id, ti.run_id, ti.task_id, str(ti.map_index))))
        stem = f"batchllm-{ti.dag_id}-{ti.task_id.rpartition('.')[2]}".lower()
        stem = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[: _MAX_NAME - len(owner) - 1]
        return cls(owner, _digest(work), str(ti.id), f"{stem.rstrip('-')}-{owner}")

    @property
    def labels(self) -> dict[str, str]:
        return {f"{LABEL}/attempt": self.owner, f"{LABEL}/work": self.work}

    @property
    def try_label(self) -> dict[str, str]:
        """Of the Job alone: a try that adopts it writes its own."""
        return {f"{LABEL}/try-id": self.try_id}

    def owns(self, labels: Mapping[str, str] | None) -> bool:
        """Whether a Job with these labels was made by a try of this task."""
        return (labels or {}).get(f"{LABEL}/attempt") == self.owner

    def is_before(self, labels: Mapping[str, str] | None) -> bool:
        """Whether a Job with these labels was made or adopted by a later try."""
        return (labels or {}).get(f"{LABEL}/try-id", "") > self.try_id


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedJob(Attempt):
    """A try's Job, its cluster, and the limits of its watch in seconds; JSON-serializable."""

    kubernetes_conn_id: str | None  # this and the next three say how to reach the cluster, as for
    in_cluster: bool | None  # the operator; each process reads its own credentials
    cluster_context: str | None
    config_file: str | None  # path of the kubeconfig, which the triggerer must be able to read, too
    namespace: str
    uid: str = ""  # another Job of the name isn't meant; empty until it is known
    container_name: str  # the main container of its pods
    queue_s: float  # while no pod has a node, or may be created
    start_s: float  # from a pod's having a node until its main container runs, while no other runs
    stuck_s: float  # as `start_s`, once it fails to pull an image or to find a Secret
    api_s: float  # without an answer from the API
    poll_s: float
    pause_s: float | None = None  # until the watch pauses. None if it never does
    deadline: str | None = None  # when the task's `execution_timeout` is reached, in ISO format
    lake_conn_id: str | None = None  # its secrets are masked in what pods say, as the next one's
    connection_env: dict[str, str] = field(default_factory=dict)
    before: dict[str, Any] | None = None  # how the last watch has paused: a `JobEnd`


def job_of(plan_uri: str) -> str:
    """The job's name in a plan's URI, .../<job>/<ds>/plan-<id>."""
    return ("", "", *plan_uri.rstrip("/").split("/"))[-3] or "job"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
