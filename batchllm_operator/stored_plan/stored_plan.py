"""A plan in the lake: its files' paths and checksums, and notes on its state."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import quote

import pyarrow as pa

from batchllm_operator.errors import PlanError, SpecError, TableError
from batchllm_operator.lake import LakeTable, Publication, before
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.manifest import (
    MANIFEST_FILE,
    PlanManifest,
    ShardInfo,
    errors_field,
)
from batchllm_operator.stored_plan.parquet_files import PlanFile
from batchllm_operator.stored_plan.shard_files import SHARD_SCHEMA

SUPERSEDED_FILE: Final = "superseded.json"
COMMITTING_FILE: Final = "committing.json"
TURN_FILE: Final = "turn.json"
RUNS_FOLDER: Final = "runs"
_RUN: Final = re.compile(r"shard-([0-9]{5,})")
PLAN_FOLDER: Final = re.compile(r"plan-([0-9a-f]{16})")
STAGED_FOLDER: Final = re.compile(r"staged-[0-9a-f]{32}")
"""Files of a plan that Spark is making, beside the plans."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A complete plan and its folder."""

    folder: Folder
    manifest: PlanManifest

    @classmethod
    def open(cls, plan: str | Path | StoredPlan) -> StoredPlan:
        """Read the manifest of the plan at an address. An open plan is returned as it is.

        Raises `PlanError`: there is no plan, or it is corrupted, foreign or of another version.
        """
        if isinstance(plan, StoredPlan):
            return plan
        uri = str(plan)
        folder = Folder.open(uri)
        manifest = PlanManifest.read(folder, MANIFEST_FILE)
        if manifest is None:
            raise PlanError(
                f"plan {uri}: there is no {MANIFEST_FILE}: not a plan, or one never completed"
            )
        return cls(folder, manifest)

    @property
    def publication(self) -> Publication:
        return Publication(self.manifest.spec.name, self.manifest.ds, self.manifest.plan_id)

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row."""
        return self.manifest.spec.input.key

    @property
    def prompts(self) -> Sequence[str]:
        """Names of the job's prompts; none if it has one without a name."""
        return tuple(self.manifest.spec.prompts)

    @contextmanager
    def open_shard(self, shard_idx: int) -> Iterator[PlanFile]:
        """Open the requests of a shard, a row group for each part.

        Raises `PlanError`: the plan has no such shard, or its file was altered.
        """
        shard = self.shard(shard_idx)
        with self.open_parquet(shard.file, SHARD_SCHEMA, shard.num_requests) as file:
            if file.num_row_groups != shard.num_parts:
                raise PlanError(
                    f"plan {self.folder.uri}: {shard.file} has {file.num_row_groups} parts where"
                    f" the manifest says {shard.num_parts}; make the plan again"
                )
            yield file

    @contextmanager
    def open_file(self, name: str) -> Iterator[IO[bytes]]:
        """Open a data file of the plan after checking its checksum.

        Raises `PlanError`: the file is absent or altered.
        """
        where, cure = f"plan {self.folder.uri}: {name}", "make the plan again"
        try:
            digest = self.folder.sha256(name)
        except FileNotFoundError as error:
            raise PlanError(f"{where} is missing; {cure}") from error
        if digest != self.manifest.files[name].sha256:
            raise PlanError(f"{where} is corrupted: its checksum doesn't hold; {cure}")
        with self.folder.open_file(name) as file:
            yield file

    @contextmanager
    def open_parquet(
        self, name: str, columns: pa.Schema, num_rows: int | None = None
    ) -> Iterator[PlanFile]:
        """Open a Parquet file of the plan with these columns; see `open_file` and `PlanFile`."""
        where = f"plan {self.folder.uri}: {name}"
        with self.open_file(name) as file, PlanFile(file, where, columns, num_rows) as parquet:
            yield parquet

    def row_batches(
        self, columns: Sequence[str], first_row: int = 0, end_row: int | None = None, **options: Any
    ) -> Iterator[pa.RecordBatch]:
        """Columns of the plan's rows [first_row, end_row), in input order, all by default.

        Batches lie within one of `PlanManifest.row_files`; `options` are those of
        `pyarrow.parquet.ParquetFile.iter_batches`. Only files that are read are checked.

        Raises `PlanError`: see `open_parquet`.
        """
        end_row = self.manifest.num_rows if end_row is None else end_row
        start = 0  # of the file, then of the batch
        for rows in self.manifest.row_files:
            end = start + rows.num_rows
            if first_row < end and start < end_row:
                with self.open_parquet(rows.file, self._errors, rows.num_rows) as file:
                    for batch in file.iter_batches(columns=list(columns), **options):
                        low = max(first_row - start, 0)
                        high = min(end_row - start, batch.num_rows)
                        if low < high:
                            yield batch.slice(low, high - low)
                        start += batch.num_rows
            start = end

    def rows_schema(self) -> pa.Schema:
        """The columns of the plan's rows."""
        rows = self.manifest.row_files[0]
        with self.open_parquet(rows.file, self._errors, rows.num_rows) as file:
            return file.schema_arrow

    @property
    def _errors(self) -> pa.Schema:
        return pa.schema([errors_field(self.manifest.spec)])

    def shard(self, shard_idx: int) -> ShardInfo:
        """The manifest's entry of a shard. Raises `PlanError` if the plan has no such shard."""
        num_shards = len(self.manifest.shards)
        if not 0 <= shard_idx < num_shards:
            known = f"shards 0 to {num_shards - 1}" if num_shards else "no shards"
            raise PlanError(f"plan {self.folder.uri}: has {known}, not shard {shard_idx}")
        return self.manifest.shards[shard_idx]

    def run_folder(self, shard_idx: int) -> Folder:
        """The folder of a shard's attempts; raises like `shard`."""
        self.shard(shard_idx)
        return self.folder.child(RUNS_FOLDER, f"shard-{shard_idx:05d}")

    def begun_shards(self) -> list[int]:
        """Numbers of the shards that have a run folder, ascending."""
        matches = map(_RUN.fullmatch, self.folder.child(RUNS_FOLDER).subfolder_names())
        numbers = sorted(int(match[1]) for match in matches if match)
        return [number for number in numbers if number < len(self.manifest.shards)]

    def note_turn(self) -> None:
        """Note that this plan was planned after the others of its job and partition.

        Written each time that planning results in this plan, before its manifest completes it. A
        plan's content doesn't tell when it was planned, and clocks differ.
        """
        turn = 1 + max(map(turn_of, self._others().values()), default=0)
        self.folder.write_bytes(TURN_FILE, json.dumps({"turn": turn}).encode())

    def older_plans(self) -> set[str]:
        """Ids of the plans of this job and partition that were last planned before this one.

        Of two that were planned at the same time, neither is older.
        """
        own = turn_of(self.folder)
        return {plan_id for plan_id, folder in self._others().items() if turn_of(folder) < own}

    def mark_older_plans(self, published: Publication | None) -> None:
        """Note in the folders of older plans of the same table that this plan supersedes them.

        Uncommitted ones are included: a late commit would bring old outputs back.

        Args:
            published: the publication that is about to be replaced; its plan counts as older, too.
        """
        older, replaced = self.older_plans(), published.plan_id if published else None
        for plan_id, folder in sorted(self._others().items()):
            is_superseded = plan_id == replaced or (plan_id in older and self._shares_table(folder))
            # A mark that is there stays: rewriting would update its time.
            if is_superseded and _superseded_by(folder) is None and folder.exists(MANIFEST_FILE):
                self.mark_superseded_at(folder, by=self.manifest.plan_id)

    def _shares_table(self, folder: Folder) -> bool:
        """Whether another plan writes the same output table; True if its manifest is unreadable.

        Specs with the same name and `staging_uri` may write different tables.
        """
        try:
            other = StoredPlan.open(folder.uri).manifest
        except PlanError:
            return True
        return other.spec.output.uri == self.manifest.spec.output.uri

    def _others(self) -> dict[str, Folder]:
        """Folders of the other plans of this job and partition, by plan_id."""
        parent = Folder(self.folder.fs, self.folder.path.rpartition("/")[0])
        matches = filter(None, map(PLAN_FOLDER.fullmatch, parent.subfolder_names()))
        return {m[1]: parent.child(m[0]) for m in matches if m[1] != self.manifest.plan_id}

    @staticmethod
    def mark_superseded_at(folder: Folder, *, by: str) -> None:
        """Note in a plan's folder that plan `by` supersedes it."""
        folder.write_bytes(SUPERSEDED_FILE, json.dumps({"superseded_by": by}).encode())

    def mark_current(self) -> None:
        """Remove the note, because planning the input again resulted in this plan."""
        self.folder.remove(SUPERSEDED_FILE)

    def mark_committing(self) -> None:
        """Note that a commit is running: `gc` spares a plan with recent files.

        Raises `PlanError`: `gc` has just removed it.
        """
        self.folder.write_bytes(COMMITTING_FILE, json.dumps({"committing": True}).encode())
        self.check_stays()

    def check_stays(self) -> None:
        """Raise `PlanError` if `gc` has removed the plan, whose manifest it removes first."""
        if not self.folder.exists(MANIFEST_FILE):
            raise PlanError(
                f"plan {self.folder.uri}: `batchllm gc` has just removed it; make the plan again"
            )

    def superseded_by(self) -> str | None:
        return _superseded_by(self.folder)

    def check_current(self) -> None:
        """Raise `PlanError` if the plan is superseded: a commit would bring old outputs back."""
        if self.superseded_by() is not None:
            raise PlanError(
                f"plan {self.folder.uri}: a later plan's outputs have replaced this one's; to bring"
                " these back, plan the job again with the input and spec that they were made from"
            )


