"""The prefixes that prompts share: a tree, built from prompts in memory or on disk."""
