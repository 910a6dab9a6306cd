"""Footers of Parquet files: reads them in few requests, and marks them with a publication."""

import hashlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.errors import TableError
from batchllm_operator.lake.publishing import Publication
from batchllm_operator.storage import Folder

_PREFIX: Final = b"batchllm."
_MAGIC: Final = b"PAR1"
_ENCRYPTED: Final = b"PARE"  # instead of the magic
_TAIL_BYTES: Final = 8  # the footer's length (4 bytes, little endian) and the magic
_GUESS_BYTES: Final = 1 << 16  # read first; most footers are smaller


def read_footer(folder: Folder, name: str, size_bytes: int) -> tuple[pq.FileMetaData, str]:
    """The footer of file `name`, and its SHA-256.

    Raises `TableError`: the file vanished, or isn't a whole Parquet file.
    """
    where = f"table {folder.uri}"
    broken = (
        f"{where}: {name} isn't a whole Parquet file; write it again, move it away or, if it holds"
        " no rows, begin its name with _ so that readers skip it"
    )
    if not size_bytes:  # S3 refuses to read it, too
        raise TableError(f"{where}: {name} is empty; write it again or move it away")
    try:
        end = folder.read_bytes(name, max(0, size_bytes - _GUESS_BYTES))
        if end.endswith(_ENCRYPTED):
            raise TableError(f"{where}: {name} is encrypted, and there is no key for it here")
        if len(end) < _TAIL_BYTES or not end.endswith(_MAGIC):
            raise TableError(broken)
        footer_bytes = int.from_bytes(end[-_TAIL_BYTES:][:4], "little") + _TAIL_BYTES
        if footer_bytes > size_bytes:
            raise TableError(broken)
        if footer_bytes > len(end):
            end = folder.read_bytes(name, size_bytes - footer_bytes)
    except FileNotFoundError as error:
        raise TableError(f"{where}: {name} vanished while it was read") from error
    footer = end[-footer_bytes:]
    try:
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
    except UnicodeDecodeError as error:
        raise TableError(
            f"{where}: {name} has a column whose name isn't UTF-8, {error.object!r}; rename it"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"{broken}: {error}") from error
    return metadata, hashlib.sha256(footer).hexdigest()


def is_parquet(folder: Folder, name: str, size_bytes: int) -> bool:
    """Whether the file ends as Parquet files do, whatever its name is."""
    if size_bytes < _TAIL_BYTES:
        return False
    with suppress(FileNotFoundError):
        return folder.read_bytes(name, size_bytes - len(_MAGIC)) in (_MAGIC, _ENCRYPTED)
    return False


def file_schema(footer: pq.FileMetaData) -> pa.Schema:
    """A file's columns as `read_batches` returns them: 96-bit timestamps as microseconds."""
    nothing = pa.BufferReader(b"")  # the footer suffices
    file = pq.ParquetFile(nothing, metadata=footer, coerce_int96_timestamp_unit="us")
    return file.schema_arrow


def without_values(footer: pq.FileMetaData, names: Collection[str]) -> set[str]:
    """Those of the columns, all without parts, that are null in all rows of a file."""
    groups = [footer.row_group(idx) for idx in range(footer.num_row_groups)]
    places = {footer.schema.column(idx).path: idx for idx in range(footer.num_columns)}

    def is_null(place: int) -> bool:
        each = (group.column(place) for group in groups)
        known = ((chunk.statistics, chunk.num_values) for chunk in each)
        return all(s is not None and s.has_null_count and s.null_count == n for s, n in known)

    return {name for name in names if name in places and is_null(places[name])}


def retyped(schema: pa.Schema, kinds: Mapping[str, pa.DataType]) -> pa.Schema:
    """The same columns, some of which have other types."""
    return pa.schema([field.with_type(kinds.get(field.name, field.type)) for field in schema])


def published_schema(schema: pa.Schema, publication: Publication) -> pa.Schema:
    """`schema` with `publication` in its metadata, for the file's footer."""
    whose = publication
    mark = {"plan_id": whose.plan_id, "run_id": whose.run_id, "job": whose.job}
    return schema.with_metadata({_PREFIX + key.encode(): value for key, value in mark.items()})


def publication_of(footer: pq.FileMetaData) -> Publication | None:
    """The publication that the footer names; None if no job of this package wrote the file."""
    run_id = (footer.metadata or {}).get(_PREFIX + b"run_id", b"")
    return Publication.of_run_id(run_id.decode(errors="replace"))
