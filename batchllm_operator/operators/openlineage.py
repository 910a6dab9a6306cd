"""Tables, their versions and columns, and the figures of a run, as OpenLineage has them.

Imported when Airflow's provider for OpenLineage asks a task: it may not be installed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attr
from airflow.providers.openlineage.extractors import OperatorLineage
from openlineage.client import facet_v2 as facets
from openlineage.client.event_v2 import InputDataset, OutputDataset

from batchllm_operator.operators.assets import dataset_name

FACET: Final = "batchllm_job"
"""Name of the facet of a run with its figures, of the form that custom facets have."""
SCHEMA: Final[Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("BatchLLMJobRunFacet.json").read_text(encoding="utf-8")
)
_NAME: Final = "BatchLLMJobRunFacet"
_FIGURES: Final[Mapping[str, Any]] = SCHEMA["$defs"][_NAME]["allOf"][1]["properties"]


@attr.define
class BatchLLMJobRunFacet(facets.RunFacet):
    """The figures of a command's result that `SCHEMA` names, as additional properties."""

    @staticmethod
    def _get_schema() -> str:
        return f"{SCHEMA['$id']}#/$defs/{_NAME}"


def lineage(tables: Mapping[str, Any], result: Mapping[str, Any]) -> OperatorLineage[Any, Any]:
    """Lineage of `tables`, see `stored_plan.lineage.Lineage`, and of a command's result."""
    figures = {name: result[name] for name in _FIGURES if name in result}
    run = {FACET: BatchLLMJobRunFacet().with_additional_properties(**figures)} if figures else {}
    inputs = [_input(tables["input"])] if "input" in tables else []
    expectations = result.get("expectations") or ()
    outputs = [_output(tables, expectations)] if "output" in tables else []
    return OperatorLineage(inputs=inputs, outputs=outputs, run_facets=run)


def _input(table: Mapping[str, Any]) -> InputDataset:
    rows = table.get("num_rows")
    counts = facets.input_statistics_input_dataset.InputStatisticsInputDatasetFacet(rowCount=rows)
    about: dict[str, Any] = {} if rows is None else {"inputStatistics": counts}
    return InputDataset(*dataset_name(table["uri"]), inputFacets=about, facets=dict(_facets(table)))


def _output(tables: Mapping[str, Any], expectations: Sequence[Mapping[str, Any]]) -> OutputDataset:
    table, source = tables["output"], dataset_name(tables["input"]["uri"])
    sources = {name: _made_of(source, [each], "IDENTITY") for name, each in tables["kept"].items()}
    for name, names in tables["answers"].items():
        sources[name] = _made_of(source, names, "TRANSFORMATION")
    columns = facets.column_lineage_dataset.ColumnLineageDatasetFacet(sources)
    about: dict[str, Any] = {**dict(_facets(table)), "columnLineage": columns}
    statistics: dict[str, Any] = {}
    if assertions := [_assertion(each) for each in expectations]:
        quality = facets.data_quality_assertions_dataset
        about["dataQualityAssertions"] = quality.DataQualityAssertionsDatasetFacet(assertions)
    if "num_rows" in table:  # else nothing was published
        counted = facets.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet
        statistics["outputStatistics"] = counted(
            rowCount=table["num_rows"], size=table["num_bytes"], fileCount=table["num_files"]
        )
    return OutputDataset(*dataset_name(table["uri"]), outputFacets=statistics, facets=about)


def _made_of(
    source: tuple[str, str], names: Sequence[str], kind: str
) -> facets.column_lineage_dataset.Fields:
    columns = facets.column_lineage_dataset
    made = columns.Transformation(type="DIRECT", subtype=kind)
    fields = [columns.InputField(*source, field=each, transformations=[made]) for each in names]
    return columns.Fields(inputFields=fields)


def _assertion(measured: Mapping[str, Any]) -> facets.data_quality_assertions_dataset.Assertion:
    """What the spec expects of a column; see `Measured`."""
    value, low, high = (measured[name] for name in ("value", "min", "max"))
    is_low = None not in (value, low) and value < low
    is_high = None not in (value, high) and value > high
    return facets.data_quality_assertions_dataset.Assertion(
        assertion=measured["what"],
        success=not is_low and not is_high,
        column=measured["column"],
        expected=f"{'' if low is None else low}..{'' if high is None else high}",
        actual=None if value is None else str(value),
    )


def _facets(table: Mapping[str, Any]) -> Iterator[tuple[str, facets.DatasetFacet]]:
    """Schema, version and format of a table."""
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
