"""Files that tasks make, in a folder beside the plans, under names by their content.

A task that runs twice writes the same file twice. At last each gets its name in the plan's folder.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batchllm_operator.errors import StorageError
from batchllm_operator.spark.tasks import reported, reports_of, rows_of, tasks
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder, remove_files
from batchllm_operator.stored_plan.counts import Frozen
from batchllm_operator.stored_plan.manifest import DataFile, describe_file
from batchllm_operator.stored_plan.stored_plan import job_folder

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

OPEN_FILE: Final = "open"
"""While the folder has it, tasks may write there."""
_FILES_PER_TASK: Final = 16
_LAST_WRITES_S: Final = 2.0
"""For which tasks may still write a file that they have begun."""


class StagedFile(Frozen):
    """A Parquet file, and its name in the staging folder."""

    name: str
    num_rows: int
    described: DataFile


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A task's temporary folder, on the disk that Spark was given."""
    disk: str | None = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    if not disk or not Path(disk).is_dir():
        disk = None
    with tempfile.TemporaryDirectory(prefix="batchllm-task-", dir=disk) as scratch:
        yield Path(scratch)


@dataclass(frozen=True, slots=True)
class Staging:
    """The staging folder of one run of the planner, as a URI: tasks open it themselves."""

    uri: str

    @classmethod
    def beside(cls, spec: JobSpec, ds: str) -> Staging:
        """A new one, beside the plans of the job and partition."""
        return cls(job_folder(spec, ds).child(f"staged-{uuid.uuid4().hex}").uri)

    def publish(self, path: Path, stem: str, num_rows: int) -> StagedFile:
        """Copy a task's local file into the folder, unless the driver has closed it."""
        described = describe_file(path)
        name = f"{stem}-{described.sha256}.parquet"
        folder = Folder.open(self.uri)
        if not folder.exists(OPEN_FILE):
            raise StorageError(f"{self.uri}: the driver has stopped; no more files are taken")
        folder.publish_file(path, name)
        return StagedFile(name=name, num_rows=num_rows, described=described)

    def open(self, spark: SparkSession) -> None:
        """Open the folder for tasks, and check that the driver sees what they write."""
        faults = reports_of(tasks(spark, [self.uri], str, _opened), str)
        if faults:
            raise StorageError(f"Spark's executors can't write the plan: {faults[0]}")
        if not Folder.open(self.uri).exists(OPEN_FILE):
            raise StorageError(
                f"{self.uri}: the driver doesn't see what Spark's executors write there; set"
                " output.staging_uri to a folder that all of them share"
            )

    def name_files(
        self, spark: SparkSession, names: Sequence[tuple[str, str]], target: Folder
    ) -> None:
        """Give files, by pairs of name and new name, their names in the plan's folder."""
        dealt = [names[at : at + _FILES_PER_TASK] for at in range(0, len(names), _FILES_PER_TASK)]
        copy = partial(_copied, self.uri, target.uri)
        rows_of(tasks(spark, dealt, list[tuple[str, str]], copy))

    def close(self) -> None:
        """Keep tasks of a job that has failed or was stopped from writing here; takes seconds."""
        folder = Folder.open(self.uri)
        with suppress(StorageError):
            if folder.exists(OPEN_FILE):
                folder.remove(OPEN_FILE)
                time.sleep(_LAST_WRITES_S)

    def remove(self) -> None:
        """Remove the folder; what can't be removed is left to `batchllm gc`."""
        folder = Folder.open(self.uri)
        with suppress(StorageError):
            remove_files(folder, folder.find())


def _opened(uri: str) -> Iterator[pa.RecordBatch]:
    """In a task: open a staging folder, or report why not; Spark would try an error again."""
    try:
        Folder.open(uri).write_bytes(OPEN_FILE, b"written by a task")
        yield reported()
    except StorageError as error:
        yield reported(str(error))


def _copied(source: str, target: str, names: Sequence[tuple[str, str]]) -> Iterator[pa.RecordBatch]:
    """In a task: give files of folder `source` their names in folder `target`."""
    for name, new_name in names:
        Folder.open(source).copy_to(name, Folder.open(target), new_name)
    yield reported()
