"""Outputs by row: their columns, and sorting them on disk from plan order into input order.

They are spread over files of neighbouring rows, and each file is sorted in memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.answers import Answers, PlannedAnswers
from batchllm_operator.errors import PlanError
from batchllm_operator.shards.parts import PART_SCHEMA
from batchllm_operator.spec import JobSpec
from batchllm_operator.streams import batches_of

BUCKET_ROWS: Final = 1 << 16
_MAX_BUCKETS: Final = 256
_SLICE_ROWS: Final = 1 << 14
_SLICE_BYTES: Final = 32 << 20


def _large(field: pa.Field) -> pa.Field:
    """The texts of a bucket may exceed the 2 GiB that `string` can address."""
    return field.with_type(pa.large_string()) if pa.types.is_string(field.type) else field


ROW_FIELD: Final = pa.field("row_idx", pa.int64())
_KEYS: Final = ("request_idx", "row_idxs")


def output_fields(parts: pa.Schema) -> list[pa.Field]:
    """Fields of a part that each of its rows gets."""
    return [_large(field) for field in parts if field.name not in _KEYS]


def output_schema(
    spec: JobSpec, rows_schema: pa.Schema, planned: Sequence[PlannedAnswers]
) -> pa.Schema:
    """Columns of the output table: key, the job's own, carried ones.

    `rows_schema` holds the key and the carried columns; `planned` is of each question.
    """
    answers = list(map(answer_fields, spec.questions, planned))
    own = {field.name: field for field in answers[0]}
    if spec.prompts:
        structs = map(pa.struct, answers)
        own = dict(zip(spec.prompts, map(pa.field, spec.prompts, structs), strict=True))
    carried = [name for name in spec.kept_columns if name not in spec.input.key]
    return pa.schema(
        [
            *(rows_schema.field(name).remove_metadata() for name in spec.input.key),
            *(own.get(name, pa.field(name, pa.string())) for name in spec.output_columns),
            *(rows_schema.field(name).remove_metadata() for name in carried),
        ]
    )


def answer_fields(question: JobSpec, planned: PlannedAnswers) -> list[pa.Field]:
    """Columns of the answers to a question."""
    own = {field.name: field for field in (*PART_SCHEMA, *Answers.of(question, planned).fields)}
    return [own.get(name, pa.field(name, pa.string())) for name in question.answer_columns]


class Outputs(Protocol):
    """Finished outputs of a plan's rows."""

    def parts(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read these columns of parts in batches of requests."""


def spread(
    sources: Sequence[Outputs],
    parts: pa.Schema,
    num_rows: int,
    folder: Path,
    num_questions: int = 1,
) -> tuple[list[Path], int]:
    """Spread outputs, repeated for each row that they stand for, over files in `folder`.

    Returns the files, each of neighbouring rows, and their number of rows. Memory is a few parts,
    whatever the number of rows. Above 16 million rows buckets grow, so that there are at most 256.
    `parts` is the schema of the sources' parts. With several questions, rows are asks here, and a
    file has all asks of its rows. Raises `PlanError`: an output is for a row beyond `num_rows`.
    """
    bucket_rows = max(BUCKET_ROWS, -(-num_rows // _MAX_BUCKETS))
    bucket_rows = -(-bucket_rows // num_questions) * num_questions
    paths = [folder / f"bucket-{idx}" for idx in range(-(-num_rows // bucket_rows))]
    schema = pa.schema([ROW_FIELD, *output_fields(parts)])
    with ExitStack() as stack:
        writers = [stack.enter_context(pa.ipc.new_stream(path, schema)) for path in paths]
        parts_read = read_all(sources, ["row_idxs", *schema.names[1:]])
        rows = (_SLICE_ROWS, attrgetter("num_rows"))
        size = (_SLICE_BYTES, pa.Table.get_total_buffer_size)
        # A small table costs as much as a large one: a piece of each bucket.
        for tables in batches_of(parts_read, rows, size):
            for outputs in one_per_row(pa.concat_tables(tables), schema):
                of_bucket = outputs["row_idx"].to_numpy() // bucket_rows
                bucket_idxs, starts = np.unique(of_bucket, return_index=True)
                ends = [*starts[1:], len(of_bucket)]
                for idx, start, end in zip(bucket_idxs, starts, ends, strict=True):
                    if not 0 <= idx < len(writers):
                        raise PlanError(f"a part answers a row beyond the plan's {num_rows}")
                    writers[idx].write_table(outputs.slice(start, end - start))
    return paths, bucket_rows


def read_bucket(path: Path) -> pa.Table:
    """A bucket's outputs, sorted by `row_idx`: that column, then `output_fields`."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
        outputs = reader.read_all().combine_chunks()
        return outputs.take(pc.sort_indices(outputs["row_idx"]))


def read_all(sources: Sequence[Outputs], columns: Sequence[str]) -> Iterator[pa.Table]:
    for source in sources:
        yield from source.parts(columns)


def read_asked(
    sources: Sequence[Outputs], question: int, num_questions: int, columns: Sequence[str]
) -> Iterator[pa.Table]:
    """As `read_all`, only the outputs of a question; `row_idxs` is among the columns."""
    for part in read_all(sources, columns):
        if num_questions > 1:
            asks = pc.list_element(part["row_idxs"], 0).to_numpy()
            part = part.filter(pa.array(asks % num_questions == question))
        yield part


def one_per_row(part: pa.Table, schema: pa.Schema) -> Iterator[pa.Table]:
    """The outputs of a part's requests, repeated for each row that a request stands for.

    Yields slices, as one request may stand for millions of rows; within a slice, rows ascend. For
    a duplicate row all prompt tokens count as cached.
    """
    row_idxs = part["row_idxs"].combine_chunks()
    request = pc.list_parent_indices(row_idxs).to_numpy()
    rows = pc.list_flatten(row_idxs).to_numpy()
    is_repeat = np.zeros(len(request), dtype=bool)
    is_repeat[1:] = request[1:] == request[:-1]
    columns = part.select(schema.names[1:]).cast(schema.remove(0)).combine_chunks()
    for start in range(0, len(request), _SLICE_ROWS):
        some = rows[start : start + _SLICE_ROWS]
        order = np.argsort(some, kind="stable")
        chosen = start + order
        table = columns.take(pa.array(request[chosen]))
        table = table.add_column(0, "row_idx", pa.array(some[order]))
        cached = pc.if_else(
            pa.array(is_repeat[chosen]), table["num_prompt_tokens"], table["num_cached_tokens"]
        )
        position = table.schema.get_field_index("num_cached_tokens")
        yield table.set_column(position, "num_cached_tokens", cached).cast(schema)
