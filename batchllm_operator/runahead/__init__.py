"""KV-Runahead: several replicas compute one long prefix together (ADR 23, 24)."""
