"""Builds the prefix tree of prompts in memory or on disk."""
