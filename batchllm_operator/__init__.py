"""Offline LLM jobs over data-lake tables, planned by their shared prefixes."""

__version__ = "0.1.0"
