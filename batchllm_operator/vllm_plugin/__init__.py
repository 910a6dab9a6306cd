"""Plugins for vLLM: the planned scheduler, prefix-shared attention, KV-Runahead."""
