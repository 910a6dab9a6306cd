"""The plugin that shows BatchLLM's pages in Airflow; see README.md beside this file."""

from batchllm_operator.report.web.plugin import BatchLLMPlugin

__all__ = ["BatchLLMPlugin"]
