"""Deprecated: `run_shard` is in `batchllm_operator` itself."""

import warnings

from batchllm_operator import run_shard as run_shard

warnings.warn(
    "batchllm_operator.pipeline.run goes with the next release: use"
    " `from batchllm_operator import run_shard`",
    DeprecationWarning,
    stacklevel=2,
)
