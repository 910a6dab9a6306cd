"""What a job will do and did, in words, tables and pages."""

from batchllm_operator.report.advice import Advice, Alternative, format_advice
from batchllm_operator.report.plan_summary import format_plan
from batchllm_operator.report.status_table import format_status, format_totals
from batchllm_operator.report.summary import format_summary, share

__all__ = [
    "Advice",
    "Alternative",
    "format_advice",
    "format_plan",
    "format_status",
    "format_summary",
    "format_totals",
    "share",
]
