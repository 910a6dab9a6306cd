"""What a job did, in numbers: counted at commit, printed on demand."""

from batchllm_operator.report.plan_summary import format_plan
from batchllm_operator.report.run_report import RunReport, SampleRow
from batchllm_operator.report.summary import format_summary

__all__ = ["RunReport", "SampleRow", "format_plan", "format_summary"]
