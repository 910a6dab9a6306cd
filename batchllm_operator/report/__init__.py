"""What a job will do and did, in numbers, and how they are printed."""

from batchllm_operator.report.advice import Advice, Alternative, format_advice
from batchllm_operator.report.plan_summary import format_plan
from batchllm_operator.report.run_report import RunReport, SampleRow
from batchllm_operator.report.shard_progress import ShardProgress
from batchllm_operator.report.status import JobStatus, ShardStatus
from batchllm_operator.report.status_table import format_status, format_totals
from batchllm_operator.report.summary import format_summary

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
]
