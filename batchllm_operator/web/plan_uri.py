"""The URIs of plans from XComs.

Some users may edit XComs, which must not make the API server read arbitrary files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from batchllm_operator.errors import PlanError
from batchllm_operator.secrets import holds_credentials

_MAX_CHARS: Final = 4096
_URI: Final = re.compile(
    r"(?:(?:s3a?|gs|az)://[^/\s]+|abfss://[^/@\s]+@[^/@\s]+|(?:file://)?)"
    r"/(?!(?:.*/)?\.{0,2}/)(?:.*/)?"  # no empty name, no dots
    r"_batchllm/(?P<job>[A-Za-z0-9][A-Za-z0-9_\-]*)/(?P<ds>[A-Za-z0-9_.~%\-]+)"
    r"/plan-(?P<plan_id>[0-9a-f]{16})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class PlanURI:
    """The URI of a plan, with the path that plans have."""

    uri: str
    job: str
    ds: str
    plan_id: str

    @classmethod
    def parse(cls, value: Any) -> PlanURI:
        """Check the value that a plan task has stored.

        Raises:
            PlanError: it isn't the normalised path of a folder `.../_batchllm/<job>/<ds>/plan-<id>`
                in a store or on a local disk. The message doesn't repeat the value.
        """
        match = None
        if isinstance(value, str) and len(value) <= _MAX_CHARS and value.isprintable():
            match = _URI.fullmatch(value)
        if match is None:
            raise PlanError(
                "the plan task has noted something that isn't the URI of a plan, which would be"
                " .../_batchllm/<job>/<ds>/plan-<id> in a store or on a local disk"
            )
        if holds_credentials(match[0]) or any(mark in match[0] for mark in ("?", "#", "::")):
            raise PlanError(
                "the plan task has noted a URI with credentials, parameters or :: in it"
            )
        return cls(match[0], match["job"], unquote(match["ds"]), match["plan_id"])

    @property
    def local_path(self) -> str | None:
        return self.uri.removeprefix("file://") if self.uri.startswith(("/", "file://")) else None

    def place(self, roots: Iterable[str]) -> str:
        """The place to read it from: on a local disk the real path, resolved once, here.

        Raises:
            PlanError: it leads to something else than a plan's folder, or is below none of `roots`.
        """
        path = self.local_path
        place = self.uri
        if path is not None:
            place = os.path.realpath(path)
            if _URI.fullmatch(place) is None:
                raise PlanError("the plan's folder is a symbolic link to what isn't one")
        if not any(_is_below(place, root) for root in roots):
            raise PlanError(
                "the plan lies outside the folders where this DAG's plans are read, which"
                " [batchllm] report_roots of Airflow's API server names, or else the DAG's own spec"
            )
        return place


def _is_below(place: str, root: str) -> bool:
    """Whether a place is below a root, in the same bucket or on disk."""
    scheme, is_uri, rest = root.partition("://")
    if is_uri and scheme != "file":
        bucket, _, path = rest.rstrip("/").partition("/")
        root = f"{scheme}://{bucket}/{path}".rstrip("/").replace("s3a://", "s3://", 1)
        return bool(bucket) and place.replace("s3a://", "s3://", 1).startswith(f"{root}/")
    root = root.removeprefix("file://")
    if not root.startswith("/") or not place.startswith("/"):
        return False
    return place.startswith(os.path.realpath(root).rstrip("/") + "/")
