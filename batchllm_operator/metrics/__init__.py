"""The progress of shards as Prometheus metrics."""

from batchllm_operator.metrics.collector import ShardCollector as ShardCollector
from batchllm_operator.metrics.endpoint import ADDRESS_VARIABLE as ADDRESS_VARIABLE
from batchllm_operator.metrics.endpoint import MetricsAddress as MetricsAddress
from batchllm_operator.metrics.endpoint import serving_metrics as serving_metrics
