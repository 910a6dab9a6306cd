"""Simulates a job on a GPU with the real schedulers and without a model."""
