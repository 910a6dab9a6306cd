"""The stages of a job: plan, run, commit. Each reads what the one before it persisted."""