_UNREADABLE: Final = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


def _superseded_by(folder: Folder) -> str | None:
    try:
        return str(json.loads(folder.read_bytes(SUPERSEDED_FILE))["superseded_by"])
    except FileNotFoundError:
        return None
    except _UNREADABLE:
        return "a plan whose note can't be read"


def turn_of(folder: Folder) -> int:
    """The plan's position in the order of planning, from 1; 0 if it has no readable note."""
    try:
        return int(json.loads(folder.read_bytes(TURN_FILE))["turn"])
    except FileNotFoundError:
        return 0
    except _UNREADABLE:
        _log.warning("%s/%s can't be read", folder.uri, TURN_FILE)
        return 0


def check_partition(ds: str) -> None:
    """Raise `SpecError` if `ds` can't name a partition: it is empty, or not valid text."""
    if not ds:
        raise SpecError("ds: is empty; name a partition, such as 2026-01-31")
    try:
        is_text = b"\0" not in ds.encode()
    except UnicodeEncodeError:  # bytes of an argument that aren't UTF-8
        is_text = False
    if not is_text:
        raise SpecError(f"ds: {ds!r} isn't text that can name a partition")


def plan_folder(spec: JobSpec, published: Publication) -> Folder:
    """The folder of the plan that published a partition of the job's output."""
    return job_folder(spec, published.partition).child(f"plan-{published.plan_id}")


