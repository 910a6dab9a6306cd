"""Fixtures of the chart's tests."""

from support.kubernetes.cluster import cluster, kubernetes_backend

__all__ = ["cluster", "kubernetes_backend"]
