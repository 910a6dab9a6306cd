"""Which notes of plan tasks are taken for the URI of a plan.

Some users may edit XComs. What they write must not make the API server read any file it can.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from batchllm_operator.errors import PlanError
from batchllm_operator.spec import holds_credentials

ROOTS_SETTING: Final = "BATCHLLM_REPORT_ROOTS"
"""Environment variable: folders and URIs below which plans are read, separated by commas."""

_MAX_CHARS: Final = 4096
_START: Final = re.compile(r"(?:s3a?://[^/\s]+|(?:file://)?)/", re.ASCII)
_END: Final = re.compile(
    r"/_batchllm/(?P<job>[A-Za-z0-9][A-Za-z0-9_\-]*)/(?P<ds>[A-Za-z0-9_.~%\-]+)"
    r"/plan-(?P<plan_id>[0-9a-f]{16})"
)


@dataclass(frozen=True, slots=True)
class PlanURI:
    """The URI of a plan, in a place where the lake layer puts plans."""

    uri: str
    job: str
    ds: str
    plan_id: str

    @classmethod
    def parse(cls, value: Any) -> PlanURI:
        """Check what a plan task has noted.

        Raises:
            PlanError: it isn't text that names a folder `.../_batchllm/<job>/<ds>/plan-<id>` on
                S3 or a local disk, on its shortest way. The value isn't repeated.
        """
        if not isinstance(value, str) or len(value) > _MAX_CHARS or not value.isprintable():
            raise PlanError("the plan task has noted something that isn't the URI of a plan")
        start, end = _START.match(value), _END.search(value)
        names = value[start.end() :].split("/") if start else []
        if end is None or end.end() != len(value) or not names or {"", ".", ".."} & {*names}:
            raise PlanError(
                "the plan task has noted a URI that isn't one of a plan, which would be"
                " .../_batchllm/<job>/<ds>/plan-<id> on S3 or a local disk"
            )
        if holds_credentials(value) or "?" in value or "#" in value:
            raise PlanError("the plan task has noted a URI with credentials or parameters in it")
        return cls(value, end["job"], unquote(end["ds"]), end["plan_id"])

    @property
    def local_path(self) -> str | None:
        """The path, if it lies on a local disk."""
        return None if self.uri.startswith("s3") else self.uri.removeprefix("file://")

    def check_place(self, environment: Mapping[str, str]) -> None:
        """Make sure that it may be read, symbolic links on a local disk followed.

        Raises:
            PlanError: it leads to what isn't a plan's folder, or lies below none of the roots in
                `BATCHLLM_REPORT_ROOTS`, if that is set.
        """
        path = self.local_path
        place = self.uri
        if path is not None:
            place = os.path.realpath(path)
            if _END.fullmatch(place[place.rfind("/_batchllm/") :]) is None:
                raise PlanError("the plan's folder is a symbolic link to what isn't one")
        roots = environment.get(ROOTS_SETTING)
        if roots is not None and not any(
            _is_below(place, root.strip()) for root in roots.split(",") if root.strip()
        ):
            raise PlanError(
                f"the plan lies in none of the places that {ROOTS_SETTING} of Airflow's API"
                " server names"
            )


def _is_below(place: str, root: str) -> bool:
    if not root.startswith("s3"):
        root = os.path.realpath(root.removeprefix("file://"))
    return place.startswith(root.rstrip("/") + "/")
