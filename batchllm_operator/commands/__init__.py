"""One file per command of `batchllm`: its arguments and its output.

Heavy imports are inside functions, so that `--help` answers at once.
"""
