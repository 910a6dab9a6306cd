"""Jobs over the demo table: each command runs as a process, as users run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from tokenizers import Tokenizer

from batchllm_operator.planner import prefix_sharing_groups

DS = "2026-01-31"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Demo:
    """A folder with the demo table and the demo model, and jobs to run there."""

    folder: Path

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
            "engine": {"dtype": "float32", "max_num_seqs": 32},
            "planner": {"num_shards": 1, "part_rows": 40},
        }
        for section, value in changes.items():
            old = spec.get(section)
            merge = isinstance(old, Mapping) and isinstance(value, Mapping)
            spec[section] = {**old, **value} if merge else value
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(spec), encoding="utf-8")
        return path

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "batchllm_operator.cli", *args]

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        """Start a `batchllm` command in a session of its own."""
        return subprocess.Popen(
            self.command(*args),
            env={**os.environ, **OFFLINE},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )

    def run(self, *args: str, expect: int = 0) -> dict[str, Any]:
        """Run a stage to its end, and return its result."""
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        process = self.start(*args, "--result", str(result))
        output, _ = process.communicate(timeout=300)
        assert process.returncode == expect, output
        return dict(json.loads(result.read_text())) if expect == 0 else {"output": output}


def demo_prompts(demo: Demo) -> list[dict[str, Any]]:
    """All rows of the demo table, with the documents' beginnings, as they are planned."""
    tokenizer = Tokenizer.from_file(str(demo.model / "tokenizer.json"))
    rows = pq.read_table(demo.folder / "documents").to_pylist()
    texts = [f"Document: {row['document'][:700]}\nQuery: {row['query']}\nSnippet:" for row in rows]
    groups = prefix_sharing_groups([each.ids for each in tokenizer.encode_batch(texts)])
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
