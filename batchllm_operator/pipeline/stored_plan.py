"""A plan in the lake: where its files lie, and whether they are what they were."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Final
from urllib.parse import quote

import pyarrow as pa

from batchllm_operator.errors import PlanError, SpecError, TableError
from batchllm_operator.lake import Folder, LakeTable, Publication
from batchllm_operator.pipeline.plan_file import PlanFile
from batchllm_operator.planner.plan import (
    MANIFEST_FILE,
    REQUIRED_SHARD_SCHEMA,
    PlanManifest,
    ShardInfo,
)
from batchllm_operator.spec import JobSpec

SUPERSEDED_FILE: Final = "superseded.json"
PREDECESSORS_FILE: Final = "predecessors.json"
_FOLDER: Final = re.compile(r"plan-([0-9a-f]{16})")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A complete plan and the folder that it lies in."""

    folder: Folder
    manifest: PlanManifest

    @classmethod
    def open(cls, uri: str) -> StoredPlan:
        """Read the manifest of the plan at `uri`.

        Raises:
            PlanError: there is no plan, or it is corrupted, foreign or of another version.
        """
        folder = Folder.open(uri)
        try:
            data = folder.read_bytes(MANIFEST_FILE)
        except FileNotFoundError as error:
            raise PlanError(
                f"plan {uri}: there is no {MANIFEST_FILE}: not a plan, or one never completed"
            ) from error
        return cls(folder, PlanManifest.from_bytes(data, source=uri))

    @property
    def publication(self) -> Publication:
        """What a partition with the plan's outputs holds."""
        return Publication(self.manifest.spec.name, self.manifest.ds, self.manifest.plan_id)

    @contextmanager
    def open_shard(self, shard_idx: int) -> Iterator[PlanFile]:
        """Open the requests of a shard, a row group for each part.

        Raises:
            PlanError: the plan has no such shard, or its file isn't the one that was planned.
        """
        shard = self.shard(shard_idx)
        with self.open_parquet(shard.file, REQUIRED_SHARD_SCHEMA, shard.num_requests) as file:
            if file.num_row_groups != shard.num_parts:
                raise PlanError(
                    f"plan {self.folder.uri}: {shard.file} has {file.num_row_groups} parts where"
                    f" the manifest says {shard.num_parts}; make the plan again"
                )
            yield file

    @contextmanager
    def open_file(self, name: str) -> Iterator[IO[bytes]]:
        """Open a data file of the plan, after its checksum was found to hold.

        Raises:
            PlanError: the file is absent or isn't the one that was planned.
        """
        expected = self.manifest.files[name]
        try:
            found = self.folder.sha256(name)
        except FileNotFoundError as error:
            raise PlanError(
                f"plan {self.folder.uri}: {name} is missing; make the plan again"
            ) from error
        if found != expected.sha256:
            raise PlanError(
                f"plan {self.folder.uri}: {name} is corrupted: its checksum doesn't hold; make the"
                " plan again"
            )
        with self.folder.open_file(name) as file:
            yield file

    @contextmanager
    def open_parquet(
        self, name: str, columns: pa.Schema, num_rows: int | None = None
    ) -> Iterator[PlanFile]:
        """Open a data file of the plan as what it must be; see `open_file` and `PlanFile`.

        Raises:
            PlanError: the file is absent, or isn't the one that was planned.
        """
        with self.open_file(name) as file:
            where = f"plan {self.folder.uri}: {name}"
            with PlanFile(file, where, columns, num_rows) as parquet:
                yield parquet

    def shard(self, shard_idx: int) -> ShardInfo:
        """What the manifest says of a shard.

        Raises:
            PlanError: the plan has no such shard.
        """
        num_shards = len(self.manifest.shards)
        if not 0 <= shard_idx < num_shards:
            known = f"shards 0 to {num_shards - 1}" if num_shards else "no shards"
            raise PlanError(f"plan {self.folder.uri}: has {known}, not shard {shard_idx}")
        return self.manifest.shards[shard_idx]

    def run_folder(self, shard_idx: int) -> Folder:
        """Where the parts of a shard lie.

        Raises:
            PlanError: the plan has no such shard.
        """
        self.shard(shard_idx)
        return self.folder.child("runs", f"shard-{shard_idx:05d}")

    def note_predecessors(self) -> None:
        """Note which other plans of this job and partition there are: they are older than this.

        Written each time that planning gives this plan, and before its manifest completes it.
        A plan's own content says nothing of when it was made.
        """
        found = filter(None, map(_FOLDER.fullmatch, self._siblings().subfolder_names()))
        plan_ids = {match[1] for match in found} - {self.manifest.plan_id}
        note = json.dumps({"predecessors": sorted(plan_ids)}).encode()
        self.folder.write_bytes(PREDECESSORS_FILE, note)

    def mark_predecessors(self, published: Publication | None) -> None:
        """Note in the folders of older plans that this one's outputs take the place of theirs.

        Whether they have been committed or not: a late commit would bring old outputs back.

        Args:
            published: whose outputs are about to be replaced; it counts as older, too.
        """
        plan_id, siblings = self.manifest.plan_id, self._siblings()
        older = {
            each
            for each in _predecessors(self.folder)
            # Unless it was planned once more since.
            if plan_id not in _predecessors(siblings.child(f"plan-{each}"))
        }
        if published is not None:
            older.add(published.plan_id)
        for each in sorted(older - {plan_id}):
            folder = siblings.child(f"plan-{each}")
            if folder.exists(MANIFEST_FILE):
                self.mark_superseded_at(folder, by=plan_id)

    def _siblings(self) -> Folder:
        return Folder(self.folder.fs, self.folder.path.rpartition("/")[0])

    @staticmethod
    def mark_superseded_at(folder: Folder, *, by: str) -> None:
        """Note in a plan's folder that the outputs of plan `by` take the place of its own."""
        folder.write_bytes(SUPERSEDED_FILE, json.dumps({"superseded_by": by}).encode())

    def mark_current(self) -> None:
        """Take the note away: the input was planned again and gave this plan."""
        self.folder.remove(SUPERSEDED_FILE)

    def check_current(self) -> None:
        """Refuse a plan whose outputs were replaced by a later plan's.

        Raises:
            PlanError: committing it would bring old outputs back.
        """
        if self.folder.exists(SUPERSEDED_FILE):
            raise PlanError(
                f"plan {self.folder.uri}: a later plan's outputs have replaced this one's; to bring"
                " these back, plan the job again with the input and spec that they were made from"
            )


