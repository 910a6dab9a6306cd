"""The owner of a pod, in its labels and its name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

LABEL: Final = "batchllm.io"
_MAX_NAME: Final = 63  # a pod's name is its host name too


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a task: its owner, which all tries share, and its pod's work."""

    owner: str
    """Digest of output table, DAG, run, task and map index."""
    work: str
    """Digest of the pod's work, which may change when the task is cleared."""
    try_number: int
    try_id: str
    """Airflow's id of the try, a UUID of version 7: the later the try, the greater."""

    @classmethod
    def of(cls, ti: Any, table_uri: str, work: str) -> Attempt:
        """For a task instance and its `work`.

        The table distinguishes Airflows that share a namespace, and names of DAGs and runs.
        """
        owner = (table_uri, ti.dag_id, ti.run_id, ti.task_id, str(ti.map_index))
        return cls(_digest("\0".join(owner)), _digest(work), int(ti.try_number), str(ti.id))

    @property
    def labels(self) -> dict[str, str]:
        return {
            f"{LABEL}/attempt": self.owner,
            f"{LABEL}/work": self.work,
            f"{LABEL}/try": str(self.try_number),
            f"{LABEL}/try-id": self.try_id,
        }

    @property
    def selector(self) -> str:
        return f"{LABEL}/attempt={self.owner}"

    def pod_name(self, stem: str, ordinal: int) -> str:
        """The same for all tries: the API refuses one of two that create a pod at once.

        A higher ordinal is needed while an ended pod keeps its name, because the user keeps it or a
        finalizer does.
        """
        suffix = f"-{self.owner}-{ordinal}"
        stem = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
        return stem[: _MAX_NAME - len(suffix)].rstrip("-") + suffix

    def is_before(self, labels: Mapping[str, str]) -> bool:
        """Whether a pod with these labels was made or taken up by a later try."""
        return labels.get(f"{LABEL}/try-id", "") > self.try_id


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
