"""Operators that plan on Spark."""
