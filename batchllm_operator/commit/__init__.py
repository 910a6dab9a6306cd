"""The commit stage: output parts become one published partition, and its report."""
