"""Why the last commit of a plan published nothing: a note for pages and `batchllm status`."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import AwareDatetime, ValidationError

from batchllm_operator.errors import PlanError
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.counts import Count, Frozen
from batchllm_operator.stored_plan.run_report import ErrorKind

REFUSED_FILE: Final = "refused.json"
"""File name in the plan's folder."""


class Refusal(Frozen):
    """Version 1 of refused.json. A later commit replaces it, or succeeds: then it doesn't count."""

    refused_version: Literal[1] = 1
    plan_id: str
    refused_at: AwareDatetime
    reason: str
    """The commit's error, without credentials."""
    num_rows_failed: Count = 0
    errors: tuple[ErrorKind, ...] = ()
    """The failed rows' most frequent kinds, if it was for these that the commit was refused."""


def find_refusal(folder: Folder, plan_id: str) -> Refusal | None:
    """The note in a plan's folder; None without one.

    Raises:
        PlanError: it can't be read, or belongs elsewhere.
    """
    where = f"{folder.uri}/{REFUSED_FILE}"
    try:
        found = Refusal.model_validate_json(folder.read_bytes(REFUSED_FILE))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise PlanError(f"{where}: can't be read by this release") from error
    if found.plan_id != plan_id:
        raise PlanError(f"{where}: belongs elsewhere")
    return found
