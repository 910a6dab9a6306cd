"""Writes the lines of answers and errors, in the order of the batch file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pyarrow.parquet as pq
from pyarrow.types import is_struct

from batchllm_operator.batch_file.lines import LINES_FILE, fault, set_name
from batchllm_operator.prompts import PROMPT_TOO_LONG
from batchllm_operator.storage import Folder

_ROWS_AT_ONCE: Final = 1 << 12  # of all sets together
_FIELDS: Final = ("response", "embedding", "num_prompt_tokens", "prompt", "error")


class AnswerLines:
    """The lines of a batch file's output.

    Args:
        folder: has the batch file's lines.
        answers: the folder of answers, in the order of the lines; need not exist without sets.
        sets: as of `LineReader`.
        digest: of the batch file. Ids are made of it, so writing again gives the same ones.
    """

    def __init__(
        self,
        folder: Folder,
        answers: Folder,
        sets: Sequence[Mapping[str, Any]],
        digest: str,
    ) -> None:
        self._folder, self._answers, self._sets, self._digest = folder, answers, sets, digest
        self.num_lines = self.num_errors = 0

    def write(self, output: Path, errors: Path | None = None) -> None:
        """Write the local file `output`; error lines go to `errors`, if it is given, instead."""
        with ExitStack() as stack:
            out = stack.enter_context(output.open("w", encoding="utf-8"))
            faulty = None
            if errors is not None:
                faulty = stack.enter_context(errors.open("w", encoding="utf-8"))
            size = max(1, _ROWS_AT_ONCE // (len(self._sets) + 1))
            rows = stack.enter_context(_rows(self._answers, size)) if self._sets else iter(())
            lines = stack.enter_context(self._folder.open_file(LINES_FILE))
            for batch in pq.ParquetFile(lines).iter_batches(batch_size=size):
                for line in batch.to_pylist():
                    answers = [*islice(rows, line["num_rows"])]
                    if answers and (name := set_name(line["set"])) in answers[0]:
                        answers = [row[name] for row in answers]
                    self._write(line, answers, out, faulty)

    def _write(
        self,
        line: Mapping[str, Any],
        answers: Sequence[Mapping[str, Any]],
        out: IO[str],
        faulty: IO[str] | None,
    ) -> None:
        digest = hashlib.sha256(f"{self._digest}:{self.num_lines}".encode()).hexdigest()[:32]
        error, body = json.loads(line["error"] or "null"), None
        wrong = next((row["error"] for row in answers if row["error"] is not None), None)
        if wrong is not None:
            text = ": ".join(filter(None, (wrong["kind"], wrong["message"])))
            param = "input_tokens" if wrong["kind"] == PROMPT_TOO_LONG else None  # as vLLM has it
            error = fault(text, param)
        elif error is None:
            body = self._body(self._sets[line["set"]], answers)
            kind, _, _ = body["id"].partition("-")
            body |= {"id": f"{kind}-{digest}", "model": line["model"]}
        status, place = 200, out
        if error is not None:
            self.num_errors += 1
            status = 400 if isinstance(error, str) else error["error"]["code"]
            if faulty is not None:  # in OpenAI's form
                body = fault(error) if isinstance(error, str) else error
                error, place = None, faulty
        self.num_lines += 1
        response = {"status_code": status, "request_id": f"vllm-batch-{digest}", "body": body}
        record = {"id": f"vllm-{digest}", "custom_id": line["custom_id"]}
        record |= {"response": response, "error": error}
        place.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")

    def _body(
        self, parameters: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The body of a request's answer; of a list of prompts, their answers together."""
        if "embedding" in answers[0]:
            from batchllm_operator.engine.vllm.openai_responses import vector_body

            vectors = np.array([row["embedding"] for row in answers], np.float32)
            lengths = [row["num_prompt_tokens"] for row in answers]
            texts = [row.get("prompt", "") for row in answers]
            return vector_body(vectors, lengths, texts, **parameters)
        body: dict[str, Any]
        body, *others = (json.loads(row["response"]) for row in answers)
        for other in others:
            body["choices"] += other["choices"]
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                body["usage"][name] += other["usage"][name]
        for idx, choice in enumerate(body["choices"]):
            choice["index"] = idx
        return body


@contextmanager
def _rows(folder: Folder, batch_size: int) -> Iterator[Iterator[dict[str, Any]]]:
    """The rows of a published partition."""
    with folder.open_file("data.parquet") as opened:
        file = pq.ParquetFile(opened)
        names = [f"{field.name}." for field in file.schema_arrow if is_struct(field.type)]
        columns = [f"{owner}{name}" for owner in ("", *names) for name in _FIELDS]
        batches = file.iter_batches(batch_size=batch_size, columns=columns)
        yield (row for batch in batches for row in batch.to_pylist())
