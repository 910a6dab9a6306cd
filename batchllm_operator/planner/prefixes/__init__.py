"""The prefixes that prompts share: a tree, built in memory or by an external sort."""
