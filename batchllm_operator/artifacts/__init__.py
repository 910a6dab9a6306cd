"""What stages leave in the lake under `_batchllm/`, and in which form: the only room that knows."""
