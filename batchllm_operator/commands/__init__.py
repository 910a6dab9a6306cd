"""One file per command of `batchllm`: its arguments, and what it prints."""
