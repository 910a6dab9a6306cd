"""Airflow operators for the stages of a job: `batchllm` commands, as child processes or in pods.

Only Airflow, the clients of Kubernetes, `spec` and `errors` may be imported here: Airflow parses
DAG files continually, on machines without engine or GPU.
"""

from batchllm_operator.operators.arrival import BatchLLMArrivalOperator as BatchLLMArrivalOperator
from batchllm_operator.operators.arrival import one_run_per_partition as one_run_per_partition
from batchllm_operator.operators.assets import input_asset as input_asset
from batchllm_operator.operators.assets import table_asset as table_asset
from batchllm_operator.operators.command import BatchLLMReportOperator as BatchLLMReportOperator
from batchllm_operator.operators.stages import BatchLLMCommitOperator as BatchLLMCommitOperator
from batchllm_operator.operators.stages import (
    BatchLLMGenerateOperator as BatchLLMGenerateOperator,
)
from batchllm_operator.operators.stages import BatchLLMPlanOperator as BatchLLMPlanOperator
from batchllm_operator.operators.task_group import batchllm_task_group as batchllm_task_group
