"""A batch file, answered: read into prompts, which a job asks, and written as lines."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, cast

from batchllm_operator.amounts import counted
from batchllm_operator.batch_file.answer_lines import AnswerLines
from batchllm_operator.batch_file.lines import LINES_FILE, PROMPTS_FILE, LineReader
from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import SpecError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.spec import EngineSpec, JobSpec, parse_spec
from batchllm_operator.storage import Folder

_SETS_FILE: Final = "sets.json"
_TABLE: Final = "prompts"
_DTYPES: Final = {"half": "float16", "float": "float32"}
_OF_MODEL: Final = ("revision", "trust_remote_code", "reasoning_parser")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Local paths or URIs of a batch."""

    input: str
    output: str
    errors: str | None
    """For error lines, which are among the others if it is None."""
    work: str
    """A folder for what a later call goes on from."""


def run_batch(
    files: BatchFiles,
    model: str,
    arguments: Sequence[str],
    engine: Mapping[str, Any],
    adapters: Mapping[str, str],
) -> dict[str, Any]:
    """Answer a batch file; the same call again goes on, or only writes the output.

    Args:
        arguments: vLLM's engine arguments, as on its command line.
        engine: fields of a spec's `engine`.
        adapters: paths of LoRA adapters by name.

    Returns the numbers of lines, errors and sets.

    Raises:
        SpecError: vLLM or a job refuses an argument.
        StorageError: a file can't be read or written.
        EngineError: the engine can't start, or keeps dying.
    """
    from batchllm_operator.engine.vllm.openai_requests import ServedModel, parse_arguments

    try:
        given = parse_arguments(arguments)
    except ValueError as error:
        raise SpecError(f"vLLM's arguments: {error}") from error
    sections, root = _sections(model, given, engine, adapters), Folder.open(files.work)
    settings = _Batch(root, sections).job("any", {"prompt": {"template": "{prompt}"}}).identity
    digest = _digest(files.input, settings, given.get("served_model_name"))
    work = root.child(digest[:16])
    batch = _Batch(work, sections)
    places = [_place(uri) for uri in (files.output, files.errors) if uri is not None]
    if not work.exists(_SETS_FILE):
        served = ServedModel({"model": model, **given})
        with _opened(files.input) as file:
            batch.read(file, LineReader(served, adapters, lambda each: batch.jobs([each])))
    state = json.loads(work.read_bytes(_SETS_FILE))
    answers = batch.answer(state["sets"], state["ds"])
    lines = AnswerLines(work, answers, state["sets"], digest)
    with tempfile.TemporaryDirectory(prefix="batchllm-batch-") as scratch:
        paths = [Path(scratch, str(number)) for number in range(len(places))]
        lines.write(*paths)
        for path, (folder, name) in zip(paths, places, strict=True):
            folder.publish_file(path, name)
    return {
        "num_lines": lines.num_lines,
        "num_errors": lines.num_errors,
        "num_sets": len(state["sets"]),
        "work": work.uri,
    }


def _sections(
    model: str, given: Mapping[str, Any], engine: Mapping[str, Any], adapters: Mapping[str, str]
) -> dict[str, Any]:
    """The sections `model` and `engine` of a spec for vLLM's arguments."""
    given = {name: value for name, value in given.items() if name != "served_model_name"}
    if "dtype" in given:
        given["dtype"] = _DTYPES.get(given["dtype"], given["dtype"])
    path = Path(model)
    of_model: dict[str, Any] = {"path": str(path.resolve()) if path.is_dir() else model}
    of_model |= {name: given.pop(name) for name in _OF_MODEL if name in given}
    if adapters:
        of_model |= {"adapters": dict(adapters), "adapter_column": "adapter"}
    own = {name: given.pop(name) for name in EngineSpec.model_fields if name in given}
    own |= {**engine, "extra_args": given | engine.get("extra_args", {})}
    return {"model": of_model, "engine": own}


