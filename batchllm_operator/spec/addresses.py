"""Addresses of tables and folders: format and location."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, ValidationInfo

from batchllm_operator.spec.fields import NonEmpty

FOLDER: Final = "folder"
"""Name in the context of validation: where relative paths start, because a plan is read in other
working directories."""
_ICEBERG: Final = "iceberg://"
_DELTA: Final = "delta+"
_SCHEME: Final = re.compile(
    r"([A-Za-z][A-Za-z0-9+.\-]*):(?:[/\\]|[^/]*://)"
    # Also without a slash, if it is unlikely to be a folder's name.
    r"|((?i:s3[an]?|file|iceberg|gs|gcs|hdfs|abfss?|wasbs?|az|adl|dbfs|https?)):"
)
_STORES: Final = (
    "s3://BUCKET/FOLDER (s3a:// is the same), gs://BUCKET/FOLDER, az://CONTAINER/FOLDER or"
    " abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER"
)
_FOLDER: Final = f"a local path, {_STORES}"
_TABLE: Final = f"iceberg://CATALOG/NAMESPACE.TABLE, {_FOLDER}"
S3_SCHEMES: Final = ("s3", "s3a")
CLOUD_SCHEMES: Final = ("gs", "az", "abfss")


@dataclass(frozen=True, slots=True)
class TableAddress:
    """Where a table is: in a catalog, or in a folder."""

    format: Literal["iceberg", "delta", "parquet"]
    """That of the address; a plain folder ("parquet") may hold a Delta table."""
    location: str
    """An Iceberg table's `CATALOG/NAMESPACE.TABLE`, else the folder's path or URI."""

    @classmethod
    def parse(cls, uri: str) -> TableAddress:
        """Parse `iceberg://CATALOG/NAMESPACE.TABLE`, `delta+FOLDER` or `FOLDER`; or ValueError."""
        if uri.startswith(_ICEBERG):
            catalog, _, name = uri.removeprefix(_ICEBERG).rstrip("/").partition("/")
            levels = name.split(".")
            if not catalog or len(levels) < 2 or "" in levels or "/" in name:
                raise ValueError("write iceberg://CATALOG/NAMESPACE.TABLE")
            return cls("iceberg", f"{catalog}/{name}")
        if uri.startswith(_DELTA):
            folder = uri.removeprefix(_DELTA)
            if not folder or folder.startswith((_ICEBERG, _DELTA)):
                raise ValueError(f"write delta+ and {_FOLDER}")
            check_folder(folder, forms=f"delta+ and {_FOLDER}")
            return cls("delta", folder)
        check_folder(uri, forms=_TABLE)
        return cls("parquet", uri)

    @property
    def folder(self) -> str | None:
        """The table's folder; None for a table in a catalog."""
        return None if self.format == "iceberg" else self.location

    @property
    def catalog(self) -> str:
        return self.location.partition("/")[0]

    @property
    def identifier(self) -> str:
        return self.location.partition("/")[2]

    @property
    def uri(self) -> str:
        return {"iceberg": _ICEBERG, "delta": _DELTA, "parquet": ""}[self.format] + self.location

    @property
    def quarantine(self) -> TableAddress:
        """The table beside it, of rows that are kept apart."""
        return replace(self, location=f"{self.location.rstrip('/')}_quarantine")

    def overlaps(self, other: TableAddress) -> bool:
        """Whether both are one table, or one is in the other's folder."""
        if "iceberg" in (self.format, other.format):
            return self == other
        ours, theirs = (f"{table._real_location.rstrip('/')}/" for table in (self, other))
        return ours.startswith(theirs) or theirs.startswith(ours)

    @property
    def _real_location(self) -> str:
        """A folder's location, equal for all its names: through symbolic links, by s3 or s3a."""
        if scheme_of(self.location) in (*S3_SCHEMES, *CLOUD_SCHEMES):
            return self.location.replace("s3a://", "s3://", 1)
        return os.path.realpath(self.location.removeprefix("file://"))


def check_folder(uri: str, *, forms: str = _FOLDER) -> None:
    """Raise ValueError unless it is a local path or one of `_STORES`; `forms` go into errors."""
    if "::" in uri:  # fsspec would open the part before it
        raise ValueError("holds ::, which would be read as two addresses; name a folder without it")
    scheme = scheme_of(uri)
    if scheme is None or uri.startswith("file:///"):
        return
    if scheme == "file":
        raise ValueError("names another machine, or lacks a slash; write file:///FOLDER")
    if scheme == "iceberg":
        raise ValueError(f"isn't an address of a folder; write {forms}")
    known = (*S3_SCHEMES, *CLOUD_SCHEMES)
    if scheme not in known:
        if scheme.lower() in (*known, "file", "iceberg"):
            raise ValueError(f"write {scheme.lower()}:// in small letters")
        raise ValueError(f"{scheme}:// isn't a storage that works here; write {forms}")
    name = "[^/@]+@[^/@]+" if scheme == "abfss" else "[^/@]+"
    if not re.match(f"{scheme}://{name}(/|$)", uri):
        what = "container and account" if scheme == "abfss" else "bucket"
        raise ValueError(f"names no {what}; write {forms}")


def _absolute(uri: str, info: ValidationInfo) -> str:
    """A local path starts at the context's `FOLDER`, if there is one."""
    folder = (info.context or {}).get(FOLDER)
    if folder is None:
        return uri
    uri = uri.removeprefix("file://")
    if scheme_of(uri) is not None:
        return uri.rstrip("/")
    try:
        path: Path = folder / Path(uri).expanduser()
    except RuntimeError as error:  # ~user
        raise ValueError(f"there is no home folder {uri.partition('/')[0]}") from error
    # Links stay as they are written, for other machines; but `..` starts at a link's target.
    written = "/" + os.path.normpath(path).lstrip("/")
    real = os.path.realpath(path)
    return written if os.path.realpath(written) == real else real


def _check_visible(uri: str) -> None:
    if uri != uri.strip() or not uri.isprintable():
        raise ValueError("begins or ends with a space, or holds a character that can't be seen")


def _table(uri: str, info: ValidationInfo) -> str:
    _check_visible(uri)
    table = TableAddress.parse(uri)
    location = table.location if table.folder is None else _absolute(table.location, info)
    return TableAddress(table.format, location).uri


def _staging_folder(uri: str, info: ValidationInfo) -> str:
    if uri.startswith(("iceberg:", "delta+")):
        raise ValueError(f"is a folder, not a table; write {_FOLDER}")
    check_folder(uri)
    _check_visible(uri)
    return _absolute(uri, info)


def _model(path: str, info: ValidationInfo) -> str:
    if (scheme := scheme_of(path)) is not None:
        raise ValueError(
            f"{scheme}:// isn't a place of models that works here; write a local folder (beginning"
            " with /, ./, ../ or ~/) or the model's name on the Hugging Face hub"
        )
    return _absolute(path, info) if path.startswith(("/", "./", "../", "~/")) else path


def _local_file(path: str, info: ValidationInfo) -> str:
    if scheme_of(path) not in (None, "file"):
        raise ValueError("must be the path of a local file")
    return _absolute(path, info)


TableUri = Annotated[NonEmpty, AfterValidator(_table)]
StagingUri = Annotated[NonEmpty, AfterValidator(_staging_folder)]
ModelPath = Annotated[NonEmpty, AfterValidator(_model)]
LocalFile = Annotated[NonEmpty, AfterValidator(_local_file)]


def scheme_of(uri: str) -> str | None:
    """A URI's scheme, even if slashes are missing; None for a path."""
    match = _SCHEME.match(uri)
    return match[1] or match[2] if match else None
