"""The report of a shard, which together with its ledger proves that the shard is finished."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, Literal

from pydantic import ValidationError

from batchllm_operator.errors import IncompleteRunError, PlanError
from batchllm_operator.shards.parts import PartEntry
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.counts import Count, Counts

REPORT_FILE: Final = "report.json"
_REPORT_VERSION: Final = 1


class ShardReport(Counts):
    """The counts of a finished shard, over all attempts."""

    report_version: Literal[1] = 1
    plan_id: str
    shard_idx: Count
    num_parts: Count
    num_resumed_parts: Count
    """Parts that earlier attempts had finished."""

    @classmethod
    def of_parts(
        cls, plan_id: str, shard_idx: int, entries: Sequence[PartEntry], num_resumed_parts: int
    ) -> ShardReport:
        """Add up the ledger entries of a finished shard."""
        return cls(
            plan_id=plan_id,
            shard_idx=shard_idx,
            num_parts=len(entries),
            num_resumed_parts=num_resumed_parts,
            **dict(Counts.total(entries)),
        )


def write_report(folder: Folder, report: ShardReport) -> None:
    folder.write_bytes(REPORT_FILE, report.model_dump_json(indent=1).encode())


def read_report(folder: Folder, where: str) -> ShardReport:
    """The report in a shard's run folder; `where` names the shard in errors.

    Raises:
        IncompleteRunError: there is none, or it is damaged.
        PlanError: it is of another version.
    """
    try:
        fields = json.loads(folder.read_bytes(REPORT_FILE))
    except FileNotFoundError:
        raise IncompleteRunError(f"{where}: there is no report; run the shard") from None
    except (ValueError, RecursionError) as error:
        raise IncompleteRunError(f"{where}: the report isn't JSON; run the shard again") from error
    version = fields.get("report_version") if isinstance(fields, dict) else None
    if version != _REPORT_VERSION:
        raise PlanError(
            f"{where}: the report is of version {version!r}, this release reads version"
            f" {_REPORT_VERSION}; use one release of batchllm-operator everywhere"
        )
    try:
        return ShardReport.model_validate(fields)
    except ValidationError as error:
        raise IncompleteRunError(f"{where}: the report isn't whole; run the shard again") from error
