"""Prefix-shared attention as a backend of vLLM."""
