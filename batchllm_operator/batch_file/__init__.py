"""Batch files of OpenAI's API, answered as `vllm run-batch` does, by jobs over their prompts."""
