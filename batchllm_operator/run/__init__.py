"""The run stage: one shard of a plan becomes output parts."""
