"""Jobs over the demo table: each command runs as a process, forked from one with its imports."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from support.fork_server import ForkServer
from support.warm_engines import WarmProcess
from tokenizers import Tokenizer

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.prefixes import prefix_sharing_groups
from batchllm_operator.stored_plan.stored_plan import StoredPlan

DS = "2026-01-31"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def snippet_prompt(row: Mapping[str, Any]) -> str:
    """The prompt of a row in a spec of `Demo.write_spec`."""
    question = f"Document: {row['document']}\nQuery: {row['query']}\nSnippet:"
    return f"Write a short snippet that answers the query.\n{question}"


@dataclass(frozen=True)
class Demo:
    """A folder with the demo table and the demo model, and jobs to run there."""

    folder: Path
    commands: ForkServer
    engines: ForkServer
    warm: WarmProcess

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def write_spec(self, name: str, **changes: Any) -> Path:
        """A job spec over the demo; `changes` replace whole sections or add to them."""
        spec: dict[str, Any] = {
            "spec_version": 1,
            "name": name,
            "input": {"uri": "documents", "key": "snippet_id"},
            "prompt": {
                "system": "Write a short snippet that answers the query.\n",
                "template": "Document: {document}\nQuery: {query}\nSnippet:",
            },
            "model": {"path": "./model"},
            "sampling": {"max_tokens": 16},
            "output": {"uri": f"out-{name}", "carry": ["query"]},
            "engine": {
                "dtype": "float32",
                "max_model_len": 2048,
                "max_num_seqs": 32,
                "kv_cache_memory_bytes": 1 << 28,
            },
            "planner": {"num_shards": 1, "part_rows": 40},
        }
        for section, value in changes.items():
            old = spec.get(section)
            if isinstance(old, Mapping) and isinstance(value, Mapping):
                value = {**old, **value}
            spec[section] = value
        spec = {section: value for section, value in spec.items() if value is not None}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(spec), encoding="utf-8")
        return path

    def start(self, *args: str) -> Command:
        """Start a `batchllm` command in a session of its own."""
        server = self.engines if args[0] == "run" else self.commands
        return Command(server, args, self.folder)

    def run(self, *args: str) -> dict[str, Any]:
        """Run a stage to its end, and return its result."""
        result = self.folder / f"result-{uuid.uuid4().hex}.json"
        code, output = self.start(*args, "--result", str(result)).end()
        assert code == 0, output
        return dict(json.loads(result.read_text()))

    def run_module(self, name: str, *args: object) -> str:
        """Run a module of tests/ that starts vLLM; its standard output."""
        environment = {**os.environ, **OFFLINE, "VLLM_LOGGING_LEVEL": "ERROR"}
        ended = self.engines.run(name, [str(arg) for arg in args], env=environment, timeout=600)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def rows(self, before: str = "~") -> list[dict[str, Any]]:
        """The table's rows of packages whose names come before a letter."""
        rows = pq.read_table(self.folder / "documents").to_pylist()
        return [row for row in rows if row["package"] < before]

    def stock(self, kind: str, given: object, model: Path | None = None) -> Any:
        """What stock vLLM makes of something, by a function of `support.stock_vllm`."""
        inputs, outputs = (self.folder / f"{uuid.uuid4()}.json" for _ in range(2))
        inputs.write_text(json.dumps(given))
        self.run_module("support.stock_vllm", kind, model or self.model, inputs, outputs)
        return json.loads(outputs.read_text())

    def run_script(self, name: str, spec: Path) -> dict[str, Any]:
        """What a script of `support.engine_scripts` finds."""
        printed = self.run_module("support.engine_scripts", name, spec)
        return dict(json.loads(printed.splitlines()[-1]))

    def run_job(self, name: str, **changes: Any) -> Job:
        """Plan, run all shards in a warm engine, and commit; `changes` as for `write_spec`."""
        planned = plan_job(self.write_spec(name, **changes), DS)
        assert self.warm.run(planned.folder.uri) == len(planned.manifest.shards)
        report = commit_run(planned).figures()
        return Job(planned, report, pq.read_table(self.folder / f"out-{name}"))


@dataclass(frozen=True)
class Job:
    """What a job has left: the plan, figures of the report, and the published partition."""

    plan: StoredPlan
    report: dict[str, Any]
    table: pa.Table

    def traces(self) -> list[pa.Table]:
        """What the engines noted of their steps."""
        return traces(Path(self.plan.folder.path))


class Command:
    """A `batchllm` command that runs, or has ended."""

    def __init__(self, server: ForkServer, args: Sequence[str], folder: Path) -> None:
        self._log = folder / f"{args[0]}-{uuid.uuid4().hex}.log"
        environment = {**os.environ, **OFFLINE}
        with self._log.open("wb") as log:
            to = log.fileno()
            self._process = server.start(
                "batchllm_operator", args, env=environment, stdout=to, stderr=to
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> tuple[int, str]:
        """Its exit code, once it has ended, and all that it printed."""
        try:
            code = self._process.wait(300)
        finally:
            self._process.kill()
        return code, self._log.read_text(encoding="utf-8")


def traces(plan: Path) -> list[pa.Table]:
    """What the plan's runs have noted of their steps."""
    return [pq.read_table(path) for path in sorted(plan.glob("runs/*/*/trace-*.parquet"))]


def demo_prompts(demo: Demo) -> list[dict[str, Any]]:
    """All rows of the demo table, with the documents' beginnings, as they are planned."""
    tokenizer = Tokenizer.from_file(str(demo.model / "tokenizer.json"))
    rows = pq.read_table(demo.folder / "documents").to_pylist()
    texts = [f"Document: {row['document'][:700]}\nQuery: {row['query']}\nSnippet:" for row in rows]
    groups = prefix_sharing_groups([encoding.ids for encoding in tokenizer.encode_batch(texts)])
    return [
        {
            "tokens": [*prefix, *distinct],
            "group_id": group_id,
            "num_prefix_tokens": len(prefix),
            "group_size": len(members),
        }
        for group_id, (prefix, members) in enumerate(groups)
        for distinct in members
    ]


def live_processes(session_id: int) -> list[int]:
    """Processes of a session that haven't ended (zombies have)."""
    alive = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(session) == session_id and state != "Z":
                alive.append(int(entry.name))
    return alive


def wait_until(
    condition: Callable[[], object], what: str, limit_s: float = 120.0, poll_s: float = 0.05
) -> None:
    """Poll until `condition()` is true; fail, saying `what` was awaited, after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting until {what}"
        time.sleep(poll_s)
