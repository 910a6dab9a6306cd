"""Several engines behind the engine protocol, each in a process of its own (ADR 26)."""
