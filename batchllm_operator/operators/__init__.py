"""Airflow operators for the stages of a job: `batchllm` commands, as child processes or in pods.

Only Airflow, the clients of Kubernetes, `spec` and `errors` may be imported here: Airflow parses
DAG files over and over, and its workers need neither the engine nor a GPU to do so.
"""

from batchllm_operator.operators.arrival import BatchLLMArrivalOperator, one_run_per_partition
from batchllm_operator.operators.commit import BatchLLMCommitOperator
from batchllm_operator.operators.generate import BatchLLMGenerateOperator
from batchllm_operator.operators.plan import BatchLLMPlanOperator
from batchllm_operator.operators.report import BatchLLMReportOperator
from batchllm_operator.operators.task_group import batchllm_task_group

__all__ = [
    "BatchLLMArrivalOperator",
    "BatchLLMCommitOperator",
    "BatchLLMGenerateOperator",
    "BatchLLMPlanOperator",
    "BatchLLMReportOperator",
    "batchllm_task_group",
    "one_run_per_partition",
]
