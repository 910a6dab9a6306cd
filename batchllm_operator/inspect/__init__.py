"""Checks, simulations and the clean-up of plans."""
