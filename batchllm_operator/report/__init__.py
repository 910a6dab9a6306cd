"""What a job will do and did, in numbers, and how they are printed.

Names are imported when they are asked for: each process of Airflow imports `report.web.plugin`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchllm_operator.report.advice import Advice, Alternative, format_advice
    from batchllm_operator.report.plan_summary import format_plan
    from batchllm_operator.report.run_report import RunReport, SampleRow
    from batchllm_operator.report.shard_progress import ShardProgress
    from batchllm_operator.report.status import JobStatus, ShardStatus
    from batchllm_operator.report.status_table import format_status, format_totals
    from batchllm_operator.report.summary import format_summary, share

__all__ = [
    "Advice",
    "Alternative",
    "JobStatus",
    "RunReport",
    "SampleRow",
    "ShardProgress",
    "ShardStatus",
    "format_advice",
    "format_plan",
    "format_status",
    "format_summary",
    "format_totals",
    "share",
]

_MODULES = {
    "Advice": "advice",
    "Alternative": "advice",
    "JobStatus": "status",
    "RunReport": "run_report",
    "SampleRow": "run_report",
    "ShardProgress": "shard_progress",
    "ShardStatus": "status",
    "format_advice": "advice",
    "format_plan": "plan_summary",
    "format_status": "status_table",
    "format_summary": "summary",
    "format_totals": "status_table",
    "share": "summary",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