def job_folder(spec: JobSpec, ds: str) -> Folder:
    """The folder of the plans of a job and partition.

    Raises `SpecError`: see `check_partition`.
    """
    check_partition(ds)
    name = quote(ds, safe="")
    if name in (".", ".."):  # valid values, but not folder names
        name = name.replace(".", "%2E")
    return job_root(spec).child(name)


def job_root(spec: JobSpec) -> Folder:
    """The folder with a folder for each of the job's partitions, named by `quote`."""
    return Folder.open(spec.output.staging_folder).child("_batchllm", spec.name)


def check_publisher(table: LakeTable, spec: JobSpec, ds: str) -> Publication | None:
    """The publication of the job that partition `ds` holds; None if there is none.

    Raises `TableError`: the partition was published by another job, for another partition, or by
    another program.
    """
    found = table.published(ds)
    if found is not None and found.job != spec.name:
        raise TableError(
            f"output {table.uri}: partition {ds!r} holds the outputs of job {found.job!r}; give"
            f" job {spec.name!r} an output table of its own"
        )
    if found is not None and found.partition != ds:
        raise TableError(
            f"output {table.uri}: partition {ds!r} holds the outputs for partition"
            f" {found.partition!r}; move it away or choose another output table"
        )
    return found


def earlier_publications(table: LakeTable, spec: JobSpec, ds: str) -> Iterator[Publication]:
    """The job's publications of partitions before `ds` (see `lake.before`), the latest first."""
    for earlier in reversed(before(table.partitions(), ds)):
        try:
            published = check_publisher(table, spec, earlier)
        except TableError:  # another job's, or another program's
            continue
        if published is not None:
            yield published
