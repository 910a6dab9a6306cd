"""Pods that run a stage: what they look like, how they are watched, how they ended."""
