"""The commands of `batchllm`: their arguments, and what they print.

Heavy imports are inside functions, so that `--help` answers at once.
"""
