"""The real schedulers without a model: how a job would run on a GPU that isn't there."""
