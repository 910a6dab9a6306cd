"""Tables as Airflow's assets, and by the names that lineage knows them by."""

from pathlib import Path
from typing import Any

from airflow.sdk import Asset
from airflow.sdk.definitions.asset import AssetRef

from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec, load_spec
from batchllm_operator.spec.addresses import TableAddress, scheme_of


def readable_spec(spec_path: Any) -> JobSpec | None:
    """The job, if its spec is readable where a DAG is parsed."""
    try:
        return load_spec(spec_path)
    except (SpecError, TypeError):
        return None


def input_asset(name: str, spec_path: str | Path) -> Asset | AssetRef:
    """The asset of the table that a job reads, to schedule a DAG by; see `batchllm_task_group`.

    A DAG whose schedule has an asset by its name alone is started, but isn't told of its events.
    """
    spec = readable_spec(spec_path)
    return named_asset(name, spec.input.uri if spec else None)


def named_asset(name: str, uri: str | None) -> Asset | AssetRef:
    """The asset of the table at `uri`.

    If that isn't known here, it is the asset that has the name in another DAG: Airflow would stop
    one of two whose URIs differ.
    """
    return Asset.ref(name=name) if uri is None else table_asset(name, uri)


def table_asset(name: str, uri: str) -> Asset:
    """The asset of a table at an address of a spec, such as `s3://lake/documents`.

    Its URI is that of the table's folder, whatever the format. That of an Iceberg table is
    `x-iceberg://CATALOG/NAMESPACE.TABLE`, as Airflow keeps schemes with `x-` free of rules. Raises
    `ValueError`: it is no address, or a relative path.
    """
    namespace, table = dataset_name(uri)
    if namespace == "file":
        return Asset(name, uri=Path(table).as_uri())
    return Asset(name, uri=f"{namespace}/{table}".replace("iceberg://", "x-iceberg://", 1))


def dataset_name(uri: str) -> tuple[str, str]:
    """OpenLineage's namespace and name of a table: `s3://lake` and `documents`.

    Of an Iceberg table, `iceberg://CATALOG` and `NAMESPACE.TABLE`; of a local folder, `file` and
    its path. Raises `ValueError`: it is no address.
    """
    table = TableAddress.parse(uri)
    if table.format == "iceberg":
        return f"iceberg://{table.catalog}", table.identifier
    location = table.location.removeprefix("file://").replace("s3a://", "s3://", 1).rstrip("/")
    if scheme_of(location) is None:
        return "file", location
    scheme, _, rest = location.partition("://")
    store, _, folder = rest.partition("/")
    return f"{scheme}://{store}", folder or "/"
