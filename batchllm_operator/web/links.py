"""Addresses of the pages, and the link to the job's page on a generate task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode, urlsplit

from airflow.configuration import conf
from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator

    from batchllm_operator.web.runs import JobRef

PREFIX: Final = "/batchllm"
"""Mount point of the pages in Airflow's API server."""


@dataclass(frozen=True, slots=True)
class Links:
    """Addresses of all pages, below their mount point."""

    root: str
    """Path without a slash at its end, such as `/batchllm`."""

    def trail(self, ref: JobRef | None = None) -> tuple[tuple[str, str], ...]:
        """Text and address of the pages above that of a job's run, or above any other page."""
        jobs = ("Jobs", f"{self.root}/")
        return (jobs, (f"Run {ref.run_id}", self.run(ref.dag_id, ref.run_id))) if ref else (jobs,)

    def run(self, dag_id: str, run_id: str) -> str:
        return f"{self.root}/dags/{_quoted(dag_id)}/runs/{_quoted(run_id)}"

    def job(self, ref: JobRef) -> str:
        """A job in a DAG run: live progress, later its report."""
        place = f"jobs/{_quoted(ref.task_id)}/{ref.map_index}"
        return f"{self.run(ref.dag_id, ref.run_id)}/{place}"

    def comparison(self, before: JobRef, after: JobRef) -> str:
        return f"{self.root}/compare?{urlencode({'before': str(before), 'after': str(after)})}"

    def job_shard(self, ref: JobRef, shard_idx: int) -> str:
        return f"{self.job(ref)}/shards/{shard_idx}"

    def log(self, ref: JobRef, task: tuple[str, int]) -> str:
        """Airflow's own page of a task of the job's run, by id and map index: its log."""
        task_id, map_index = task
        run = f"/dags/{_quoted(ref.dag_id)}/runs/{_quoted(ref.run_id)}"
        mapped = f"/mapped/{map_index}" if map_index >= 0 else ""
        return f"{self.root.removesuffix(PREFIX)}{run}/tasks/{_quoted(task_id)}{mapped}"

    def task(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> str:
        return f"{self.run(dag_id, run_id)}/tasks/{_quoted(task_id)}/{map_index}"


class LiveProgressLink(BaseOperatorLink):
    """Links a generate task to its job's page, at any time.

    The link is the plugin's, because the API server itself computes those, each time. An operator's
    own link is an XCom that the task stores when it ends or defers; it would also be shown, and
    lead nowhere, where the plugin isn't installed.
    """

    @property
    def name(self) -> str:
        return "Live progress"

    @property
    def operators(self) -> list[type[BaseOperator]]:  # type: ignore[override]
        """Imported late, as it takes a second and only the API server needs it.

        Empty if the operators' providers aren't installed: Airflow calls this for every DAG.
        """
        try:
            from batchllm_operator.operators.stages import BatchLLMGenerateOperator
        except ImportError:
            return []

        return [BatchLLMGenerateOperator]

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        links = Links(pages_root())
        return links.task(ti_key.dag_id, ti_key.run_id, ti_key.task_id, ti_key.map_index)


def pages_root() -> str:
    """Path of the pages in a browser: Airflow may be below the host's root."""
    base_url = conf.get("api", "base_url", fallback="") or ""
    return urlsplit(base_url).path.rstrip("/") + PREFIX


def _quoted(text: str) -> str:
    return quote(text, safe="")
