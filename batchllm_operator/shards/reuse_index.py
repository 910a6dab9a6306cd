"""The index of a committed plan's outputs by prompt, from which later plans reuse them (ADR 20)."""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.answers import raw_fields
from batchllm_operator.prefixes import TokenTable
from batchllm_operator.shards.buckets import Outputs
from batchllm_operator.shards.parts import part_schema
from batchllm_operator.spec import Decides, JobSpec
from batchllm_operator.stored_plan.manifest import FINGERPRINTS_FILE, REUSED_FILE, describe_file
from batchllm_operator.stored_plan.parquet_files import (
    ROW_GROUP_ROWS,
    PlanFile,
    RowGroupWriter,
)
from batchllm_operator.stored_plan.stored_plan import StoredPlan

INDEX_FILE: Final = "reuse.parquet"
FINGERPRINT_BYTES: Final = 16
BYTES_PER_ENTRY: Final = FINGERPRINT_BYTES + 16
"""Memory per entry during planning: its fingerprint, the number of rows that take it, and which."""
FINGERPRINT_DTYPE: Final = np.dtype(f"S{FINGERPRINT_BYTES}")
FINGERPRINT_FIELD: Final = pa.field("fingerprint", pa.binary(FINGERPRINT_BYTES), nullable=False)
FINGERPRINTS_SCHEMA: Final = pa.schema([FINGERPRINT_FIELD])
"""One row per row of the partition; zeros for rows that can't be prompted."""
INDEX_SCHEMA: Final = pa.schema(
    [
        FINGERPRINT_FIELD,
        pa.field("generated_text", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("num_prompt_tokens", pa.int32()),
        pa.field("num_output_tokens", pa.int32()),
    ]
)
"""One row per distinct prompt that has a text. `Answers.raw_fields` are added."""
_IDENTITY_KEY: Final = b"batchllm.reuse_identity"
_INDEX_VERSION: Final = 1
_BATCH_ROWS: Final = 1 << 16

Fingerprints = npt.NDArray[np.bytes_]


def reuse_identity(
    spec: JobSpec,
    model_version: str,
    tokenizer_fingerprint: str,
    max_model_len: int,
    adapter_versions: Sequence[str] = (),
) -> str:
    """SHA-256 (hex) of everything that decides an output, beside the prompt's token ids.

    The model's version stands for its name or path. The spec's part is what its fields are marked
    with (`OfOutput`).
    """
    content = {
        "index_version": _INDEX_VERSION,
        "model": model_version,
        "tokenizer": tokenizer_fingerprint,
        "max_model_len": max_model_len,
        "adapters": adapter_versions,  # a prompt's fingerprint has its adapter's place among them
        "spec": spec.settings(Decides.OUTPUT),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def reuse_salts(spec: JobSpec, *versions: Any) -> tuple[bytes, ...]:
    """What fingerprints of each question's prompts are salted with, for jobs of several: they tell
    apart what decides the outputs of each; `versions` are the arguments of `reuse_identity`."""
    if not spec.prompts:
        return (b"",)
    identities = (reuse_identity(question, *versions) for question in spec.questions)
    return tuple(bytes.fromhex(identity)[:FINGERPRINT_BYTES] for identity in identities)


def index_schema(spec: JobSpec) -> pa.Schema:
    return pa.schema([*INDEX_SCHEMA, *raw_fields(spec)])


def fingerprints_of(tokens: TokenTable, salts: Iterable[bytes] = repeat(b"")) -> Fingerprints:
    """Fingerprints of the prompts' token ids, each with its salt: [num_prompts] of 16 bytes."""
    data = tokens.token_ids.astype("<i4", copy=False).view(np.uint8).data
    digests = (
        hashlib.blake2b(data[start:end], digest_size=FINGERPRINT_BYTES, person=salt).digest()
        for (start, end), salt in zip(pairwise((tokens.offsets * 4).tolist()), salts, strict=False)
    )
    return np.frombuffer(b"".join(digests), dtype=FINGERPRINT_DTYPE)


def fingerprint_array(fingerprints: Fingerprints) -> pa.Array:
    """Convert to an Arrow array. numpy's own conversion would drop trailing zeros."""
    data = pa.py_buffer(np.ascontiguousarray(fingerprints).view(np.uint8))
    return pa.Array.from_buffers(FINGERPRINT_FIELD.type, len(fingerprints), [None, data])


def from_array(array: pa.Array) -> Fingerprints:
    """The reverse of `fingerprint_array`."""
    start, data = array.offset, array.buffers()[1]
    if data is None:  # of an empty array
        return np.zeros(0, dtype=FINGERPRINT_DTYPE)
    return np.frombuffer(data, dtype=FINGERPRINT_DTYPE)[start : start + len(array)]


def find_places(known: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Positions of `wanted` in the ascending `known`, -1 if absent: int64."""
    if len(known) == 0:
        return np.full(len(wanted), -1, dtype=np.int64)
    found = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[found] == wanted, found, -1)


@dataclass(frozen=True, slots=True, eq=False)
class ReuseIndex:
    """A local copy of a partition's index, with its fingerprints in memory: [n], ascending."""

    ds: str
    path: Path
    fingerprints: Fingerprints
    schema: pa.Schema = INDEX_SCHEMA

    @property
    def num_bytes(self) -> int:
        return len(self.fingerprints) * BYTES_PER_ENTRY

    def places(self, fingerprints: Fingerprints) -> npt.NDArray[np.int64]:
        """Positions in `self.fingerprints`, -1 if absent: int64."""
        return find_places(self.fingerprints, fingerprints)

    def outputs(self) -> Iterator[pa.RecordBatch]:
        with PlanFile(self.path, f"partition {self.ds}: {INDEX_FILE}", self.schema) as file:
            yield from file.iter_batches(ROW_GROUP_ROWS)


def index_fault(path: Path, identity: str, schema: pa.Schema = INDEX_SCHEMA) -> str | None:
    """The reason not to use an intact index; None if it may be used.

    Raises:
        pyarrow.ArrowException: it isn't Parquet.
    """
    found = pq.read_schema(path)
    if not found.equals(schema, check_metadata=False):
        return "it is of another release"
    if (found.metadata or {}).get(_IDENTITY_KEY) != identity.encode():
        return "its model, sampling or engine settings are others"
    return None


def load_fingerprints(path: Path) -> Fingerprints:
    """The fingerprints of an index or of `FINGERPRINTS_FILE`, in file order."""
    with PlanFile(path, path.name, FINGERPRINTS_SCHEMA) as file:
        # Batch by batch: a column that is read at once takes three times the memory.
        fingerprints, start = np.empty(file.metadata.num_rows, dtype=FINGERPRINT_DTYPE), 0
        for batch in file.iter_batches(_BATCH_ROWS, columns=[FINGERPRINT_FIELD.name]):
            fingerprints[start : start + batch.num_rows] = from_array(batch.column(0))
            start += batch.num_rows
    return fingerprints


def write_index(
    plan: StoredPlan, outputs: Sequence[tuple[StoredPlan, Sequence[Outputs]]]
) -> str | None:
    """Write the index of a plan's published outputs, and return its SHA-256 (hex).

    `outputs` are those of the plans of all rounds. Memory is one part, whatever the number of rows.
    None if the spec doesn't ask for an index.
    Raises `PlanError`: a data file of the plan is missing or altered.
    """
    manifest = plan.manifest
    if not manifest.spec.reuse_outputs:
        return None
    identity = reuse_identity(
        manifest.spec,
        manifest.model_version,
        manifest.tokenizer_fingerprint,
        manifest.max_model_len,
        manifest.adapter_versions,
    )
    schema = index_schema(manifest.spec)
    with tempfile.TemporaryDirectory(prefix="batchllm-reuse-") as folder:
        path = Path(folder) / INDEX_FILE
        marked = schema.with_metadata({_IDENTITY_KEY: identity.encode()})
        with RowGroupWriter(path, marked, compression="zstd") as writer:
            for of_round, sources in outputs:
                of_row = _fingerprints_of_rows(of_round, Path(folder))
                for source in sources:
                    for part in source.parts([*schema.names[1:], "row_idxs", "error"]):
                        writer.write(_entries(part, of_row, schema))
        plan.folder.publish_file(path, INDEX_FILE)
        return describe_file(path).sha256


def _entries(part: pa.Table, of_row: Fingerprints, schema: pa.Schema) -> pa.Table:
    """Entries of a part's requests with a text; all rows of a request have one fingerprint."""
    has_text = pc.and_(pc.is_null(part["error"]), pc.is_valid(part["generated_text"]))
    answered = part.filter(has_text)
    first_rows = pc.list_element(answered["row_idxs"], 0).to_numpy()
    columns = [answered[name] for name in schema.names[1:]]
    return pa.table([fingerprint_array(of_row[first_rows]), *columns], schema=schema)


def _fingerprints_of_rows(plan: StoredPlan, folder: Path) -> Fingerprints:
    """The fingerprint of each row: [num_rows], memory-mapped."""
    num_rows, path = plan.manifest.counts.num_rows, folder / plan.manifest.plan_id
    if not num_rows:  # an empty file can't be mapped
        return np.zeros(0, dtype=FINGERPRINT_DTYPE)
    # Written first: a full disk is an error here, but ends the process where a map is written.
    with (
        plan.open_parquet(FINGERPRINTS_FILE, FINGERPRINTS_SCHEMA, num_rows) as source,
        path.open("wb") as target,
    ):
        for batch in source.iter_batches(_BATCH_ROWS):
            target.write(from_array(batch.column(0)).data)
    return np.memmap(path, FINGERPRINT_DTYPE, "r")


@dataclass(frozen=True, slots=True)
class ReusedOutputs:
    """A plan's reused outputs, read like the parts of a shard."""

    plan: StoredPlan

    def parts(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read the outputs in batches. Raises `PlanError` if the file is missing or altered."""
        if REUSED_FILE not in self.plan.manifest.files:
            return
        with self.plan.open_parquet(REUSED_FILE, part_schema(self.plan.manifest.spec)) as file:
            for batch in file.iter_batches(ROW_GROUP_ROWS, columns=list(columns)):
                yield pa.Table.from_batches([batch])
