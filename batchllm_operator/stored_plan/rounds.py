"""What the plans of later rounds take from those before: the input, and the answers."""

from dataclasses import replace
from typing import Final, Literal, Self

import pyarrow as pa

from batchllm_operator.lake import InputFile, Snapshot
from batchllm_operator.spec import FilterTerm
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_json import StoredJson
from batchllm_operator.stored_plan.stored_plan import StoredPlan

INPUT_FILE: Final = "input.json"


class PinnedInput(StoredJson):
    """A `Snapshot` without what only a first look at it needs, and its version."""

    what = "pinned input"
    version_field = "input_version"
    cure = "make the plan again"

    input_version: Literal[1] = 1
    partition: str
    files: tuple[InputFile, ...]
    """Partition columns' values as text, without bounds."""
    columns: str
    """Of `Snapshot.schema`, as Arrow serializes it, in hexadecimal digits."""
    columns_in_files: str | None
    conditions: tuple[FilterTerm, ...]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        return cls(
            partition=snapshot.partition,
            files=tuple(map(_bare, snapshot.files)),
            columns=_text(snapshot.schema),
            columns_in_files=snapshot.in_files and _text(snapshot.in_files),
            conditions=snapshot.conditions,
        )

    def snapshot(self, version: str) -> Snapshot:
        """The partition at this version of its table."""
        in_files = None if self.columns_in_files is None else _schema(self.columns_in_files)
        return Snapshot(
            self.partition,
            version,
            self.files,
            _schema(self.columns),
            in_files=in_files,
            conditions=self.conditions,
        )


def plans_of_rounds(plan: StoredPlan) -> list[StoredPlan]:
    """The plan of a round, after those of the rounds before; raises as `StoredPlan.open`."""
    if plan.manifest.before is None:
        return [plan]
    parent = Folder(plan.folder.fs, plan.folder.path.rpartition("/")[0])
    before = StoredPlan.open(parent.child(f"plan-{plan.manifest.before}").uri)
    return [*plans_of_rounds(before), plan]


def _bare(file: InputFile) -> InputFile:
    texts = {name: value if value is None else str(value) for name, value in file.values.items()}
    return replace(file, values=texts, lowest={}, highest={})


def _text(schema: pa.Schema) -> str:
    return bytes(schema.serialize()).hex()


def _schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(text)))
