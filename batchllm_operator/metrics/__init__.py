"""How far a shard is, as Prometheus reads it."""

from batchllm_operator.metrics.address import ADDRESS_VARIABLE, MetricsAddress
from batchllm_operator.metrics.collector import ShardCollector
from batchllm_operator.metrics.endpoint import serving_metrics

__all__ = ["ADDRESS_VARIABLE", "MetricsAddress", "ShardCollector", "serving_metrics"]
