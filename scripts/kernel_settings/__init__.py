"""The kernel's settings: their search on a chip, and what compiled kernels may take of each chip.

PYTHONPATH=scripts python -m kernel_settings.tune       on the chip: writes its settings
PYTHONPATH=scripts python -m kernel_settings.compile    anywhere: exit 1 if a kernel must not ship
"""
