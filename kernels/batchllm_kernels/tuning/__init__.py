"""Choosing an architecture's settings: what may be tried, how it is timed, what is kept."""
