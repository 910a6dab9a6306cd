"""The note in a plan's folder after its commit: nothing is left to do.

The parts may be removed then; a cleared task must neither miss nor regenerate them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Literal

from pydantic import ValidationError

from batchllm_operator.errors import MissingLibraryError, SpecError
from batchllm_operator.lake import open_table
from batchllm_operator.shards.report import ShardReport
from batchllm_operator.stored_plan.counts import Frozen
from batchllm_operator.stored_plan.stored_plan import StoredPlan, check_publisher

COMMITTED_FILE: Final = "committed.json"
_log = logging.getLogger(__name__)


class Committed(Frozen):
    """Version 1 of committed.json. Committing again writes the same bytes."""

    committed_version: Literal[1] = 1
    plan_id: str
    shards: tuple[ShardReport, ...]
    """All parts count as resumed, as they were finished earlier."""
    reuse_sha256: str | None = None
    """Digest of the index of reusable outputs, if the spec asks for one."""


def mark_committed(
    plan: StoredPlan, shards: Sequence[ShardReport], reuse_sha256: str | None = None
) -> None:
    """Note in the plan's folder that the output table holds its rows, as the caller has checked."""
    plan_id = plan.manifest.plan_id
    committed = Committed(plan_id=plan_id, shards=tuple(shards), reuse_sha256=reuse_sha256)
    data = committed.model_dump_json(indent=1, exclude_none=True).encode()
    plan.folder.write_bytes(COMMITTED_FILE, data)


def find_committed(plan: StoredPlan) -> Committed | None:
    """The note, if there is one and the output table still holds the plan's rows.

    The note alone doesn't prove it: a later plan may have replaced the rows, or a user dropped them
    to generate them again. An unreadable note doesn't count.

    Raises:
        TableError: the output partition holds what another job or program wrote.
    """
    try:
        committed = Committed.model_validate_json(plan.folder.read_bytes(COMMITTED_FILE))
    except FileNotFoundError:
        return None
    except ValidationError:
        _log.warning("%s/%s doesn't count: it can't be read", plan.folder.uri, COMMITTED_FILE)
        return None
    manifest = plan.manifest
    is_its_own = committed.plan_id == manifest.plan_id
    if not is_its_own or len(committed.shards) != len(manifest.shards):
        _log.warning("%s/%s doesn't count: it belongs elsewhere", plan.folder.uri, COMMITTED_FILE)
        return None
    return committed if holds_outputs(plan) else None


def holds_outputs(plan: StoredPlan) -> bool:
    """Whether the output table holds the plan's rows; False if it can't be opened here.

    Raises:
        TableError: the output partition holds what another job or program wrote.
    """
    spec = plan.manifest.spec
    try:
        table = open_table(spec.output.uri, spec.input.partition_column)
    except (MissingLibraryError, SpecError) as error:
        # Images for GPUs lack the tables' libraries; the worker has checked before.
        _log.info("Whether the plan is committed can't be seen from here: %s", error)
        return False
    return check_publisher(table, spec, plan.manifest.ds) == plan.publication
