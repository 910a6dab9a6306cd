"""Delta tables (ADR 18)."""
