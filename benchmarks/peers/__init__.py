"""Our jobs beside other ways to run a table through the same vLLM."""