def _predecessors(folder: Folder) -> list[str]:
    """Ids of older plans, as noted in a plan's folder; none in those of older releases."""
    try:
        found = json.loads(folder.read_bytes(PREDECESSORS_FILE))["predecessors"]
        return [each for each in found if _FOLDER.fullmatch(f"plan-{each}")]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, RecursionError):
        _log.warning("%s/%s can't be read", folder.uri, PREDECESSORS_FILE)
        return []


def check_partition(ds: str) -> None:
    """Refuse what can't name a partition: any text can.

    Raises:
        SpecError: it is empty, or holds what no text does.
    """
    if not ds:
        raise SpecError("ds: is empty; name a partition, such as 2026-01-31")
    try:
        is_text = b"\0" not in ds.encode()
    except UnicodeEncodeError:  # bytes of an argument that aren't UTF-8
        is_text = False
    if not is_text:
        raise SpecError(f"ds: {ds!r} isn't text that can name a partition")


def check_publisher(table: LakeTable, spec: JobSpec, ds: str) -> Publication | None:
    """Which of the job's plans partition `ds` holds the outputs of, None if it has none.

    Raises:
        TableError: the partition was published by another job, for another partition, or by
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


def job_folder(spec: JobSpec, ds: str) -> Folder:
    """Where the plans of a job and partition lie.

    Raises:
        SpecError: see `check_partition`.
    """
    check_partition(ds)
    name = quote(ds, safe="")
    if name in (".", ".."):  # a value like any other, but not as a folder's name
        name = name.replace(".", "%2E")
    return job_root(spec).child(name)


def job_root(spec: JobSpec) -> Folder:
    """Where the folders of a job's partitions lie, named as `unquote` reads it."""
    return Folder.open(spec.output.staging_folder).child("_batchllm", spec.name)
