"""What tasks tell OpenLineage: tables, their versions and columns, and the figures of the run.

Airflow's provider for OpenLineage asks a task for it; without the provider nothing does.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from airflow.sdk import BaseOperator

from batchllm_operator.operators.assets import dataset_name

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.event_v2 import InputDataset, OutputDataset
    from openlineage.client.facet_v2 import (
        DatasetFacet,
        column_lineage_dataset,
        data_quality_assertions_dataset,
    )

FACET: Final = "batchllm_job"
"""Name of the facet of a run with its figures."""
_FIGURES: Final = (
    *("plan_uri", "report_uri", "num_rows", "num_rows_in", "num_rows_out", "num_failed_rows"),
    *("num_rejected_rows", "num_reused_rows", "num_requests", "num_shards", "num_logical_tokens"),
    *("num_computed_tokens", "num_cached_tokens", "num_output_tokens", "num_saved_tokens"),
    *("planned_saving_ratio", "achieved_saving_ratio", "engine_s", "gpu_s", "cost_usd"),
    *("predicted_gpu_s", "predicted_cost_usd", "predicted_saved_cost_usd"),
)


class WithLineage(BaseOperator):
    """A task whose command says which tables it has read and written, once it has ended.

    The provider takes a failed task's lineage from `get_openlineage_facets_on_complete`, too.
    """

    _result: Mapping[str, Any] = {}

    def known_tables(self) -> dict[str, Any]:
        """As `lineage` in a command's result, what is known before the command has run."""
        return {}

    def get_openlineage_facets_on_start(self) -> "OperatorLineage[Any, Any]":
        return _lineage(self.known_tables(), {})

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> "OperatorLineage[Any, Any]":
        tables = self._result.get("lineage") or self.known_tables()
        tables = {**tables, "expectations": self._result.get("expectations") or ()}
        return _lineage(tables, {n: self._result[n] for n in _FIGURES if n in self._result})


def _lineage(tables: Mapping[str, Any], figures: Mapping[str, Any]) -> "OperatorLineage[Any, Any]":
    """Lineage from what a command says; see `stored_plan.lineage.Lineage`."""
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.facet_v2 import RunFacet

    facets = {FACET: RunFacet().with_additional_properties(**figures)} if figures else {}
    inputs = [_input(tables["input"])] if "input" in tables else []
    outputs = [_output(tables)] if "output" in tables else []
    return OperatorLineage(inputs=inputs, outputs=outputs, run_facets=facets)


def _input(table: Mapping[str, Any]) -> "InputDataset":
    from openlineage.client.event_v2 import InputDataset
    from openlineage.client.facet_v2 import input_statistics_input_dataset as statistics

    rows = table.get("num_rows")
    counts = statistics.InputStatisticsInputDatasetFacet(rowCount=rows)
    about: dict[str, Any] = {} if rows is None else {"inputStatistics": counts}
    return InputDataset(*dataset_name(table["uri"]), inputFacets=about, facets=dict(_facets(table)))


def _output(tables: Mapping[str, Any]) -> "OutputDataset":
    from openlineage.client.event_v2 import OutputDataset
    from openlineage.client.facet_v2 import column_lineage_dataset as columns
    from openlineage.client.facet_v2 import data_quality_assertions_dataset as quality
    from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

    table, source = tables["output"], dataset_name(tables["input"]["uri"])
    counts = statistics.OutputStatisticsOutputDatasetFacet(
        rowCount=table["num_rows"], size=table["num_bytes"], fileCount=table["num_files"]
    )
    sources = {name: _made_of(source, [each], "IDENTITY") for name, each in tables["kept"].items()}
    for name, names in tables["answers"].items():
        sources[name] = _made_of(source, names, "TRANSFORMATION")
    facets: dict[str, Any] = {
        **dict(_facets(table)),
        "columnLineage": columns.ColumnLineageDatasetFacet(sources),
    }
    if assertions := [_assertion(each) for each in tables["expectations"]]:
        facets["dataQualityAssertions"] = quality.DataQualityAssertionsDatasetFacet(assertions)
    about: dict[str, Any] = {"outputStatistics": counts}
    return OutputDataset(*dataset_name(table["uri"]), outputFacets=about, facets=facets)


def _made_of(
    source: tuple[str, str], names: Sequence[str], kind: str
) -> "column_lineage_dataset.Fields":
    from openlineage.client.facet_v2 import column_lineage_dataset as columns

    made = columns.Transformation(type="DIRECT", subtype=kind)
    fields = [columns.InputField(*source, field=each, transformations=[made]) for each in names]
    return columns.Fields(inputFields=fields)


def _assertion(measured: Mapping[str, Any]) -> "data_quality_assertions_dataset.Assertion":
    """What the spec expects of a column; see `Measured`."""
    from openlineage.client.facet_v2 import data_quality_assertions_dataset as quality

    value, low, high = (measured[name] for name in ("value", "min", "max"))
    is_low = None not in (value, low) and value < low
    is_high = None not in (value, high) and value > high
    return quality.Assertion(
        assertion=measured["what"],
        success=not is_low and not is_high,
        column=measured["column"],
        expected=f"{'' if low is None else low}..{'' if high is None else high}",
        actual=None if value is None else str(value),
    )


def _facets(table: Mapping[str, Any]) -> Iterator[tuple[str, "DatasetFacet"]]:
    """Schema, version and format of a table."""
    from openlineage.client import facet_v2 as facets

    schema = facets.schema_dataset
    if columns := table.get("columns"):
        fields = [
            schema.SchemaDatasetFacetFields(name, type=kind) for name, kind in columns.items()
        ]
        yield "schema", schema.SchemaDatasetFacet(fields)
    # Of an Iceberg table: `iceberg:<snapshot id>/<schema id>`.
    table_format, _, version = table.get("version", "").partition(":")
    if (version := version.partition("/")[0]) not in ("", "none"):
        yield "version", facets.dataset_version_dataset.DatasetVersionDatasetFacet(version)
    if table_format in ("iceberg", "delta"):
        layer = facets.storage_dataset.StorageDatasetFacet(table_format, fileFormat="parquet")
        yield "storage", layer
