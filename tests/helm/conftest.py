"""Fixtures of the chart's tests."""

from support.kubernetes.fixtures import cluster, kubernetes_backend

__all__ = ["cluster", "kubernetes_backend"]
