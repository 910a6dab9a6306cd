"""Which table an address opens, and what it costs not to use a format."""

import subprocess
import sys
from pathlib import Path

import pytest

from batchllm_operator.errors import TableError
from batchllm_operator.lake import ParquetTable, open_table
from batchllm_operator.storage import Folder


def test_a_plain_folder_is_parquet(lake_uri: str) -> None:
    assert isinstance(open_table(f"{lake_uri}/table", "ds"), ParquetTable)
    Folder.open(f"{lake_uri}/table/metadata").write_bytes("notes.txt", b"")
    assert isinstance(open_table(f"{lake_uri}/table", "ds"), ParquetTable)


def test_an_iceberg_folder_needs_its_catalog(lake_uri: str) -> None:
    """Read as Parquet it would bring deleted rows back."""
    Folder.open(f"{lake_uri}/table/metadata").write_bytes("00001-x.metadata.json", b"{}")
    with pytest.raises(TableError, match="iceberg://CATALOG"):
        open_table(f"{lake_uri}/table", "ds")


WITHOUT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from batchllm_operator.errors import MissingLibraryError
from batchllm_operator.lake import open_table
try:
    open_table(sys.argv[2], "ds")
except MissingLibraryError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("library", "uri", "extra"),
    [("pyiceberg", "iceberg://c/ns.t", "iceberg"), ("deltalake", "delta+/none", "delta")],
)
def test_a_library_that_is_missing(library: str, uri: str, extra: str) -> None:
    found = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT, library, uri],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"table {uri}: needs the library {library}, which isn't installed" in found.stdout
    assert f"extra `{extra}`: pip install '.[{extra}]' in a checkout" in found.stdout


def test_formats_that_are_not_used_are_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys; import batchllm_operator.plan.given as plan;"
        f" plan.open_table({str(tmp_path)!r}, 'ds');"
        " print(sorted({name.partition('.')[0] for name in sys.modules}"
        " & {'pyiceberg', 'deltalake'}))"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
