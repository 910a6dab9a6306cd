"""A plan in the lake: where its files lie, and whether they are what they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO
from urllib.parse import quote

from batchllm_operator.errors import PlanError
from batchllm_operator.lake import Folder
from batchllm_operator.planner.plan import MANIFEST_FILE, PlanManifest
from batchllm_operator.spec import JobSpec


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
            raise PlanError(f"plan {self.folder.uri}: {name} is missing") from error
        if found != expected.sha256:
            raise PlanError(
                f"plan {self.folder.uri}: {name} is corrupted: its checksum doesn't hold; make the"
                " plan again"
            )
        with self.folder.open_file(name) as file:
            yield file

    def run_folder(self, shard_idx: int) -> Folder:
        """Where the parts of a shard lie.

        Raises:
            PlanError: the plan has no such shard.
        """
        num_shards = len(self.manifest.shards)
        if not 0 <= shard_idx < num_shards:
            known = f"shards 0 to {num_shards - 1}" if num_shards else "no shards"
            raise PlanError(f"plan {self.folder.uri}: has {known}, not shard {shard_idx}")
        return self.folder.child("runs", f"shard-{shard_idx:05d}")


def job_folder(spec: JobSpec, ds: str) -> Folder:
    """Where the plans of a job and partition lie."""
    name = quote(ds, safe="")
    if name in (".", ".."):  # a value like any other, but not as a folder's name
        name = name.replace(".", "%2E")
    return Folder.open(spec.output.uri).child("_batchllm", spec.name, name)
