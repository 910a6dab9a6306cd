"""Texts, tables and pages about plans and runs."""

from batchllm_operator.report.status_table import format_status as format_status
from batchllm_operator.report.status_table import format_totals as format_totals
from batchllm_operator.report.summary import format_plan as format_plan
from batchllm_operator.report.summary import format_summary as format_summary
from batchllm_operator.stored_plan.counts import share as share
