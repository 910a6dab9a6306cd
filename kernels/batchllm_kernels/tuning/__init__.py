"""Tunes an architecture's settings: candidates, timings, selection."""
