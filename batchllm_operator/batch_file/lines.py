"""Reads a batch file into a table of prompts, and a list of its lines."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.errors import SpecError
from batchllm_operator.streams import batches_of

if TYPE_CHECKING:
    from batchllm_operator.engine.vllm.openai_requests import Asked, ServedModel

LINES_FILE: Final = "lines.parquet"
PROMPTS_FILE: Final = "prompts.parquet"
MAX_SETS: Final = 100
_MAX_LINE_BYTES: Final = 64 << 20
_ROWS_AT_ONCE: Final = 1 << 12
_BYTES_AT_ONCE: Final = 16 << 20
LINES_SCHEMA: Final = pa.schema(
    [
        pa.field("custom_id", pa.string()),
        pa.field("model", pa.string()),
        pa.field("set", pa.int32()),  # of parameters; null with an error
        pa.field("num_rows", pa.int32(), nullable=False),
        pa.field("error", pa.string()),  # JSON: a text, or as of `fault`
    ]
)
_PROMPTS_SCHEMA: Final = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("set", pa.int32(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("adapter", pa.string()),
    ]
)


def fault(message: str, param: str | None = None, status: int = 400) -> dict[str, Any]:
    """Why a line has no answer, as vLLM's server words it."""
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def set_name(number: int) -> str:
    """The prompt of a set, in a job over texts."""
    return f"set_{number:03}"


class LineReader:
    """Reads lines into `folder`: a row for each prompt there, and a row for each line.

    Lines whose requests have the same parameters are of one set.

    Args:
        adapters: names of LoRA adapters, which lines may name as their model.
        check: raises `SpecError` for a set's `Asked.parameters` that can't be in a job.
    """

    def __init__(
        self,
        served: ServedModel,
        adapters: Mapping[str, str],
        check: Callable[[Mapping[str, Any]], object],
    ) -> None:
        self._served, self._adapters, self._check = served, adapters, check
        self._numbers: dict[str, int] = {}
        self.sets: list[dict[str, Any]] = []
        """`Asked.parameters`, by number of the set."""

    def read(self, file: IO[bytes], folder: Path) -> None:
        row = 0
        with (
            pq.ParquetWriter(folder / LINES_FILE, LINES_SCHEMA, compression="zstd") as lines,
            pq.ParquetWriter(folder / PROMPTS_FILE, _PROMPTS_SCHEMA, compression="zstd") as prompts,
        ):
            sizes = (_ROWS_AT_ONCE, lambda _: 1), (_BYTES_AT_ONCE, len)
            for batch in batches_of(_lines(file), *sizes):
                read, asked = list[dict[str, Any]](), list[dict[str, Any]]()
                for text in batch:
                    line, texts = self._line(text)
                    read.append(line)
                    adapter = line["model"] if self._is_adapter(line["model"]) else None
                    for prompt in texts:
                        shared = {"set": line["set"], "adapter": adapter}
                        asked.append({"row": row, "prompt": prompt, **shared})
                        row += 1
                lines.write_table(pa.Table.from_pylist(read, LINES_SCHEMA))
                if asked:
                    prompts.write_table(pa.Table.from_pylist(asked, _PROMPTS_SCHEMA))

    def _is_adapter(self, model: str | None) -> bool:
        return model in self._adapters and model not in self._served.names

    def _line(self, given: bytes) -> tuple[dict[str, Any], list[str]]:
        """The row of a line, and its prompts."""
        from batchllm_operator.engine.vllm.openai_requests import RefusedRequestError

        line: dict[str, Any] = {"custom_id": None, "model": None, "set": None, "num_rows": 0}
        refusal: str | dict[str, Any]
        try:
            data = _parsed(given)
            line["custom_id"] = _text(data, "custom_id")
            _text(data, "method")
            if not isinstance(data.get("body"), dict):
                raise ValueError("body: must be an object")
            asked = self._served.asked(_text(data, "url"), data["body"])
            is_adapter = self._is_adapter(asked.model)
            if asked.model and not is_adapter and asked.model not in self._served.names:
                message = f"The model `{asked.model}` does not exist."
                param = None if self._served.is_pooled else "model"  # as vLLM has it
                raise RefusedRequestError(message, param, 404)
            model = asked.model if is_adapter else self._served.names[0]
            line |= {"set": self._set_of(asked), "num_rows": len(asked.texts), "model": model}
            return line, asked.texts
        except RefusedRequestError as error:
            refusal = str(error)
            if error.param is not False:
                refusal = fault(refusal, error.param, error.status)
        except (ValueError, RecursionError, SpecError) as error:
            refusal = fault(str(error))
        return {**line, "error": json.dumps(refusal)}, []

    def _set_of(self, asked: Asked) -> int:
        key = json.dumps(asked.parameters, sort_keys=True)
        if (known := self._numbers.get(key)) is not None:
            return known
        if len(self.sets) == MAX_SETS:
            raise ValueError(
                f"the file has more than {MAX_SETS} different sets of parameters (whatever a"
                " request has beside its prompt and model); put this line into another file"
            )
        self._check(asked.parameters)
        self.sets.append(asked.parameters)
        return self._numbers.setdefault(key, len(self._numbers))


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines that aren't empty; of longer ones than a limit, the beginning."""
    # A store's own `readline` takes no limit.
    reader = io.BufferedReader(file)  # type: ignore[type-var]
    try:
        while line := reader.readline(_MAX_LINE_BYTES):
            rest = line
            while len(rest) == _MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = reader.readline(_MAX_LINE_BYTES)
            if line := line.strip():
                yield line
    finally:
        reader.detach()


def _parsed(text: bytes) -> dict[str, Any]:
    if len(text) >= _MAX_LINE_BYTES:
        raise ValueError(f"the line is longer than {_MAX_LINE_BYTES:,} bytes")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the line isn't JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError("the line isn't an object with custom_id, method, url and body")
    return data


def _text(data: Mapping[str, Any], name: str) -> str:
    text = data.get(name)
    if not isinstance(text, str):
        raise ValueError(f"{name}: must be a text")
    text.encode()  # half a surrogate pair is a ValueError
    return text
