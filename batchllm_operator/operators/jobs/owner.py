"""The owner of a Job, in its labels and its name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

LABEL: Final = "batchllm.io"
QUEUE: Final = "kueue.x-k8s.io/queue-name"  # Kueue's label of a Job that it admits
_MAX_NAME: Final = 56
"""A pod's host name is the Job's name, a dash and its index, of 63 characters at most."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a task: its owner, which all tries share, and its Job's work."""

    owner: str  # digest of output table, DAG, run, task and map index
    work: str  # digest of the Job's work, which may change when the task is cleared
    try_id: str  # Airflow's id of the try, a UUID of version 7: the later the try, the greater

    @classmethod
    def of(cls, ti: Any, table_uri: str, work: str) -> Attempt:
        """The table distinguishes Airflows that share a namespace, and names of DAGs and runs."""
        owner = (table_uri, ti.dag_id, ti.run_id, ti.task_id, str(ti.map_index))
        return cls(_digest("\0".join(owner)), _digest(work), str(ti.id))

    @property
    def labels(self) -> dict[str, str]:
        return {f"{LABEL}/attempt": self.owner, f"{LABEL}/work": self.work}

    @property
    def try_label(self) -> dict[str, str]:
        """Of the Job alone: a try that adopts it writes its own."""
        return {f"{LABEL}/try-id": self.try_id}

    def job_name(self, stem: str) -> str:
        """The same for all tries: the API refuses the second of two that create the Job."""
        stem = re.sub(r"[^a-z0-9]+", "-", f"batchllm-{stem}".lower()).strip("-")
        return f"{stem[: _MAX_NAME - len(self.owner) - 1].rstrip('-')}-{self.owner}"

    def owns(self, labels: Mapping[str, str] | None) -> bool:
        """Whether a Job with these labels was made by a try of this task."""
        return (labels or {}).get(f"{LABEL}/attempt") == self.owner

    def is_before(self, labels: Mapping[str, str] | None) -> bool:
        """Whether a Job with these labels was made or adopted by a later try."""
        return (labels or {}).get(f"{LABEL}/try-id", "") > self.try_id


def job_of(plan_uri: str) -> str:
    """The job's name in a plan's URI, .../<job>/<ds>/plan-<id>."""
    return ("", "", *plan_uri.rstrip("/").split("/"))[-3] or "job"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
