"""Deprecated: `plan_job` is in `batchllm_operator` itself."""

import warnings

from batchllm_operator import plan_job as plan_job

warnings.warn(
    "batchllm_operator.pipeline.plan goes with the next release: use"
    " `from batchllm_operator import plan_job`",
    DeprecationWarning,
    stacklevel=2,
)
