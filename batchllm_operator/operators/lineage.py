"""What tasks tell OpenLineage, once Airflow's provider for it asks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage


class WithLineage(BaseOperator):
    """A task whose command says which tables it has read and written, once it has ended.

    The provider takes a failed task's lineage from `get_openlineage_facets_on_complete`, too.
    """

    _result: Mapping[str, Any]
    """See `BatchLLMCommandOperator`."""

    def known_tables(self) -> dict[str, Any]:
        """As `lineage` in a command's result, what is known before the command has run."""
        return {}

    def get_openlineage_facets_on_start(self) -> "OperatorLineage[Any, Any]":
        from batchllm_operator.operators.openlineage import lineage

        return lineage(self.known_tables(), {})

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> "OperatorLineage[Any, Any]":
        from batchllm_operator.operators.openlineage import lineage

        return lineage(self._result.get("lineage") or self.known_tables(), self._result)
