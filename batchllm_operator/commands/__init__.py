"""One file per command of `batchllm`: its arguments, and what it prints.

Heavy imports wait until a command runs, so that `--help` answers at once.
"""
