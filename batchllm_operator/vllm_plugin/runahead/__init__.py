"""KV-Runahead as a KV connector of vLLM: a prefix that replicas compute together."""
