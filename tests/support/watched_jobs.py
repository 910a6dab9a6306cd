"""Jobs as tries know them."""

from typing import Any

from batchllm_operator.operators.jobs.owner import Attempt, WatchedJob

EARLIER, LATER = (Attempt("owner", "work", try_id, "job") for try_id in ("1", "2"))


def watched_job(**changes: Any) -> WatchedJob:
    """The earlier try's, with the operators' limits and what else a test says."""
    fields: dict[str, Any] = dict.fromkeys(("kubernetes_conn_id", "cluster_context", "config_file"))
    fields |= {"owner": "owner", "work": "work", "try_id": "1", "name": "job", "namespace": "ns"}
    fields |= {"in_cluster": False, "container_name": "base", "poll_s": 10.0, "api_s": 900.0}
    fields |= {"queue_s": 6 * 3600, "start_s": 1800, "stuck_s": 600}
    return WatchedJob(**(fields | changes))
