"""A scheduler for vLLM that follows the plan (paper, Sec. 4.3)."""
