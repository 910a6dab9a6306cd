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
from typing import IO, Any, Final

from batchllm_operator.amounts import counted
from batchllm_operator.batch_file.answer_lines import AnswerLines
from batchllm_operator.batch_file.lines import LINES_FILE, PROMPTS_FILE, LineReader, set_name
from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import SpecError, StorageError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.spec import EngineSpec, JobSpec, parse_spec
from batchllm_operator.storage import Folder

_SETS_FILE: Final = "sets.json"
_TABLE: Final = "prompts"
_ANSWERS: Final = "answers"
_DTYPES: Final = {"half": "float16", "float": "float32"}
_OF_MODEL: Final = ("revision", "trust_remote_code", "reasoning_parser")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Local paths or URIs of a batch."""

    input: str
    """May be an address that HTTP reads (GET)."""
    output: str
    """May be an address that HTTP writes (PUT); so may `errors`."""
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
    targets = [(uri, *_place(uri)) for uri in (files.output, files.errors) if uri is not None]
    with _source(files.input) as (folder, name):
        settings = _Batch(root, sections).job([{"template": "{prompt}"}]).identity
        parts = (folder.sha256(name), settings, given.get("served_model_name"))
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        work = root.child(digest[:16])
        batch = _Batch(work, sections)
        if not work.exists(_SETS_FILE):
            served = ServedModel({"model": model, **given})
            with folder.open_file(name) as file:
                batch.read(file, LineReader(served, adapters, lambda each: batch.job([each])))
    state = json.loads(work.read_bytes(_SETS_FILE))
    answers = batch.answer(state["sets"], state["ds"])
    lines = AnswerLines(work, answers, state["sets"], digest)
    with tempfile.TemporaryDirectory(prefix="batchllm-batch-") as scratch:
        paths = [Path(scratch, str(number)) for number in range(len(targets))]
        lines.write(*paths)
        for path, target in zip(paths, targets, strict=True):
            _publish(path, *target)
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

    def job(self, sets: Sequence[Mapping[str, Any]]) -> JobSpec:
        """One job over the prompts of all sets; a SpecError says why there can't be one."""
        table, output = (self._folder.child(name).uri for name in (_TABLE, _ANSWERS))
        job: dict[str, Any] = {
            "spec_version": 1,
            "name": _ANSWERS,
            "input": {"uri": table, "key": "row"},
            "output": {"uri": output, "staging_uri": self._folder.uri},
            "max_failed_fraction": 1.0,
            "planner": {"memory_budget_bytes": 4 << 30},  # vLLM's modules are in memory, too
        }
        if "url" in sets[0]:  # they differ in what is made of vectors
            embedding = {"normalize": False}
            fields = {"task": "embed", "embedding": embedding, "prompt": {"template": "{prompt}"}}
            job["output"]["carry"] = ["prompt"] if any("top_n" in each for each in sets) else []
        else:
            fields = {
                "prompts": {
                    set_name(number): {**question, "when": [{"column": "set", "value": number}]}
                    for number, question in enumerate(sets)
                }
            }
        return parse_spec({**job, **self._sections, **fields}, source="the request")

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

    def answer(self, sets: Sequence[Mapping[str, Any]], ds: str) -> Folder:
        """Plan, run and commit, unless that is done; where the answers are."""
        answers = self._folder.child(_ANSWERS, f"ds={ds}")
        if sets and not answers.exists("data.parquet"):
            plan = plan_job(self.job(sets), ds)
            run_worker(plan, owner="run-batch")
            commit_run(plan)
        return answers


def _place(uri: str) -> tuple[Folder | None, str]:
    """The folder of a file, and its name there; of what HTTP has no folder, and the whole address.

    Raises `SpecError`: the file can't be replaced.
    """
    if uri.startswith(("http://", "https://")):
        return None, uri
    if "://" not in uri:
        path = Path(uri).resolve()
        if path.exists() and not path.is_file():
            raise SpecError(f"{uri}: isn't a regular file")
        uri = str(path)
    folder, _, name = uri.rpartition("/")
    return Folder.open(folder or "/"), name


@contextmanager
def _source(uri: str) -> Iterator[tuple[Folder, str]]:
    """The folder of a file that is read, and its name there; what HTTP has is fetched first."""
    folder, name = _place(uri)
    with tempfile.TemporaryDirectory(prefix="batchllm-batch-") as scratch:
        try:
            if folder is None:
                with _http(uri) as fs:
                    fs.get_file(uri, f"{scratch}/{_TABLE}")
                folder, name = Folder.open(scratch), _TABLE
            yield folder, name
        except FileNotFoundError as error:
            raise SpecError(f"{uri}: there is no such file") from error


def _publish(path: Path, uri: str, folder: Folder | None, name: str) -> None:
    if folder is not None:
        folder.publish_file(path, name)
        return
    headers = {"Content-Length": str(path.stat().st_size)}  # stores refuse bodies without it
    with _http(uri) as fs:
        fs.put_file(str(path), uri, method="put", headers=headers)


@contextmanager
def _http(uri: str) -> Iterator[Any]:
    """fsspec's file system for HTTP; a StorageError says what a server answered."""
    import aiohttp
    from fsspec.implementations.http import HTTPFileSystem

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=60)
    try:
        yield HTTPFileSystem(client_kwargs={"timeout": timeout})
    except FileNotFoundError:
        raise
    except (OSError, aiohttp.ClientError) as error:
        raise StorageError(f"{uri}: {error}") from error
