"""The paper's tables on a real device: stock vLLM against ours, whole runs."""