class _Batch:
    """A batch file in its folder of work."""

    def __init__(self, folder: Folder, sections: Mapping[str, Any]) -> None:
        self._folder, self._sections = folder, sections

    def job(self, name: str, fields: Mapping[str, Any], *conditions: object) -> JobSpec:
        """A job over the prompts; a SpecError says why there can't be one."""
        table, output = (self._folder.child(each).uri for each in (_TABLE, name))
        base: dict[str, Any] = {
            "spec_version": 1,
            "name": name,
            "input": {"uri": table, "key": "row", "filter": conditions},
            "output": {"uri": output, "staging_uri": self._folder.uri},
            "max_failed_fraction": 1.0,
            "planner": {"memory_budget_bytes": 4 << 30},  # vLLM's modules are in memory, too
        }
        return parse_spec({**base, **self._sections, **fields}, source="the request")

    def jobs(self, sets: Sequence[Mapping[str, Any]]) -> list[tuple[JobSpec, str | None]]:
        """For each set its job, and the column of its answers: one job for all sets of texts, one
        for each of vectors, without such a column.
        """
        asked: dict[str, Any] = {}
        jobs: list[tuple[JobSpec, str | None]] = []
        for number, parameters in enumerate(sets):
            spec, term = parameters["spec"], {"column": "set", "value": number}
            if "task" in spec:
                jobs.append((self.job(f"vectors-{number}", spec, term), None))
            else:
                asked[f"set_{number:03}"] = {**spec, "when": [term]}
        if asked:
            job = self.job("texts", {"prompts": asked})
            jobs += [(job, name) for name in asked]
        return jobs

    def read(self, file: IO[bytes], reader: LineReader) -> None:
        """Read the batch file; the file of sets comes last."""
        ds = datetime.now(UTC).date().isoformat()  # for chat templates that ask for the date
        with tempfile.TemporaryDirectory(prefix="batchllm-batch-") as scratch:
            reader.read(file, Path(scratch))
            self._folder.publish_file(Path(scratch, LINES_FILE), LINES_FILE)
            table = self._folder.child(_TABLE, f"ds={ds}")
            table.publish_file(Path(scratch, PROMPTS_FILE), PROMPTS_FILE)
        state = {"ds": ds, "sets": reader.sets}
        self._folder.write_bytes(_SETS_FILE, json.dumps(state).encode())
        _log.info("the batch file has %s of parameters", counted(len(reader.sets), "set"))

    def answer(self, sets: Sequence[Mapping[str, Any]], ds: str) -> list[tuple[Folder, str | None]]:
        """Plan, run and commit the jobs that aren't yet; for each set where its answers are."""
        jobs = self.jobs(sets)
        names = {spec.name: spec for spec, _ in jobs}
        left = [spec for name, spec in names.items() if not self._folder.exists(f"{name}.done")]
        plans = [plan_job(spec, ds) for spec in left]  # before an engine takes memory
        for plan in plans:
            run_worker(plan, owner="run-batch")
            commit_run(plan)
            self._folder.write_bytes(f"{plan.manifest.spec.name}.done", b"")
        return [(self._folder.child(spec.name, f"ds={ds}"), column) for spec, column in jobs]


def _place(uri: str) -> tuple[Folder, str]:
    """The folder of a file, and its name there; a SpecError refuses what can't be replaced."""
    if "://" not in uri:
        path = Path(uri).resolve()
        if path.exists() and not path.is_file():
            raise SpecError(f"{uri}: isn't a regular file")
        uri = str(path)
    folder, _, name = uri.rpartition("/")
    return Folder.open(folder or "/"), name


@contextmanager
def _opened(uri: str) -> Iterator[IO[bytes]]:
    folder, name = _place(uri)
    try:
        with folder.open_file(name) as file:
            yield file
    except FileNotFoundError as error:
        raise SpecError(f"{uri}: there is no such file") from error


def _digest(uri: str, *more: object) -> str:
    """SHA-256 (hex) of a file's content, and of settings that its lines are read with."""
    with _opened(uri) as file:
        digest = hashlib.file_digest(cast("Any", file), "sha256")
    digest.update(json.dumps(more, sort_keys=True).encode())
    return digest.hexdigest()
