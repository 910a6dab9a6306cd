"""Attention kernels for batches of prompts that share prefixes. Depends on torch only."""
