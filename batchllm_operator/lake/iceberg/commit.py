"""One snapshot that replaces a partition's files, and the check whether it was committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import AssertTableUUID


class NotCommittedError(Exception):
    """The catalog refused: the table has changed since it was loaded. Nothing was committed."""


class Overwrite:
    """A transaction on a table as it was loaded, without pyiceberg's own retries.

    Those would repeat the commit on top of unseen changes.
    """

    def __init__(self, table: Table, new_columns: Schema) -> None:
        self._table = table
        self._transaction: Transaction = table.transaction()
        self._producer: Any = None
        if new_columns.fields:
            with self._transaction.update_schema() as update:
                update.union_by_name(new_columns)

    @property
    def metadata(self) -> TableMetadata:
        """The table's metadata with the new columns."""
        return self._transaction.table_metadata

    def stage(
        self,
        old_files: Sequence[DataFile],
        new_files: Sequence[DataFile],
        properties: Mapping[str, str],
    ) -> None:
        snapshot = self._transaction.update_snapshot(snapshot_properties=dict(properties))
        self._producer = snapshot.overwrite()
        for file in old_files:
            self._producer.delete_data_file(file)
        for file in new_files:
            self._producer.append_data_file(file)
        self._producer.commit()  # into the transaction

    def commit(self) -> None:
        """Commit what is staged.

        Raises:
            NotCommittedError: the branch has moved since the table was loaded.
            Exception: anything that pyiceberg and its catalogs raise; the commit may have happened.
        """
        staged = self._transaction
        requirements = (*staged._requirements, AssertTableUUID(uuid=self.metadata.table_uuid))
        try:
            self._table._do_commit(updates=staged._updates, requirements=requirements)
        except CommitFailedException as error:
            raise NotCommittedError(str(error)) from error

    def is_in(self, table: Table) -> bool:
        """Whether the reloaded table has the snapshot."""
        snapshot_id = self._producer.snapshot_id
        return snapshot_id is not None and table.metadata.snapshot_by_id(snapshot_id) is not None

    def clean_up(self) -> None:
        """Remove the written manifests. Only if the commit certainly hasn't happened."""
        self._producer._clean_all_uncommitted()
