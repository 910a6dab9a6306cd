"""The plan stage: a partition of the input table becomes a persisted plan."""
