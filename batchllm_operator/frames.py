"""A DataFrame's rows, answered by a model: a job over a snapshot of them in a cache folder."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from batchllm_operator.amounts import first_of
from batchllm_operator.child_processes import run_command
from batchllm_operator.errors import SpecError, TableError, one_line
from batchllm_operator.lake.parquet.table import DATA_FILE
from batchllm_operator.lake.places import find_place
from batchllm_operator.model.files import folder_digest
from batchllm_operator.named_file import write_file
from batchllm_operator.spec import JobSpec, PromptSpec, load_spec

_ROW: Final = "_batchllm_row"
"""The key: a row's position."""
_DAY: Final = "_batchllm_day"
"""The partition column: the day of the first call, which chat templates may ask for."""
_NOT_ANSWERS: Final = frozenset({_ROW, "model", "run_id"})
_FIELDS_OF_FRAMES: Final = ("spec_version", "name", "input", "output", "on_unmet")
_ROWS_AT_ONCE: Final = 1 << 16
_MOST_NAMED: Final = 10


def generate(
    frame: Any,
    template: str | None = None,
    *,
    model: str | Path | Mapping[str, Any],
    cache: str | Path | None = None,
    **fields: Any,
) -> Any:
    """Answer each row of a frame; returns the frame with the answers as further columns.

    They are the [output columns](output-columns.md) of the job, without `model` and `run_id`. A row
    without an answer has `status` and `error`, and raises nothing unless `max_failed_fraction`,
    here 1 by default, says so. Rows keep their order, a pandas frame its index; `frame` itself
    stays as it is.

    The job runs in a process of its own, whose progress goes to stderr. The columns that it reads,
    and its outputs, lie in a folder of `cache`, found by their content, the model and the fields:
    after Ctrl-C or a kill the same call goes on, and once finished it returns at once. What is in
    the cache stays until you remove it.

    Args:
        frame: a DataFrame of pandas or polars, or any table with `__arrow_c_stream__`, such as
            pyarrow's or DuckDB's, which returns as a `pyarrow.Table`.
        template: as `prompt.template` in the [job spec](job-spec.md).
        model: a folder or a name on the hub, or the fields of the spec's `model`.
        cache: a folder; by default `batchllm` in `$XDG_CACHE_HOME` or `~/.cache`.
        fields: all other fields of the spec, such as `sampling={"max_tokens": 40}`; those of
            `prompt` may be given without it: `system="Be brief."`.

    Raises:
        SpecError: a field is wrong, or names a column that the frame lacks.
        TableError: this isn't a frame, a column can't be read, or names aren't text, are there
            twice or are those of answers.
        BatchLLMError: the job fails; what is finished is kept.
    """
    spec = _spec(template, model, fields)
    library = next(filter(lambda name: _is_frame_of(name, frame), ("pandas", "polars")), None)
    if library is None:
        frame = _as_table(frame)
    names = list(frame.column_names if library is None else frame.columns)
    _check_names(names, spec)
    answers = _answer(_rows(frame, names, spec), spec, _cache_folder(cache))
    if library == "pandas":
        return frame.assign(**answers.to_pandas().set_axis(frame.index))
    if library == "polars":
        return frame.hstack(sys.modules["polars"].from_arrow(answers))
    for field, column in zip(answers.schema, answers.columns, strict=True):
        frame = frame.append_column(field, column)
    return frame


def _spec(
    template: str | None, model: str | Path | Mapping[str, Any], fields: Mapping[str, Any]
) -> JobSpec:
    """The job, with placeholders for its tables; raises `SpecError`."""
    if made := [name for name in _FIELDS_OF_FRAMES if name in fields]:
        raise SpecError(f"generate: {made[0]} is made from the frame; leave it out")
    of_prompt = {name: fields[name] for name in PromptSpec.model_fields if name in fields}
    if template is not None:
        of_prompt["template"] = template
    given = fields.get("prompt", {})
    if of_prompt and isinstance(given, Mapping):
        fields = {**fields, "prompt": {**given, **of_prompt}}
    if not isinstance(model, Mapping):
        model = {"path": model if isinstance(model, str) else str(Path(model).absolute())}
    return load_spec(
        {
            "spec_version": 1,
            "name": "frame",
            "input": {"uri": "/rows", "key": _ROW, "partition_column": _DAY},
            "model": model,
            "output": {"uri": "/answers"},
            "on_empty": "commit",
            "max_failed_fraction": 1.0,
            **{name: value for name, value in fields.items() if name not in of_prompt},
        }
    )


def _is_frame_of(library: str, frame: Any) -> bool:
    """Whether it is a DataFrame of pandas or polars, which is imported then."""
    return isinstance(frame, getattr(sys.modules.get(library), "DataFrame", ()))


