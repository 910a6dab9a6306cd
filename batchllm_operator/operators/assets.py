"""Tables as Airflow's assets, and by the names that lineage knows them by."""

from pathlib import Path

from airflow.sdk import Asset

from batchllm_operator.spec.addresses import TableAddress, scheme_of


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
