"""vLLM behind the engine protocol; no other file of `engine/` imports vLLM."""