def _as_table(frame: Any) -> pa.Table:
    if not hasattr(frame, "__arrow_c_stream__") and not _is_frame_of("pandas", frame):
        raise TableError(
            f"generate: {type(frame).__name__} isn't a frame: pass a DataFrame of pandas or polars,"
            " a pyarrow Table, or another table with __arrow_c_stream__; of a lazy frame, what its"
            " collect() returns"
        )
    try:
        return pa.table(frame)
    except Exception as error:  # each library has its own errors
        raise TableError(
            f"generate: {type(frame).__name__} can't be read as an Arrow table:"
            f" {one_line(error)}; cast the column to text, say, or pass a frame of the columns"
        ) from error


def _check_names(names: Sequence[Any], spec: JobSpec) -> None:
    if others := [name for name in names if not isinstance(name, str)]:
        raise TableError(
            f"generate: column name {others[0]!r} of the frame isn't text; rename it, such as by"
            " frame.columns = frame.columns.map(str)"
        )
    if twice := [name for name, number in Counter(names).items() if number > 1]:
        raise TableError(f"generate: the frame has two columns {twice[0]!r}; rename one")
    taken = {_ROW, _DAY, *spec.output_columns} - {"model", "run_id"}
    if both := [name for name in names if name in taken]:
        raise TableError(
            f"generate: the frame has a column {both[0]!r}, as the answers do; rename or drop it"
        )


def _rows(frame: Any, names: Sequence[str], spec: JobSpec) -> pa.Table:
    """The columns that the job reads, in the spec's order, and each row's position."""
    places = [name for name in spec.input_columns if name != _ROW]
    starts = [(name, (f"{name}.", f"{name}[", f"`{name}`")) for name in names]
    used = [
        name
        for name, inside in starts
        if any(place == name or place.startswith(inside) for place in places)
    ]
    if isinstance(frame, pa.Table):
        read = frame.select(sorted(used))
    else:
        part = frame[sorted(used)]
        read = _as_table(part.reset_index(drop=True) if _is_frame_of("pandas", part) else part)
    if absent := [place for place in places if find_place(read.schema, place) is None]:
        raise SpecError(
            f"generate: the frame has no column {absent[0]!r}; it has"
            f" {first_of([*names], _MOST_NAMED)}"
        )
    columns = [*map(_decoded, read.columns), np.arange(len(frame))]
    return pa.table(columns, names=[*read.column_names, _ROW])


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values of a column of categories, as Parquet can't write those of polars."""
    if not pa.types.is_dictionary(column.type):
        return column
    kind = column.type.value_type
    kind = pa.large_string() if pa.types.is_string_view(kind) else kind
    chunks = [chunk.dictionary.cast(kind).take(chunk.indices) for chunk in column.chunks]
    return pa.chunked_array(chunks, kind)


def _cache_folder(given: str | Path | None) -> Path:
    folder = Path(given or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "batchllm")
    folder = folder.expanduser().absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _answer(rows: pa.Table, spec: JobSpec, cache: Path) -> pa.Table:
    """The answers to rows, in their order: from the cache, or from a job there."""
    with tempfile.TemporaryDirectory(prefix=".rows-", dir=cache) as scratch:
        file = Path(scratch) / "rows.parquet"
        folder = cache / _store(rows, file, spec)
        days = sorted(folder.glob(f"rows/{_DAY}=*"))
        if not days:
            days = [folder / "rows" / f"{_DAY}={datetime.now(UTC):%Y-%m-%d}"]
            days[0].mkdir(parents=True, exist_ok=True)
        if not (days[0] / file.name).exists():
            file.replace(days[0] / file.name)
    day = days[0].name.partition("=")[2]
    published = folder / "answers" / days[0].name / DATA_FILE
    if not published.exists():
        job = spec.model_dump(mode="json")
        job["input"]["uri"], job["output"]["uri"] = str(folder / "rows"), str(folder / "answers")
        path = folder / "job.yaml"
        write_file(path, yaml.safe_dump(job, sort_keys=False).encode())
        run_command(["job", "--job", path, "--ds", day], {"TQDM_MININTERVAL": "1"})
    table = pq.ParquetFile(published).read().replace_schema_metadata()
    return table.drop_columns([name for name in table.column_names if name in _NOT_ANSWERS])


def _store(rows: pa.Table, file: Path, spec: JobSpec) -> str:
    """Write rows as Parquet; returns a digest of them and of all that decides the answers.

    Equal rows are equal bytes, however a table is cut into chunks.
    """
    with pq.ParquetWriter(file, rows.schema, compression="zstd") as writer:
        for start in range(0, rows.num_rows, _ROWS_AT_ONCE):
            writer.write_table(rows.slice(start, _ROWS_AT_ONCE).combine_chunks())
    with file.open("rb") as opened:
        digests = [hashlib.file_digest(opened, "sha256").hexdigest(), spec.identity]
    models = map(Path, [spec.model.path, *spec.model.adapters.values()])
    digests += [folder_digest(each) for each in models if each.is_absolute() and each.is_dir()]
    return hashlib.sha256("\0".join(digests).encode()).hexdigest()[:32]
