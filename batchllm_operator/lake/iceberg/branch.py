"""Branches for outputs that aren't as a spec expects, to be looked at, mended and promoted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot, ancestors_of
from pyiceberg.table.update.snapshot import ManageSnapshots

from batchllm_operator.lake.publishing import Publication

_PREFIX: Final = "batchllm-"
_PLAN: Final = "batchllm.plan-id"


def branch_name(publication: Publication) -> str:
    return f"{_PREFIX}{publication.plan_id}"


def begin_branch(transaction: Transaction, name: str) -> None:
    """Create a branch at the head of main, which must have a snapshot."""
    head = transaction.table_metadata.current_snapshot()
    assert head is not None
    ManageSnapshots(transaction).create_branch(head.snapshot_id, name).commit()


def drop_branches(transaction: Transaction, published: Mapping[str, str]) -> None:
    """Drop the branches of a job's outputs for a partition, of this plan and of others.

    `published` are the properties of the publication that takes their place.
    """
    metadata = transaction.table_metadata
    for name in metadata.refs:
        for snapshot in _history(metadata, name) if name.startswith(_PREFIX) else ():
            found: Mapping[str, str] = snapshot.summary or {}
            held = {key: found.get(key) for key in published}
            if held == {**published, _PLAN: name.removeprefix(_PREFIX)}:
                ManageSnapshots(transaction).remove_branch(name).commit()
                break


def fast_forward(table: Table, name: str) -> bool:
    """Move main to the head of a branch, and drop the branch; False if main isn't behind it.

    Raises `CommitFailedException`: main has moved since the table was loaded.
    """
    head = table.current_snapshot()
    if head is None or head not in _history(table.metadata, name):
        return False
    with table.manage_snapshots() as change:  # it asserts that main is at `head`
        change.set_current_snapshot(ref_name=name).remove_branch(name)
    return True


def _history(metadata: TableMetadata, name: str) -> Iterable[Snapshot]:
    """The snapshots of a branch, the newest first; none if there is no such branch."""
    return ancestors_of(metadata.snapshot_by_name(name), metadata)
