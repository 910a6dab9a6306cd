"""Plugins for vLLM: a scheduler that knows the plan."""
