"""Checks of the Helm chart, with Python packages only: no helm binary, no cluster, no network.

PYTHONPATH=scripts python -m helm_chart check     exit 1 and say why, unless everything holds
PYTHONPATH=scripts python -m helm_chart readme    write the table of values in the chart's README
"""
