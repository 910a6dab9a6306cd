"""Pods that run a stage: their specification, how they are watched, and how they end."""
