"""Deprecated: `commit_run` is in `batchllm_operator` itself."""

import warnings

from batchllm_operator import commit_run as commit_run

warnings.warn(
    "batchllm_operator.pipeline.commit goes with the next release: use"
    " `from batchllm_operator import commit_run`",
    DeprecationWarning,
    stacklevel=2,
)
