"""The plugin that shows BatchLLM's pages, where the package isn't installed; see README.md."""

from importlib.metadata import entry_points

if not entry_points(group="airflow.plugins", name="batchllm"):  # else Airflow has it already
    from batchllm_operator.web.plugin import BatchLLMPlugin

    __all__ = ["BatchLLMPlugin"]
