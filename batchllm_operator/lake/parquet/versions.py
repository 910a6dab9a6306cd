"""Versions of files and of listings, which change with their content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from batchllm_operator.lake.table import InputFile


def etag_version(details: Mapping[str, Any]) -> str | None:
    """The version of a file with these details from `Folder.find`; None without ETags."""
    etag = str(details.get("ETag", "")).strip('"')
    return f"etag:{etag}" if etag else None


def listing_version(files: Sequence[InputFile]) -> str:
    """The version of a snapshot with these files."""
    listed = "".join(f"{file.name}\0{file.size_bytes}\0{file.version}\n" for file in files)
    return f"listing:{hashlib.sha256(listed.encode()).hexdigest()}"
